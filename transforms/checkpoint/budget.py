"""A budget of memory: a share of what the plain model saves, or bytes with a unit."""

from __future__ import annotations

import re

from ...errors import UsageError

__all__ = ["limit_of"]

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]+)\s*")


def limit_of(budget: float | str, saved: int) -> float:
    """Return how many bytes a budget allows: a share of `saved`, or text with a unit; UsageError if it is neither."""
    if isinstance(budget, str):
        parts = _BYTES.fullmatch(budget)
        unit = _UNITS.get(parts[2].lower()) if parts else None
        if parts is not None and unit is not None:
            return float(parts[1]) * unit
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool) and 0 <= budget <= 1:
        return budget * saved
    raise UsageError(
        f"pass 'checkpoint': budget={budget!r}; give a share of what the model saves, from 0 to 1, or bytes with a "
        "unit, such as 2GiB or 512MiB"
    )
