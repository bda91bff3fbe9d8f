"""Of wrong rewrites, drawn at random, nearly all are caught; of honest ones, none."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.shares import later


@pytest.fixture(scope="module")
def benchmark(checkout: Path) -> ModuleType:
    """Return `benchmarks/verification.py`, which holds the trials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(checkout / "benchmarks")
        return importlib.import_module("verification")


@pytest.fixture(scope="module", params=[24, later(100)])
def count(request: pytest.FixtureRequest) -> int:
    """Return how many rewrites of each kind are tried."""
    return request.param


@pytest.fixture(scope="module")
def wrong(benchmark: ModuleType, count: int) -> list[Any]:
    """Return what became of wrong rewrites."""
    return benchmark.trials(benchmark.WRONG, count, seed=0)


@pytest.fixture(scope="module")
def honest(benchmark: ModuleType, count: int) -> list[Any]:
    """Return what became of honest rewrites."""
    return benchmark.trials(benchmark.HONEST, count, seed=0)


@pytest.mark.slow
def test_wrong_rewrites_are_caught(benchmark: ModuleType, wrong: list[Any]) -> None:
    assert sum(not outcome.ok for outcome in wrong) >= 0.95 * len(wrong), benchmark.table("wrong", wrong, good=False)
    assert all(outcome.reason for outcome in wrong if not outcome.ok)
    assert all(outcome.is_intact for outcome in wrong)


def test_honest_rewrites_are_let_pass(benchmark: ModuleType, honest: list[Any]) -> None:
    assert all(outcome.ok for outcome in honest), benchmark.table("honest", honest, good=True)
    assert max(outcome.meaning_error for outcome in honest) < 1e-10


def test_the_rewrites_are_spread_over_kinds_types_and_modes(
    benchmark: ModuleType, wrong: list[Any], honest: list[Any]
) -> None:
    for rewrites, outcomes in ((benchmark.WRONG, wrong[:24]), (benchmark.HONEST, honest[:24])):
        assert {outcome.kind for outcome in outcomes} == set(rewrites)
        assert {outcome.dtype for outcome in outcomes} == {"float32", "bfloat16"}
        assert {outcome.training for outcome in outcomes} == {True, False}
        assert len({outcome.model for outcome in outcomes}) >= 6


def test_trials_repeat(benchmark: ModuleType, wrong: list[Any]) -> None:
    torch.manual_seed(99)
    assert benchmark.trials(benchmark.WRONG, 8, seed=0) == wrong[:8]
