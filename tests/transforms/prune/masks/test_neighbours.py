"""N of M: the pattern holds in every layer, and an order of the inputs loses less."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxopt
from fxopt.transforms.prune import Prune, masks
from fxopt.transforms.prune.masks.ranking import order_of_inputs, weakest_of

X = torch.randn(3, 8, 6, 6, generator=torch.Generator().manual_seed(1))


def kept_share(scores: Tensor, gone: Tensor) -> float:
    return float(scores.masked_fill(gone, 0).sum() / scores.sum().clamp(min=1e-30))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.ConvTranspose2d(16, 6, 3), nn.Flatten(), nn.Linear(216, 4))


def groups(flags: Tensor, inputs: int, of: int, order: list[int] | None = None) -> Tensor:
    last = flags.movedim(inputs, -1)
    return (last if order is None else last[..., order]).reshape(-1, of)


@pytest.mark.parametrize(("pattern", "kept", "of"), [("2:4", 2, 4), ("1:4", 1, 4), ("3:8", 3, 8)])
@pytest.mark.parametrize("permute", [False, True])
def test_the_pattern_holds_along_the_inputs(pattern: str, kept: int, of: int, permute: bool):
    model = network()
    fast = fxopt.optimize(model, Prune(method="nm", pattern=pattern, permute=permute), example_inputs=X)
    decisions = {decision.label: decision for decision in fxopt.plan(fast).decisions}
    assert set(masks(fast)) == {"0.weight", "2.weight", "4.weight"}
    for label, inputs in (("0", 1), ("2", 0), ("4", 1)):
        data = decisions[label].site["data"]
        order = data["order"]["weight"] if permute else None
        assert bool((groups(masks(fast)[f"{label}.weight"], inputs, of, order).sum(1) == kept).all())
        assert decisions[label].detail.endswith(
            f"weights are zero, {pattern}, computed dense: there is no sparse kernel for CPUs"
        )
    reference = copy.deepcopy(model)
    for name, flags in masks(fast).items():
        reference.get_parameter(name).data.mul_(flags)
    torch.testing.assert_close(fast(X), reference(X))


def test_the_strongest_of_each_group_stay():
    scores = torch.tensor([[4.0, 1, 2, 3, 0, 0, 9, 8]])
    assert weakest_of(scores, 1, 2, 4).tolist() == [[False, True, True, False, True, True, False, False]]
    order = torch.tensor([0, 6, 4, 5, 1, 2, 3, 7])
    assert weakest_of(scores, 1, 2, 4, order).tolist() == [[False, True, True, False, True, True, False, False]]
    order = torch.tensor([0, 1, 2, 4, 3, 5, 6, 7])
    assert weakest_of(scores, 1, 2, 4, order).tolist() == [[False, True, False, True, True, True, False, False]]


def test_inputs_that_make_no_groups_are_refused():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    fast = fxopt.optimize(model, "prune{method=nm}", example_inputs=torch.randn(3, 6))
    first, second = fxopt.plan(fast).decisions
    assert (first.label, first.reason) == ("0", "the 6 inputs of its weight make no whole groups of 4")
    assert (second.label, second.status) == ("2", "applied")


def test_the_order_is_repeated_by_archives(tmp_path: Path):
    fast = fxopt.optimize(network(), Prune(method="nm", permute=True), example_inputs=X)
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=network())
    assert all(torch.equal(flags, masks(loaded)[name]) for name, flags in masks(fast).items())
    orders = [[d.site["data"]["order"] for d in fxopt.plan(each).decisions] for each in (fast, loaded)]
    assert orders[0] == orders[1]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([(2, 4), (1, 2), (3, 4)]), st.integers(0, 99))
def test_an_order_never_loses_more(rows: int, count: int, pattern: tuple[int, int], seed: int):
    scores = torch.rand(rows, count * pattern[1], generator=torch.Generator().manual_seed(seed))
    order = order_of_inputs(scores, 1, *pattern)
    assert sorted(order.tolist()) == list(range(scores.shape[1]))
    plain, ordered = weakest_of(scores, 1, *pattern), weakest_of(scores, 1, *pattern, order)
    assert int(plain.sum()) == int(ordered.sum()) == rows * count * (pattern[1] - pattern[0])
    assert kept_share(scores, ordered) >= kept_share(scores, plain) - 1e-6


def test_strong_inputs_that_lie_together_are_parted():
    scores = torch.tensor([1.0, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]).repeat(5, 1)
    order = order_of_inputs(scores, 1, 2, 4)
    assert kept_share(scores, weakest_of(scores, 1, 2, 4)) == pytest.approx(2.2 / 4.4)
    assert kept_share(scores, weakest_of(scores, 1, 2, 4, order)) == pytest.approx(4 / 4.4)
