"""How the tests of `delegate` know that an engine computed."""

from __future__ import annotations

import pytest
from support.engines import counting

from fxopt.layers.delegated import engine_named


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the name of an engine with each call that it computes."""
    found: list[str] = []
    for name in ("openvino", "onnxruntime"):
        kind = type(engine_named(name))
        monkeypatch.setattr(kind, "compile", counting(kind.compile, found))
    return found
