"""Of wrong rewrites, drawn at random, nearly all are caught; of honest ones, none."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def benchmark(checkout: Path) -> ModuleType:
    """Return `benchmarks/verification.py`, which holds the trials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(checkout / "benchmarks")
        return importlib.import_module("verification")


def test_wrong_rewrites_are_caught(benchmark: ModuleType) -> None:
    outcomes = benchmark.trials(benchmark.WRONG, 100, seed=0)
    assert sum(not outcome.ok for outcome in outcomes) >= 95, benchmark.table("wrong", outcomes, good=False)
    assert all(outcome.reason for outcome in outcomes if not outcome.ok)
    assert all(outcome.is_intact for outcome in outcomes)


def test_honest_rewrites_are_let_pass(benchmark: ModuleType) -> None:
    outcomes = benchmark.trials(benchmark.HONEST, 100, seed=0)
    assert all(outcome.ok for outcome in outcomes), benchmark.table("honest", outcomes, good=True)
    assert max(outcome.meaning_error for outcome in outcomes) < 1e-10


def test_the_rewrites_are_spread_over_kinds_types_and_modes(benchmark: ModuleType) -> None:
    for rewrites in (benchmark.WRONG, benchmark.HONEST):
        outcomes = benchmark.trials(rewrites, 24, seed=1)
        assert {outcome.kind for outcome in outcomes} == set(rewrites)
        assert {outcome.dtype for outcome in outcomes} == {"float32", "bfloat16"}
        assert {outcome.training for outcome in outcomes} == {True, False}
        assert len({outcome.model for outcome in outcomes}) >= 6


def test_trials_repeat(benchmark: ModuleType) -> None:
    first = benchmark.trials(benchmark.WRONG, 8, seed=5)
    torch.manual_seed(99)
    assert benchmark.trials(benchmark.WRONG, 8, seed=5) == first
