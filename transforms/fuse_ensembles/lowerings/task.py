"""One ensemble that is to be written into a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ..inlining import Operation
from ..search import Ensemble, Join, Pack, find_joins

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """One ensemble that is to be written into a graph, and what is at hand for that."""

    ensemble: Ensemble  # what to write
    names: Mapping[tuple[str, ...], str]  # parameters of a position -> name of their stack
    vectors: Mapping[str, int]  # name of a stacked tensor in which vectors lie behind one another -> their length
    add_module: Callable[[nn.Module], str]  # registers a module in the owner and returns its name
    may_restart: bool  # whether the owner may run its original forward after having begun with its graph

    @cached_property
    def joins(self) -> Mapping[Pack, list[Join]]:
        """Return where the members of each pack come together again."""
        return find_joins(self.ensemble)

    @cached_property
    def covered(self) -> set[Operation]:
        """Return the operations that are replaced."""
        packed = {member for pack in self.ensemble.packs for member in pack.members}
        return packed | {removed for joins in self.joins.values() for join in joins for removed in join.removed}
