"""Calls made one after another without gradients, and what is asked of each."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ....tracing.values import Arguments
from .derived import longer, many_rows, not_finite, other_rows
from .noise import perturbed_inputs

__all__ = ["Asked", "ServedCall", "served_calls"]


_SPOILT = 3
"""Of so many arguments one after another is given what is not finite."""


class Asked(enum.Enum):
    """What is asked of a call."""

    SAME = "the same values"
    BITS = "the same bits, where the rewrite promises them"
    FINITE = "nothing overflows"
    NOT_FINITE = "what is not finite stays so"


@dataclass(frozen=True)
class ServedCall:
    """A call, and what is asked of it."""

    arguments: Arguments
    asked: Asked = Asked.SAME


def served_calls(
    arguments: Arguments, example: Arguments, tables: Mapping[str, int], seed: int, *, large: Asked | None
) -> Iterator[ServedCall]:
    """Yield calls to make one after another.

    First as recorded, then of the same sizes with noise, then with many more rows than the example, which some ways of
    computing are made for, and longer; then with a row more, large and negative, and with NaN and infinity.

    Args:
        arguments: of the call: the example, or a smaller one made of it.
        example: the call as it was recorded.
        tables: see `other_rows`.
        seed: of all noise.
        large: what is asked of calls that are larger than the example; None makes none. Where it is the same bits, they
            are as small as calls can be that are larger: the model is a slow one.
    """
    yield ServedCall(arguments)
    yield ServedCall(perturbed_inputs(arguments, seed + 1))
    if large is not None:
        few = longer(arguments, example, seed + 1, barely=large is Asked.BITS)
        made = (many_rows(arguments, example, seed + 1), few)
        yield from (ServedCall(call, large) for call in made if call is not None)
    for call in islice(other_rows(arguments, tables, seed, more=True), 1):
        yield ServedCall(call, Asked.FINITE)
    for spoilt in islice(not_finite(arguments), _SPOILT):
        yield ServedCall(spoilt, Asked.NOT_FINITE)
