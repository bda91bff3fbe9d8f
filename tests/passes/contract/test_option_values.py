"""Options of wrong types are refused by name, whatever the pass."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.errors import UsageError
from fxopt.known_passes import pass_names
from fxopt.passes.contract import check_option_types
from fxopt.passes.pipeline import find_pass, parse
from fxopt.transforms.fuse_ensembles import Lowering
from fxopt.transforms.prune import Prune
from fxopt.transforms.qat import Qat
from fxopt.transforms.quantize import Quantize

NO_VALUES: list[Any] = [
    object(),
    "none of these",
    -1,
    None,
    math.nan,
    [1],
    {"a": 1},
    torch.ones(2),
    b"x",
    (None,),
    10**30,
]
WRONG: list[tuple[type[Any], str, Any]] = [
    (Quantize, "scheme", None),
    (Quantize, "scheme", ["int8_dynamic"]),
    (Quantize, "group_size", "64"),
    (Quantize, "batches", "3"),
    (Quantize, "batches", 2.5),
    (Quantize, "observer", []),
    (Quantize, "per_channel", "no"),
    (Quantize, "budget", "0.1"),
    (Qat, "batches", "3"),
    (Qat, "per_channel", "no"),
    (Qat, "freeze_after", 1.5),
]
WRONG_OF_RANDOM = ["a", 1.5, 2**80, -1]


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_a_wrong_type_is_named(kind: type[Any], name: str, value: Any):
    with pytest.raises(UsageError) as caught:
        fxopt.optimize(nn.Sequential(nn.Linear(4, 4)), kind(**{name: value}), example_inputs=(torch.ones(1, 4),))
    assert f"{name}={value!r}; give" in str(caught.value)


@pytest.mark.parametrize("pass_type", [*map(find_pass, pass_names())], ids=lambda kind: kind.__name__)
def test_nonsense_is_refused_in_one_line(pass_type: type[Any]):
    for name in (field.name for field in dataclasses.fields(pass_type) if field.init):
        found = [_refusal(pass_type, name, value) for value in NO_VALUES]
        assert not any("\n" in each for each in found)
        assert any(found) or name in ("calibration", "scores", "loss", "data")


def _refusal(pass_type: type[Any], name: str, value: object) -> str:
    try:
        pass_ = pass_type(**{name: value})
        check_option_types(pass_)
        _ = pass_.error_budget
        pass_.check(nn.Linear(4, 4))
    except fxopt.FxoptError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", WRONG_OF_RANDOM)
def test_a_seed_that_is_none_is_named(seed: Any):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)
    with pytest.raises(UsageError) as caught:
        fxopt.optimize(model, Prune(method="random", seed=seed), example_inputs=(x,))
    assert f"seed={seed!r}; give" in str(caught.value)


def test_a_choice_may_be_given_by_its_word() -> None:
    for spelled in ("bmm", Lowering.BMM):
        pass_ = fxopt.FuseEnsembles(lowering=spelled)  # pyright: ignore[reportArgumentType]
        assert pass_.lowering is Lowering.BMM and str(pass_) == "fuse_ensembles{lowering=bmm}"
        assert parse(str(pass_)) == (pass_,) and hash(pass_) == hash(fxopt.FuseEnsembles(Lowering.BMM))
    with pytest.raises(UsageError, match="lowering='bm'; give auto"):
        check_option_types(fxopt.FuseEnsembles(lowering="bm"))  # pyright: ignore[reportArgumentType]
