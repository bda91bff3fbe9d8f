"""Calls made one after another without gradients, and what is asked of each."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ....runtime.values import Arguments
from ..float64 import Table
from ..outcome import Outcome
from .contents import elsewhere, far_from_zero, halves, no_rows, not_finite, other_rows, small
from .noise import perturbed_inputs
from .sizes import longer, many_rows

__all__ = ["Asked", "ServedCall", "served_calls"]

_SPOILT = 3
"""Of so many arguments one after another is given what is not finite."""


class Asked(enum.Enum):
    """What is asked of a call; a comment says which mistakes it shows."""

    SAME = "the same values"  # what is kept from one call to the next; parts of a batch that are left out
    BITS = "the same bits, where the rewrite promises them"  # sums in another order
    FINITE = "nothing overflows"  # an exponential without its shift
    EXACTLY = "the same values, whatever rounding of the arguments might do"  # above for at least, halves rounded up
    NEAR_ZERO = "the same values, as far as sums with larger ones keep them"  # log(1 + x) for log1p
    NOT_FINITE = "what is not finite stays so"  # NaN that is hidden, or spreads to other rows


@dataclass(frozen=True)
class ServedCall:
    """A call, what is asked of it, and the exact run of one that rounding may move far."""

    arguments: Arguments
    asked: Asked = Asked.SAME
    exact: Outcome | None = None


def served_calls(
    arguments: Arguments, example: Arguments, tables: Mapping[str, Table], seed: int, *, large: Asked | None,
    training: bool = False, weight: int = 0,
) -> Iterator[ServedCall]:  # fmt: skip
    """Yield calls to make one after another, from `arguments`: the example, or a smaller one made of it. `large` says
    what is asked of larger ones, None makes none; of a slow model, asked for the same BITS, they are hardly larger.
    `weight`: how many numbers the module holds.
    """
    yield ServedCall(arguments)
    yield ServedCall(elsewhere(perturbed_inputs(arguments, seed + 1)))
    found = [(halves(arguments), Asked.EXACTLY), (small(arguments), Asked.NEAR_ZERO)]
    if not training:  # what is far off would stay in running statistics, and those of no rows are undefined
        found += [(far_from_zero(arguments), Asked.SAME), (no_rows(arguments), Asked.SAME)]
    if large is not None:
        found.append((many_rows(arguments, example, seed + 1, weight=weight), large))
        found.append((longer(arguments, example, seed + 1, barely=large is Asked.BITS), large))
    yield from (ServedCall(call, asked) for call, asked in found if call is not None)
    for call in islice(other_rows(arguments, tables, seed, more=True), 1):
        yield ServedCall(call, Asked.FINITE)
    for spoilt in islice(not_finite(arguments), _SPOILT):
        yield ServedCall(spoilt, Asked.NOT_FINITE)
