"""Take one lowering for small calls and another for large ones, where measurement says that neither is best at both."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..tracing.inputs import Inputs
from ..tracing.selection import select
from .measure import Timings

__all__ = ["Switch", "best_switch", "calls_by_rows", "pays", "rows_of"]

_MOST_SIZES = 4
"""Of calls in many sizes this many are timed, the smallest and the largest among them."""


@dataclass(frozen=True)
class Switch:
    """Two lowerings and the number of rows up to which the first is taken; its text is a choice in a plan."""

    small: str
    limit: int
    large: str

    def __str__(self) -> str:
        return f"{self.small} up to {self.limit} rows, then {self.large}"

    @classmethod
    def parse(cls, text: str) -> Switch | None:
        """Return the switch that a choice means, or None where it is one lowering."""
        match = re.fullmatch(r"(\w+) up to (\d+) rows, then (\w+)", text)
        return None if match is None else cls(match[1], int(match[2]), match[3])


def rows_of(x: Tensor) -> int:
    """Return the product of all dimensions of `x` but the last: what a linear layer takes as its batch."""
    return math.prod(x.shape[:-1])


def calls_by_rows(home: nn.Module, calls: Sequence[Inputs], argument: str) -> dict[int, list[Inputs]]:
    """Return the calls by the number of rows of one argument, in rising order; at most four sizes, evenly spread."""
    groups: dict[int, list[Inputs]] = {}
    for call in calls:
        value = _argument(home, call, argument)
        if isinstance(value, Tensor):
            groups.setdefault(rows_of(value), []).append(call)
    sizes = sorted(groups)
    steps = max(1, min(_MOST_SIZES, len(sizes)) - 1)
    kept = dict.fromkeys(sizes[step * (len(sizes) - 1) // steps] for step in range(steps + 1)) if sizes else {}
    return {size: groups[size] for size in kept}


def _argument(home: nn.Module, call: Inputs, name: str) -> Any:
    """Return what a call passes for a placeholder, or None where it has no graph."""
    selected = select(home, call.args, call.kwargs)
    if selected is None:
        return None
    variant, values = selected
    names = [node.name for node in variant.graph.find_nodes(op="placeholder")]
    return dict(zip(names, values, strict=True)).get(name)


def best_switch(timings: Mapping[int, Timings], names: Sequence[str], switchable: Collection[str]) -> Switch | None:
    """Return the switch between lowerings that measurement asks for, if it asks for one.

    At each size those are good that are not shown to be 2% slower than the fastest. Where one is good at all sizes,
    nothing is switched; else the first two that are good below and above some size, at the geometric mean of the sizes
    on both sides.

    Args:
        timings: of every lowering, by number of rows, in rising order.
        names: of the lowerings, in order of preference.
        switchable: those that a switch may take.
    """
    sizes = list(timings)
    good = [timings[size].contenders(names) for size in sizes]
    if any(all(name in at_size for at_size in good) for name in names):
        return None
    for place in range(1, len(sizes)):
        small = _good_at_all(good[:place], names, switchable)
        large = _good_at_all(good[place:], names, switchable)
        if small is not None and large is not None:
            return Switch(small, math.isqrt(sizes[place - 1] * sizes[place]), large)
    return None


def _good_at_all(good: Sequence[Collection[str]], names: Sequence[str], switchable: Collection[str]) -> str | None:
    return next((name for name in names if name in switchable and all(name in at_size for at_size in good)), None)


def pays(timings: Mapping[int, Timings], single: str, switched: str) -> bool:
    """Say whether switching is shown to be 2% faster than one lowering at some size, and 2% slower at none."""
    both = (single, switched)
    good = [at_size.contenders(both) for at_size in timings.values()]
    return all(switched in at_size for at_size in good) and any(single not in at_size for at_size in good)
