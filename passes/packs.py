"""What a batched operation would stand for: packs of isomorphic operations, and the ensembles that packs make up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .expansion import Operation

__all__ = ["Ensemble", "Gathered", "Operand", "Pack", "Parameters", "Selected", "Shared", "Slot"]


@dataclass(frozen=True)
class Shared:
    """Every member reads the same value."""

    operation: Operation


@dataclass(frozen=True)
class Parameters:
    """Each member reads a tensor attribute of its own; all have one shape, dtype and device."""

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


@dataclass(frozen=True)
class Slot:
    """A place in a pack's arguments that an operand fills."""

    index: int


@dataclass(eq=False)
class Pack:
    """Isomorphic, independent operations, one for each member and in member order.

    Attributes:
        operator: the canonical operator that each computes.
        members: the operations.
        arguments: positional and keyword arguments with a `Slot` for each tensor operand.
        operands: what fills each slot.
        operand_ranks: for each slot what decides its number of dimensions, which may differ from call to call; nothing
            where it has one at the most (every member has one at the least).
    """

    operator: str
    members: tuple[Operation, ...]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    operands: tuple[Operand, ...]
    operand_ranks: tuple[frozenset[object], ...]

    @property
    def ranks(self) -> frozenset[object]:
        """Return what decides the number of dimensions of a member's result."""
        deciding = self.operand_ranks[:1] if self.operator == "linear" else self.operand_ranks
        return frozenset[object]().union(*deciding)

    @property
    def size(self) -> int:
        return len(self.members)


Operand = Shared | Parameters | Selected | Gathered | Pack


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

    def members_of(self, index: int) -> list[Operation]:
        return [pack.members[index] for pack in self.packs]
