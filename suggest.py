"""Name what the user probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]

_MOST = 24
"""How many candidates are listed: all options of any pass."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the candidate nearest to `name`, else the candidates, else nothing."""
    known = sorted(set(candidates))
    folded = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6) or _containing(name.lower(), folded)
    if near:
        return f"; did you mean {folded[near[0]]!r}?"
    if not known:
        return ""
    shown = ", ".join(known[:_MOST]) + (", ..." if len(known) > _MOST else "")
    return f"; there is {shown}" if len(known) == 1 else f"; there are {shown}"


def _containing(name: str, candidates: Iterable[str]) -> list[str]:
    """Return the first candidate that a short name is a part of, those that start with it first."""
    found = [candidate for candidate in candidates if len(name) > 2 and name in candidate]
    return sorted(found, key=lambda candidate: not candidate.startswith(name))[:1]
