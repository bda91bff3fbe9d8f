"""Layers of one shape are timed once, whatever weights and ranges they have; each of them is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes import timing
from fxopt.passes.timing import Timings

X = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*map(Block, widths)).eval()


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note of which class each module is that is raced; what is rewritten is always twice as fast."""
    seen: list[str] = []

    def timed(candidates: Any, **_: Any) -> Timings:
        seen.append(type(candidates["before"].module).__name__)
        return Timings([{name: 2.0 if name == "before" else 1.0 for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    return seen


def decisions(scheme: str, model: nn.Module) -> list[Any]:
    fast = fxopt.optimize(model, f"quantize{{scheme={scheme}}}", example_inputs=(X,), time_budget=1e6)
    with torch.no_grad():
        assert float((fast(X) - model(X)).abs().max()) < 0.1 * float(model(X).abs().max())
    return list(fxopt.plan(fast).decisions)


@pytest.mark.parametrize(
    ("scheme", "raced", "followers"), [("int8_dynamic", 2, 6), ("int8_weight", 2, 6), ("int8_static", 1, 3)]
)
def test_equal_layers_are_raced_once(scheme: str, raced: int, followers: int, races: list[str]) -> None:
    made = decisions(scheme, net(64, 64, 64, 64))
    assert len(races) == raced + 1  # of each shape one (static: of each chain of both), and the whole model
    assert races[-1] == "Sequential"
    assert [decision.status for decision in made] == ["applied"] * (raced + followers)
    assert all(decision.figures["checked"] for decision in made)
    assert sum("as" in decision.figures for decision in made) == followers


@pytest.mark.parametrize(("scheme", "raced"), [("int8_dynamic", 4), ("int8_static", 2)])
def test_layers_of_other_shapes_are_raced_too(scheme: str, raced: int, races: list[str]) -> None:
    decisions(scheme, net(64, 48, 64))
    assert len(races) == raced + 1


class Gated(nn.Module):
    """Two layers that are quantized one after the other in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.gate(x)) * self.value(x)


def test_a_layer_beside_one_that_is_quantized_is_raced_once(races: list[str]) -> None:
    torch.manual_seed(0)
    made = decisions("int8_static", nn.Sequential(Gated(), Gated(), Gated()).eval())
    assert [decision.status for decision in made] == ["applied"] * 6
    assert races == ["Gated", "Gated", "Sequential"]


def test_ranges_are_each_layers_own() -> None:
    model = net(64, 64)
    with torch.no_grad():
        model[1].up.weight.mul_(5.0)
    made = [decision.site["data"]["layers"] for decision in decisions("int8_static", model)]
    scales = [[layer["scale"] for layer in layers] for layers in made]
    assert scales[0] != scales[1]
