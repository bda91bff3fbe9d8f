"""What must not go through: what takes a masked weight out of its place, weights of no elements, endless scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune, weight_norm

import fxopt
from fxopt.errors import UsageError
from fxopt.transforms.prune import Prune, masks, remove_masks

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
    ],
    ids=["del", "prune", "parametrize", "parametrizations", "spectral_norm"],
)
def test_a_masked_weight_stays_where_it_is(take: Callable[[nn.Module], object]):
    fast = pruned()
    before = fast(X)
    with pytest.raises(UsageError, match=r"'weight' of this Linear is masked, .*; take the masks off first: .*remove"):
        take(fast[0])
    assert torch.equal(fast(X), before) and len(masks(fast)) == 2
    remove_masks(fast)
    take(fast[0])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_gone_is_an_attribute_that_is_not_there():
    fast = pruned()
    with pytest.raises(UsageError, match="take the masks off first"):
        weight_norm(fast[0])
    assert not hasattr(fast[0], "weight") and hasattr(fast[2], "weight")


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
