"""What a batched operation would stand for: packs of isomorphic operations, and the ensembles that packs make up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from ....compat import submodule
from ....operators import operator_info
from ..inlining import Operation

__all__ = [
    "Ensemble",
    "Flags",
    "Gathered",
    "Operand",
    "Pack",
    "Parameters",
    "Selected",
    "Shared",
    "attribute",
    "is_stacked",
]


@dataclass(frozen=True)
class Shared:
    """Every member reads the same value."""

    operation: Operation


@dataclass(frozen=True)
class Parameters:
    """Each member reads a tensor attribute of its own; all have one shape, dtype and device."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Flags:
    """Each member reads its own `training`; they have to agree."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Selected:
    """Member i reads index i of one tensor along `dim`."""

    source: Operation
    dim: int


@dataclass(frozen=True)
class Gathered:
    """Each member reads a value of its own that nothing has stacked yet."""

    operations: tuple[Operation, ...]


@dataclass(eq=False)
class Pack:
    """Isomorphic, independent operations, one for each member and in member order."""

    operator: str  # the canonical operator that each computes
    members: tuple[Operation, ...]  # the operations
    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # with a `Slot` for each operand
    operands: tuple[Operand, ...]  # what fills each slot
    operand_ranks: tuple[frozenset[object], ...]  # by slot, what decides its number of dimensions
    dimensional: frozenset[int]  # the slots of which each member is known to have one dimension at the least
    function: str = ""  # what computes it, as `operators.resolve` finds it; of a module call ""
    result: Literal["stacked", "several", "common"] = "stacked"
    state: tuple[str, ...] = ()  # of a module call, the names of the tensors and flags that the last operands stand for
    module: nn.Module | None = None  # of a module call, the first member's module, to read its options from

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the plain attributes of the module that is called."""
        return {} if self.module is None else vars(self.module)

    @property
    def ranks(self) -> frozenset[object]:
        """Return what decides the number of dimensions of a member's result."""
        info = operator_info(self.operator)
        if info.elementwise:
            return frozenset[object]().union(*self.operand_ranks)
        return self.operand_ranks[0] if info.keeps_rank else frozenset[object]((self,))

    def has_dimensions(self, slot: int) -> bool:
        """Say whether a member's value of an operand is known to have one dimension at the least."""
        return slot in self.dimensional

    @property
    def size(self) -> int:
        return len(self.members)


Operand = Shared | Flags | Parameters | Selected | Gathered | Pack


def is_stacked(operand: Operand) -> bool:
    """Say whether the members have values of their own for an operand."""
    if isinstance(operand, Pack):
        return operand.result != "common"
    return not isinstance(operand, (Shared, Flags))


@dataclass(eq=False)
class Ensemble:
    """Packs connected by dataflow, in execution order: what the members of one ensemble compute."""

    packs: list[Pack] = field(default_factory=list["Pack"])

    @property
    def size(self) -> int:
        return self.packs[0].size

    @property
    def parameters(self) -> Iterator[Parameters]:
        """Yield each position's parameters once, in order of first use."""
        seen: set[tuple[str, ...]] = set()
        for operand in (operand for pack in self.packs for operand in pack.operands):
            if isinstance(operand, Parameters) and operand.names not in seen:
                seen.add(operand.names)
                yield operand

    @property
    def shares_input(self) -> bool:
        """Say whether some linear layer reads one input for all members."""
        return any(pack.operator == "linear" and isinstance(pack.operands[0], Shared) for pack in self.packs)


def attribute(owner: nn.Module, name: str) -> object:
    """Return the attribute that a dotted name means, or None."""
    path, _, last = name.rpartition(".")
    return getattr(submodule(owner, path), last, None)
