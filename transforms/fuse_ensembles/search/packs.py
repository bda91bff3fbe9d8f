"""Packs of isomorphic operations, the ensembles that they make up, and where members come together again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import nn

from ....compat import submodule
from ....operators import operator_info
from ..inlining import Operation
from .canonicalization import same_type, writes_to_fresh_value

__all__ = [
    "Ensemble", "Flags", "Gathered", "Join", "Operand", "Pack", "Parameters", "Selected", "Shared", "attribute",
    "dimensional_slots", "is_one_of_several_places", "is_stacked", "operand_ranks", "selected", "selection",
]  # fmt: skip


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
    members: tuple[Operation, ...]
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

    @cached_property
    def joins(self) -> Mapping[Pack, list[Join]]:
        """Return where the members of each pack come together again."""
        return _find_joins(self)

    @cached_property
    def covered(self) -> set[Operation]:
        """Return the operations of the members, and those that join their results."""
        members = {member for pack in self.packs for member in pack.members}
        return members | {removed for joins in self.joins.values() for join in joins for removed in join.removed}

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
    from_end = any(part is Ellipsis for part in others)
    keeps_all = len(others) == 1 if from_end else all(part == slice(None) for part in others)
    is_tensor = operation.args[0].kind == "get_attr" or hasattr(operation.args[0].example, "dtype")
    if len(places) != 1 or not keeps_all or not is_tensor:
        return None
    if from_end:
        return (operation.args[0], places[0] - len(parts), parts[places[0]])
    return operation.args[0], places[0], parts[places[0]]


def is_one_of_several_places(operation: Operation) -> bool:
    """Say whether a member picks its own place from an attribute of which other places are picked, too."""
    picked = selected(operation)
    if picked is None or picked[0].kind != "get_attr":
        return False
    others = (selected(user) for user in picked[0].users)
    return any(other is not None and other[2] != picked[2] for other in others)


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
        case Shared(read) if _is_flat(read.example):
            return frozenset()
        case Shared(read) if read.kind == "get_attr" and _is_flat(attribute(owner, str(read.target))):
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


@dataclass(frozen=True)
class Join:
    """One operation, or chain of them, that consumes every member of a pack exactly once."""

    kind: Literal["stack", "cat", "sum"]  # `stack` or `cat` along `dim`, or `sum` over the members
    root: Operation  # the operation whose value the join gives
    removed: tuple[Operation, ...]  # the operations that the join replaces, the root among them
    dim: int = 0  # of a stack or cat, as the user wrote it
    addends: tuple[Any, ...] = ()  # of a sum: what else is added; whole packs as such


def _find_joins(ensemble: Ensemble) -> dict[Pack, list[Join]]:
    """Return where the members of each pack come together again; no operation is a part of two sums, or of a member."""
    kept = {member for pack in ensemble.packs for member in pack.members}
    joins: dict[Pack, list[Join]] = {pack: [] for pack in ensemble.packs}
    for pack in ensemble.packs:
        if pack.result != "stacked":
            continue
        for user in dict.fromkeys(pack.members[0].users):
            join = _list_join(user, pack) if user.operator in ("stack", "cat") and user not in kept else None
            if join is not None:
                joins[pack].append(join)
        chain = _sum_chain(pack, kept, ensemble.packs)
        if chain is not None:
            joins[pack].append(chain)
            kept.update(chain.removed)
    return joins


def _list_join(user: Operation, pack: Pack) -> Join | None:
    tensors = user.args[0] if user.args else user.kwargs.get("tensors")
    dim = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", user.kwargs.get("axis", 0))
    if not isinstance(tensors, (list, tuple)) or not isinstance(dim, int) or "out" in user.kwargs:
        return None
    listed = cast("Sequence[object]", tensors)
    if len(listed) != pack.size or any(t is not m for t, m in zip(listed, pack.members, strict=True)):
        return None
    return Join("stack" if user.operator == "stack" else "cat", user, (user,), dim)


def _sum_chain(pack: Pack, kept: Collection[Operation], packs: Sequence[Pack]) -> Join | None:
    """Return the sum whose addends include each member once; other additions may mean something else: of booleans."""
    inner: dict[Operation, None] = {}
    for member in pack.members:
        added = [user for user in member.users if _is_addition(user) and user not in kept]
        if len(added) != 1:
            return None
        inner.update(dict.fromkeys(_climbed(added[0], inner, kept)))
    roots = [addition for addition in inner if not any(user in inner for user in addition.users)]
    addends = [arg for addition in inner for arg in addition.args if not (isinstance(arg, Operation) and arg in inner)]
    rest = _without_members(addends, pack)
    if len(roots) != 1 or rest is None:
        return None
    return Join("sum", roots[0], tuple(inner), addends=tuple(_by_pack(rest, packs)))


def _without_members(addends: Sequence[Any], pack: Pack) -> list[Any] | None:
    """Return what is added beside the members of a pack; None where these are not added once each."""
    members = set(pack.members)
    rest = [addend for addend in addends if not (isinstance(addend, Operation) and addend in members)]
    return rest if len(addends) - len(rest) == pack.size else None


def _by_pack(addends: list[Any], packs: Sequence[Pack]) -> list[Any]:
    """Return what is added with whole packs in the place of their members, which are then added together, too."""
    for pack in packs:
        rest = _without_members(addends, pack) if pack.result == "stacked" else None
        if rest is not None and set(pack.members) <= {addend for addend in addends if isinstance(addend, Operation)}:
            addends = [*rest, pack]
    return addends


def _climbed(addition: Operation, known: Collection[Operation], kept: Collection[Operation]) -> Iterator[Operation]:
    """Yield `addition` and the longer ones that it is only a step of, up to what is known or kept."""
    # Not a recursion: chains are long.
    while addition not in known and addition not in kept:
        yield addition
        if len(addition.users) != 1 or not _is_addition(addition.users[0]):
            return
        addition = addition.users[0]


def _is_addition(operation: Operation) -> bool:
    if operation.operator != "add" or operation.kwargs or len(operation.args) != 2:
        return False
    return not operation.mutates or _adds_onto_fresh_value(operation)


def _adds_onto_fresh_value(operation: Operation) -> bool:
    """Say whether `total += x` overwrites a total that nothing else reads: a number, a new tensor or a step before."""
    while operation.mutates:
        left = operation.args[0]
        if not isinstance(left, Operation):
            return True
        is_new = _is_new_tensor(left) and same_type(left, operation.args[1])
        if len(left.users) != 1 or not (left.operator == "add" or is_new or writes_to_fresh_value(operation)):
            return False
        operation = left
    return True


def _is_new_tensor(operation: Operation) -> bool:
    name = getattr(operation.target, "__name__", operation.target)
    return operation.kind in ("call_function", "call_method") and name in (
        "zeros", "zeros_like", "ones", "full", "full_like", "new_zeros", "new_full", "ones_like",
    )  # fmt: skip
