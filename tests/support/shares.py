"""Which cases `make test` runs of those that differ in numbers or sizes only; `make nightly` runs the others, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["later", "share"]

_CASE = type(pytest.param())


def later(case: Any) -> Any:
    """Return a case that runs in `make nightly` only."""
    values = case.values if isinstance(case, _CASE) else case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, id=getattr(case, "id", None), marks=pytest.mark.nightly)


def share(of: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases, of each `of` in a row one as it is, at another place in each row, and the others for later."""
    return [case if (number // of + number) % of == 0 else later(case) for number, case in enumerate(cases)]
