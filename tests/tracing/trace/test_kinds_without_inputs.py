"""Questions for containers, asked without example inputs: a graph holds for tensors, or there is none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxopt

X = torch.randn(3, 4)


class Given(nn.Module):
    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor:
        return x[0] * 2 if isinstance(x, tuple) else x + 1


class Computed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.max(x, 0)
        return (y[0] if isinstance(y, tuple) else y) + 1


def test_an_argument_may_be_a_container() -> None:
    model = fxopt.capture(Given()).model
    assert torch.equal(model(X), Given()(X))
    assert torch.equal(model((X,)), Given()((X,)))


def test_what_is_computed_may_be_a_container() -> None:
    program = fxopt.capture(Computed())
    assert "only example inputs can give" in program.opaque[""].reason
    assert torch.equal(program.model(X), Computed()(X))
