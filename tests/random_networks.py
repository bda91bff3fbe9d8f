"""How many networks a test of random ones makes."""

from __future__ import annotations

from hypothesis import settings

_IN_A_RUN_OF_ALL = 30


def number_of_examples(few: int) -> int:
    """Return `few` in a run of all tests, and what the profile says in one that names another."""
    asked = settings.default.max_examples
    return few if asked == _IN_A_RUN_OF_ALL else asked
