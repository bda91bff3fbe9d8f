"""What rounding is allowed to do, where luck hid it in the one run that was seen."""

from __future__ import annotations

import ast
import copy
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from fxopt.passes.verification import Tolerance, distance, scale_of, tolerances
from fxopt.passes.verification.allowances import Allowances, Measured

OTHER = torch.linspace(-1, 1, 100, dtype=torch.float64)


def allowed(gradient: torch.Tensor) -> float:
    """Return what a gradient beside one of scale 1 may be off by in float32, where the original made no error in it."""
    epsilon = torch.finfo(torch.float32).eps
    exact: dict[str, Any] = {"output": OTHER, "gradient of weight": OTHER, "gradient of bias": gradient}
    sample = Measured(exact, {label: value.float() for label, value in exact.items()})
    return (
        Allowances(epsilon, torch.float64, [sample], is_rounded=False)
        .for_precision(sample)["gradient of bias"]
        .absolute
    )


def test_a_gradient_that_is_zero_in_theory_may_be_rounding_of_its_neighbours() -> None:
    assert allowed(torch.full((4,), 1e-17, dtype=torch.float64)) > 1e-5


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e-3])
def test_a_small_gradient_is_no_zero(scale: float) -> None:
    assert allowed(torch.full((4,), scale, dtype=torch.float64)) < 1e-6


def test_weights_of_another_class_are_compared_by_the_numbers_that_they_stand_for() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(32, 32))
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    weight = layer[0].weight
    other = copy.deepcopy(weight)
    assert distance(weight, other, Tolerance(0.0, 0.0)).reason == ""
    assert scale_of(weight) == pytest.approx(float(weight.dequantize().abs().max()))
    changed = nn.Sequential(nn.Linear(32, 32))
    quantization.quantize_(changed, quantization.Int8WeightOnlyConfig())
    assert "differs" in distance(weight, changed[0].weight, Tolerance(0.0, 1e-3)).reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_of_one_type_are_apart_by_as_much_as_in_float64(dtype: torch.dtype) -> None:
    expected = torch.randn(100, dtype=dtype)
    actual, beyond = expected + 1e-4, expected.clone()
    beyond[3] = torch.nan
    tolerance = Tolerance(0.0, 1e-3)
    near, wide = distance(expected, actual, tolerance), distance(expected.double(), actual.float(), tolerance)
    assert near.reason == wide.reason == "" and near.error == pytest.approx(wide.error, rel=1e-3)
    assert "differs" in distance(expected, actual, Tolerance(0.0, 1e-5)).reason
    assert "nan" in distance(expected, beyond, tolerance).reason


def test_every_tolerance_says_what_it_was_chosen_by() -> None:
    body = ast.parse(inspect.getsource(tolerances)).body
    constants = [(one, after) for one, after in pairwise(body) if isinstance(one, ast.Assign)][1:]  # after `__all__`
    assert len(constants) > 20
    for constant, after in constants:
        is_said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        assert is_said or ast.unparse(constant.targets[0]) == "NOTHING"
