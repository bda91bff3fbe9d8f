"""What must not go through: what takes a masked weight out of its place, weights of no elements, endless scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune, weight_norm

import fxopt
from fxopt.errors import PlanError, StateError, UsageError
from fxopt.runtime.state import packed
from fxopt.transforms.prune import Prune, masks, remove_masks, set_masks

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def pruned(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    return fxopt.optimize(model, Prune(**{"scope": "layer", **options}), example_inputs=X)


@pytest.mark.parametrize(
    "take",
    [
        lambda layer: delattr(layer, "weight"),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
        lambda layer: nn.utils.spectral_norm(layer),
        weight_norm,  # takes the weight out before it asks
    ],
    ids=["del", "prune", "parametrize", "parametrizations", "spectral_norm", "weight_norm"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_masked_weight_stays_where_it_is(take: Callable[[nn.Module], object]):
    fast = pruned()
    before = fast(X)
    with pytest.raises(UsageError, match=r"'weight' of this Linear is masked, .*; take the masks off first: .*remove"):
        take(fast[0])
    assert torch.equal(fast(X), before) and len(masks(fast)) == 2
    assert [name for name, _ in fast.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    remove_masks(fast)
    take(fast[0])


def test_a_weight_that_is_gone_is_an_attribute_that_is_not_there():
    fast = pruned()
    del fast[0]._parameters["weight"]
    assert not hasattr(fast[0], "weight") and hasattr(fast[2], "weight")


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        ([1], UsageError, "kept is of type list; give a dictionary"),
        ({"0.weight": None}, UsageError, r"the mask of '0\.weight' is of type NoneType; give a tensor"),
        ({"0.weight": torch.full((8, 16), torch.nan)}, StateError, r"the mask of '0\.weight' has NaN in it"),
    ],
)
def test_a_mask_that_is_none_is_refused_by_name(kept: Any, error: type[Exception], message: str):
    fast = pruned()
    before = masks(fast)
    with pytest.raises(error, match=message):
        set_masks(fast, kept)
    assert all(torch.equal(before[name], flags) for name, flags in masks(fast).items())


@pytest.mark.parametrize("options", [{}, {"scope": "global"}, {"method": "nm", "scope": None}])
def test_what_was_zero_before_is_masked_and_counts(options: dict[str, Any]):
    """Nothing that the model computes tells."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].weight.data[0, 0] = 0
    given = {"scope": "layer", **options}
    pass_ = Prune(**{name: value for name, value in given.items() if value is not None})
    found = masks(fxopt.optimize(model, pass_, example_inputs=X))
    assert not found["0.weight"][0, 0]
    assert sum(int((~kept).sum()) for kept in found.values()) == (16 * 8 + 8 * 4) // 2


def test_a_plan_whose_mask_has_fewer_zeros_than_were_chosen_is_refused():
    fast = pruned()
    plan = fxopt.plan(fast)
    first = plan.decisions[0]
    gone = ~masks(fast)["0.weight"]
    gone[tuple(gone.nonzero()[0])] = False
    data = {**first.site["data"], "gone": {"weight": packed(gone)}}
    wrong = dataclasses.replace(first, site={**first.site, "data": data})
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(PlanError, match="the mask of 'weight' has 63 zeros, and 64 were chosen"):
        fxopt.optimize(
            model, Prune(scope="layer"), plan=dataclasses.replace(plan, decisions=(wrong,)), example_inputs=X
        )
    changed = masks(fast)
    changed["0.weight"] = ~gone
    set_masks(fast, changed)
    again = fxopt.optimize(model, Prune(scope="layer"), plan=fxopt.plan(fast), example_inputs=X)
    assert torch.equal(masks(again)["0.weight"], ~gone)


@pytest.mark.parametrize("method", ["magnitude", "nm"])
def test_a_weight_of_no_elements_is_refused(method: str):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].in_features, model[0].weight = 0, nn.Parameter(torch.empty(4, 0))
    fast = fxopt.optimize(model, Prune(method=method), example_inputs=torch.zeros(2, 0))
    assert fxopt.plan(fast).decisions[0].reason == "its weight has no elements"
    assert set(masks(fast)) == {"1.weight"}


def test_scores_without_bound_do_not_pass_for_what_is_gone():
    first = pruned(amount=0.25)
    scores = {"0.weight": torch.full((8, 16), -torch.inf)}
    more = fxopt.optimize(first, Prune(amount=0.5, scope="layer", scores=scores), example_inputs=X)
    kept, before = masks(more)["0.weight"], masks(first)["0.weight"]
    assert int((~kept).sum()) == 64 and not bool((kept & ~before).any())
