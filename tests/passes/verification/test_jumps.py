"""How far a whole batch may be off where gradients of the original were seen to jump."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxopt.passes.verification import Tolerance
from fxopt.passes.verification.allowances import Jumps, are_far_off

LABEL = "gradient of 'weight'"
CLOSE = {LABEL: Tolerance(0.0, 1e-5, 1.0)}
BEFORE = {LABEL: torch.ones(1000)}


def off_by(place: float, all_over: float = 0.0) -> dict[str, Tensor]:
    """Return the gradient, off by so much in one place, and everywhere else."""
    found = BEFORE[LABEL] + all_over
    found[3] = 1.0 + place
    return {LABEL: found}


@pytest.mark.parametrize(
    ("place", "all_over", "far"), [(0.4, 0.0, False), (0.6, 0.0, True), (0.08, 0.08, False), (0.12, 0.12, True)]
)
def test_however_far_the_original_jumps_there_is_a_limit(place: float, all_over: float, far: bool) -> None:
    found = off_by(place, all_over)
    assert are_far_off(BEFORE, found, CLOSE) is far
    jumps = Jumps()
    jumps.learn(BEFORE, off_by(1.0, 1.0), 32.0)
    assert (jumps.allowed(BEFORE, found, CLOSE)[LABEL].absolute < place) is far


@pytest.mark.parametrize(("place", "far"), [(0.03, False), (0.05, True)])
def test_a_gradient_may_jump_four_times_as_far_as_was_seen(place: float, far: bool) -> None:
    jumps = Jumps()
    jumps.learn(BEFORE, off_by(0.01), 32.0)
    assert (jumps.allowed(BEFORE, off_by(place), CLOSE)[LABEL].absolute < place) is far


def test_a_running_mean_of_zero_may_be_off_by_what_rounding_leaves_of_its_terms() -> None:
    values = {"norm.running_mean": torch.full((4,), 1e-9), "norm.running_var": torch.full((4,), 100.0)}
    close = dict.fromkeys(values, Tolerance(0.0, 0.0, 1.0))
    allowed = Jumps().allowed(values, values, close)
    assert math.isclose(allowed["norm.running_mean"].absolute, 32 * torch.finfo(torch.float32).eps * 10.0)
    assert allowed["norm.running_var"].absolute == 0.0
