"""The options of the pass: as text, and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxopt
from fxopt.errors import UsageError
from fxopt.passes.pipeline import parse
from fxopt.transforms.prune import Prune

AMOUNTS = st.floats(0, 1, exclude_max=True)
KEPT = st.lists(st.text(min_size=1, max_size=8), max_size=3).map(tuple)
OPTIONS = st.one_of(
    st.fixed_dictionaries({"method": st.just("magnitude"), "amount": AMOUNTS, "keep": KEPT}),
    st.fixed_dictionaries({"method": st.just("random"), "seed": st.integers(0, 2**40), "amount": AMOUNTS}),
    st.fixed_dictionaries({"method": st.just("nm"), "pattern": st.sampled_from(["2:4", "1:4", "4:8", "16:32"])}),
    st.fixed_dictionaries(
        {"scope": st.sampled_from(["global", "layer"]), "schedule": st.sampled_from(["one_shot", "linear", "cubic"])}
    ),
)


@given(OPTIONS)
def test_options_are_read_as_they_were_written(options: dict[str, Any]):
    pass_ = Prune(**options)
    assert parse(str(pass_)) == (pass_,)


def test_scores_are_no_text():
    scores = {"0.weight": torch.ones(2, 2)}
    assert str(Prune(amount=0.25, scores=scores)) == "prune{amount=0.25}"
    with pytest.raises(UsageError, match="'prune' has no option 'scores'"):
        parse("prune{scores=[1]}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amount": 1.0}, r"amount=1\.0; give the share to remove, from 0 to below 1"),
        ({"amount": -0.1}, r"amount=-0\.1; give the share"),
        ({"amount": float("nan")}, "amount=nan; give the share"),
        ({"amount": "half"}, "amount='half'; give the share"),
        ({"amount": True}, "amount=True; give the share"),
        ({"method": "magic"}, "method='magic'; give magnitude, random, nm or structured"),
        ({"scope": "all"}, "scope='all'; give global, layer or row"),
        ({"schedule": "slow"}, "schedule='slow'; give one_shot, linear or cubic"),
        ({"method": "nm", "pattern": "4:2"}, "pattern='4:2'; give N:M with N below M"),
        ({"method": "nm", "pattern": "two"}, "pattern='two'; give N:M"),
        ({"pattern": "2:4"}, "pattern= is for method=nm, and method=magnitude does not read it"),
        ({"pattern": "1:4"}, "pattern= is for method=nm, and method=magnitude does not read it"),
        ({"method": "nm", "amount": 0.3}, "amount= is for method=magnitude and random and structured"),
        ({"seed": 3}, "seed= is for method=random"),
        (
            {"method": "structured", "kinds": ()},
            r"kinds=\(\); give some of channels, heads, hidden, experts, blocks, or leave",
        ),
        ({"method": "random", "scores": {}}, "scores= is for method=magnitude"),
        (
            {"method": "structured", "criterion": "routing", "loss": print},
            "runs the model on batches; give these as data=",
        ),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Prune(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ("1", "heads")}, "keep='heads' names nothing in the model; did you mean 'head'"),
        ({"scores": {"head.wight": torch.ones(2, 4)}}, "no parameter of the model; did you mean 'head.weight'"),
        (
            {"scores": {"head.weight": torch.ones(4)}},
            r"'head.weight'\] has shape \[4\], the parameter \[2, 4\]",
        ),
        ({"scores": {"head.weight": [1.0]}}, r"scores\['head.weight'\] is of type list; give a tensor"),
        ({"scores": {"head.weight": torch.full((2, 4), float("nan"))}}, "has NaN in it"),
        ({"scores": torch.ones(2, 4).to(torch.complex64)}, "scores is of type Tensor; give a dictionary"),
        ({"scores": {"head.weight": torch.ones(2, 4).to(torch.complex64)}}, "has complex numbers in it"),
        ({"scores": {}}, "scores is empty; give tensors by name, or leave it out"),
        ({"scores": [1.0]}, "scores is of type list; give a dictionary"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(options: dict[str, Any], message: str):
    model = nn.Sequential()
    model.add_module("1", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 2))
    with pytest.raises(UsageError, match=message):
        fxopt.optimize(model, Prune(**options), example_inputs=torch.ones(1, 4))


def test_nan_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    with pytest.raises(UsageError, match=r"'1\.weight' has NaN in it"):
        fxopt.optimize(model, "prune", example_inputs=torch.ones(1, 4))


def test_weights_without_values_are_refused_by_name():
    with pytest.raises(UsageError, match=r"'0\.weight' is on the meta device, and has no values"):
        fxopt.optimize(nn.Sequential(nn.Linear(4, 4, device="meta")), "prune")
