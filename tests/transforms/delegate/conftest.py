"""How the tests of `delegate` know that an engine computed, and how they cut graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.cutting import metas_of
from support.engines import counting
from torch import Tensor, fx, nn

from fxopt.transforms.delegate.delegate import engine_named
from fxopt.transforms.delegate.regions import Cut


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the name of an engine with each call that it computes."""
    found: list[str] = []
    for name in ("openvino", "onnxruntime"):
        kind = type(engine_named(name))
        monkeypatch.setattr(kind, "compile", counting(kind.compile, found))
    return found


@pytest.fixture
def cut() -> Callable[..., Cut]:
    """Return a function that cuts a graph by what its nodes give in a call."""

    def run(graph: fx.Graph, *given: Tensor, root: nn.Module | None = None) -> Cut:
        return Cut(graph, metas_of(graph, *given, root=root))

    return run
