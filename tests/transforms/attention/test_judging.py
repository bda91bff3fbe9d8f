"""attention judges kinds by itself: each is compared in float64 and timed once, and the whole model tells the rest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.transforms.attention import attention, judging

LENGTH = 20
WHOLE = "with the whole model"


class Layer(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.function = nn.Linear(8, 24), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(self.function(q, k, v).transpose(1, 2).flatten(2))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.5, -1) @ v


def later(q: Tensor) -> Tensor:
    return torch.ones(q.size(2), q.size(2), dtype=torch.bool).triu(1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.5).masked_fill(later(q), -1e9).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT + torch.arange(q.size(2), dtype=q.dtype).mul(0.1)[None], -1) @ v


def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(k.new_ones(1, q.size(2)).cumsum(1) > 3, -torch.inf).softmax(-1) @ v


def hidden_by_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(k.new_ones(1, q.size(2)).cumsum(1) > 3, -1e30).softmax(-1) @ v


def narrowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v


def one_of_several(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(torch.sort(q)[0], k, v)


def optimized(model: nn.Module, **options: Any) -> tuple[nn.Module, list[Any]]:
    fast = fxopt.optimize(model, "attention", example_inputs=(torch.randn(3, LENGTH, 8),), **options)
    return fast, list(fxopt.plan(fast).decisions)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what is compared with the operator, as it happens."""
    seen, difference = [], judging._difference
    monkeypatch.setattr(
        judging, "_difference", lambda excerpt, given: seen.append(excerpt) or difference(excerpt, given)
    )
    return seen


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let each kind be so many times faster by itself."""

    def be(speed: float) -> None:
        figures = {
            "speedup": speed,
            "speedup_low": speed,
            "speedup_high": speed,
            "before_us": 9.0,
            "after_us": 9 / speed,
        }
        monkeypatch.setattr(judging, "figures_of", lambda before, after, cold: figures)

    return be


@pytest.mark.parametrize("function", [plain, causal, biased, hidden, narrowed, one_of_several])
def test_equal_layers_are_compared_once_and_left_to_the_whole_model(function: Any, compared: list[Any]):
    model, x = nn.Sequential(*(Layer(function) for _ in range(3))).eval(), torch.randn(2, 9, 8)
    fast, decisions = optimized(model, measure=False)
    assert [(each.status, each.figures["checked"]) for each in decisions] == [("applied", WHOLE)] * 3
    assert len(compared) == 1
    torch.testing.assert_close(fast(x), model(x))
    model.train(), fast.train()
    torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(*(torch.autograd.grad(each(x).sum(), [*each.parameters()]) for each in (fast, model)))


@pytest.mark.parametrize("training", [False, True])
def test_what_only_the_data_or_training_tells_is_verified_in_its_place(training: bool, compared: list[Any]):
    model = Layer(plain if training else hidden_by_number).train(training)
    _, (decision,) = optimized(model, measure=False)
    assert (decision.status, decision.figures["checked"]) == ("applied", "float64")
    assert compared == []


WRONG: dict[str, tuple[Callable[..., Tensor], str]] = {
    "another scale": (lambda right, **given: right(**{**given, "scale": 0.51}), "of the scale in float64"),
    "another mask": (lambda right, **given: right(**{**given, "causal": True}), "of the scale in float64"),
    "NaN gone": (lambda right, **given: right(**{**given, "q": given["q"].nan_to_num()}), "hides NaN"),
    "coarse in float32": (lambda right, **given: right(**given) + 1e3 - 1e3, r"of the scale$"),
    "no gradient of v": (
        lambda right, **given: right(**{**given, "v": given["v"].detach() + 0 * given["v"]}),
        "of the scale in float64",
    ),
    "no gradient of the mask": (
        lambda right, **given: right(**{**given, "mask": given["mask"].detach() + 0 * given["mask"].clamp(-9.0)}),
        "of the scale in float64",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kind_that_is_wrong_stays(name: str, monkeypatch: pytest.MonkeyPatch):
    right, (wrong, reason) = attention.attend, WRONG[name]
    kernel = dataclasses.replace(attention._KERNEL, compute=lambda **given: wrong(right, **given))
    monkeypatch.setattr(attention, "_KERNEL", kernel)
    model, x = Layer(biased if name.endswith("of the mask") else plain).eval(), torch.randn(2, 9, 8)
    fast, (decision,) = optimized(model, measure=False)
    assert decision.status == "refused"
    assert re.search(reason, decision.reason)
    assert torch.equal(fast(x), model(x))


def test_a_kind_that_is_not_clearly_faster_stays_and_is_not_compared(timed: Any, compared: list[Any]):
    timed(1.01)
    _, decisions = optimized(nn.Sequential(Layer(plain), Layer(plain)).eval())
    assert [each.status for each in decisions] == ["refused"] * 2
    assert all("not clearly faster by itself: 1.01x" in each.reason for each in decisions)
    assert compared == []


def test_what_a_kind_gains_is_in_the_plan(timed: Any):
    timed(1.5)
    fast, decisions = optimized(nn.Sequential(Layer(plain), Layer(plain)).eval())
    assert all("off by" not in each.reason and each.figures["speedup"] == 1.5 for each in decisions)
    assert all("untimed" not in each.figures for each in decisions)
    _, replayed = optimized(nn.Sequential(Layer(plain), Layer(plain)).eval(), plan=fxopt.plan(fast))
    assert [each.status for each in replayed] == [each.status for each in decisions]


def test_operands_lie_in_memory_as_in_the_model(compared: list[Any]):
    optimized(Layer(plain).eval(), measure=False)
    (excerpt,) = compared
    q, keys, v = excerpt.given()
    assert [q.stride(), v.stride()] == [(LENGTH * 24, 4, 24, 1)] * 2
    assert keys.shape == (3, 2, 4, LENGTH)
    laid = [way(q, keys, v) for way in excerpt.beyond]
    assert [each.shape for each in laid] == [(3, LENGTH, 8)] * 2
    torch.testing.assert_close(*laid)


def test_a_kind_that_cannot_be_run_by_itself_is_verified_in_its_place(monkeypatch: pytest.MonkeyPatch):
    def raising(*_: Any) -> str:
        raise RuntimeError("no such operands")

    monkeypatch.setattr(judging, "_difference", raising)
    _, (decision,) = optimized(Layer(plain).eval(), measure=False)
    assert (decision.status, decision.figures["checked"]) == ("applied", "float64")
