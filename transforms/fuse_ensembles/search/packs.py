"""What a batched operation would stand for: packs of isomorphic operations, and the ensembles that they make up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
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
    "dimensional_slots",
    "is_one_of_several_places",
    "is_stacked",
    "operand_ranks",
    "selected",
    "selection",
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


def selected(operation: Operation) -> tuple[Operation, int, int] | None:
    """Return (source, dim, index) where `operation` is `source[..., index, ...]` with full slices elsewhere."""
    if operation.operator != "getitem" or len(operation.args) != 2 or not isinstance(operation.args[0], Operation):
        return None
    index = operation.args[1]
    parts = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
    places = [i for i, part in enumerate(parts) if isinstance(part, int) and not isinstance(part, bool)]
    others = [part for part in parts if not isinstance(part, int)]
    if len(places) != 1 or not _keeps_everything(others) or not _is_tensor(operation.args[0]):
        return None
    if others and others[0] is Ellipsis:
        return (operation.args[0], places[0] - len(parts), parts[places[0]])
    return operation.args[0], places[0], parts[places[0]]


def is_one_of_several_places(operation: Operation) -> bool:
    """Say whether a member picks its own place from an attribute of which other places are picked, too."""
    picked = selected(operation)
    if picked is None or picked[0].kind != "get_attr":
        return False
    others = (selected(user) for user in picked[0].users)
    return any(other is not None and other[2] != picked[2] for other in others)


def _keeps_everything(parts: Sequence[object]) -> bool:
    if any(part is Ellipsis for part in parts):
        return len(parts) == 1
    return all(part == slice(None) for part in parts)


def _is_tensor(operation: Operation) -> bool:
    return operation.kind == "get_attr" or hasattr(operation.example, "dtype")


def selection(column: Sequence[Operation]) -> Selected | None:
    """Return the tensor of which the members pick the places 0, 1, ... in order, or None."""
    picks = [selected(operand) for operand in column]
    first = picks[0]
    if first is None or any(pick != (first[0], first[1], i) for i, pick in enumerate(picks)):
        return None
    return Selected(first[0], first[1])


def operand_ranks(operand: Operand, owner: nn.Module) -> frozenset[object]:
    """Return what decides an operand's number of dimensions; nothing where it has one at the most."""
    match operand:
        case Pack():
            return operand.ranks if operand.result == "stacked" else frozenset[object]()
        case Shared() if _is_flat(operand.operation.example) or _is_flat_attribute(operand.operation, owner):
            return frozenset()
        case Parameters() if _is_flat(attribute(owner, operand.names[0])):
            return frozenset()
        case Selected():
            return frozenset((Selected(operand.source, 0),))
        case _:
            return frozenset((operand,))


def dimensional_slots(operands: Sequence[Operand], owner: nn.Module) -> frozenset[int]:
    """Return the positions of stacked operands of which each member has one dimension at the least, at every call."""
    return frozenset(slot for slot, operand in enumerate(operands) if _has_dimensions(operand, owner))


def _has_dimensions(operand: Operand, owner: nn.Module) -> bool:
    if isinstance(operand, Parameters):
        tensor = attribute(owner, operand.names[0])
        return isinstance(tensor, torch.Tensor) and tensor.dim() > 0
    if not isinstance(operand, Pack):
        return False
    if operator_info(operand.operator).elementwise:
        return bool(operand.dimensional)
    return _gives_dimensions(operand) or _keeps_dimensions(operand)


def _gives_dimensions(pack: Pack) -> bool:
    """Say whether results have one dimension at the least, whatever is read; of modules only such ones are packed."""
    return pack.operator in ("module", "recurrent") or operator_info(pack.operator).has_dimensions


def _keeps_dimensions(pack: Pack) -> bool:
    """Say whether an operator keeps dimensions of its first operand, or is told how many to give."""
    args, _ = pack.arguments
    if pack.operator in ("view", "reshape", "expand"):
        sizes: tuple[Any, ...] = args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            return len(cast("Sequence[Any]", sizes[0])) > 0
        return len(sizes) > 1
    if pack.operator == "getitem":
        index = args[1]
        parts = cast("tuple[object, ...]", index if isinstance(index, tuple) else (index,))
        source = pack.operands[0]
        several = isinstance(source, Pack) and source.result == "several" and _gives_dimensions(source)
        return several or any(part is None or isinstance(part, slice) for part in parts)
    return operator_info(pack.operator).keeps_rank and pack.has_dimensions(0)


def _is_flat(value: object) -> bool:
    """Say whether a value is a number, or a parameter or buffer with one dimension at the most."""
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() <= 1)


def _is_flat_attribute(operation: Operation, owner: nn.Module) -> bool:
    return operation.kind == "get_attr" and _is_flat(attribute(owner, str(operation.target)))
