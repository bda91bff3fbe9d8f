"""Runs of one rank by itself: a model that is recorded, checked or timed must not wait for other ranks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["is_rank_local", "is_trial_step", "rank_local", "trial_step"]

_LOCAL: ContextVar[bool] = ContextVar("fxopt_rank_local", default=False)
_TRIAL: ContextVar[bool] = ContextVar("fxopt_trial_step", default=False)


@contextmanager
def rank_local() -> Generator[None]:
    """Let layers that compute over all ranks compute over this one for a while: the others may not run them now."""
    token = _LOCAL.set(True)
    try:
        yield
    finally:
        _LOCAL.reset(token)


def is_rank_local() -> bool:
    """Say whether collectives are to be left out, in this thread."""
    return _LOCAL.get()


@contextmanager
def trial_step() -> Generator[None]:
    """Let replicas average gradients on all ranks for a while, and learn nothing from it."""
    token = _TRIAL.set(True)
    try:
        yield
    finally:
        _TRIAL.reset(token)


def is_trial_step() -> bool:
    """Say whether a step of training is made on trial, in this thread."""
    return _TRIAL.get()
