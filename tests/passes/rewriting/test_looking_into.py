"""Whether a module may be looked into has one answer, which edits give, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fxopt
from fxopt.errors import MatchFailure
from fxopt.passes.rewriting import Edit, reason_against_opening
from fxopt.passes.sites import Site

X = torch.randn(2, 4)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Calling(Inner):
    def __call__(self, *args: object) -> Tensor:
        return super().__call__(*args)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


def hooked(inner: nn.Module) -> None:
    inner.register_forward_hook(lambda *_: None)


def parametrized(inner: nn.Module) -> None:
    inner.register_parameter("weight", nn.Parameter(torch.ones(4, 4)))
    parametrizations.orthogonal(inner)


def with_own_forward(inner: nn.Module) -> None:
    inner.forward = lambda x: x  # type: ignore[method-assign]


CLOSED: dict[str, tuple[type[nn.Module], Callable[[nn.Module], None]]] = {
    "it has hooks": (Inner, hooked),
    "it has parametrizations": (Inner, parametrized),
    "its forward was replaced": (Inner, with_own_forward),
    "it has a __call__ of its own": (Calling, lambda inner: None),
}


@pytest.mark.parametrize("reason", CLOSED)
def test_edits_look_into_no_module_that_must_stay_one_call(reason: str) -> None:
    kind, change = CLOSED[reason]
    program = fxopt.capture(Outer(kind()), (X,))
    inner = program.module("inner")
    assert reason_against_opening(inner) is None or kind is Calling
    change(inner)
    edit = Edit(program, Site(program, "", {}), "test_pass")
    (call,) = edit.graph.find_nodes(op="call_module", target="inner")
    with pytest.raises(MatchFailure, match=f"'inner' must stay one call: {reason}"):
        edit.inline(call)
    assert reason_against_opening(inner) == reason
