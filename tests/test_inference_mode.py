"""Models are captured and optimized in inference mode as outside of it, and can be trained afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.cat([head(x).relu() for head in self.heads], -1)


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("phase", ["eval", "train"])
def test_optimizing_in_inference_mode(made_inside: bool, phase: str) -> None:
    with torch.inference_mode(made_inside):
        model = Heads().train(phase == "train")
    with torch.inference_mode():
        x = torch.randn(5, 4)
        fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,))
        assert torch.is_inference_mode_enabled()
        assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
        torch.testing.assert_close(fast.eval()(x), model.eval()(x))
    assert not any(tensor.is_inference() for tensor in fast.state_dict(keep_vars=True).values())
    fast.train()(torch.randn(5, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in fast.parameters())


def test_capturing_in_inference_mode() -> None:
    model = Heads().eval()
    with torch.inference_mode():
        program = fxopt.capture(model, (torch.randn(5, 4),))
        assert not program.opaque
    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(program.model(x), model(x))
    program.model(x).sum().backward()
    assert x.grad is not None
