"""Warnings in tests of folding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import fxopt


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", fxopt.GuardWarning)
        warnings.simplefilter("ignore", fxopt.UnverifiedWarning)
        warnings.simplefilter("ignore", fxopt.NothingDoneWarning)
        yield
