"""Where the members of a pack come together again: stack, cat, and sums however they are written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from ..inlining import Operation
from .canonicalization import same_type, writes_to_fresh_value
from .packs import Ensemble, Pack

__all__ = ["Join", "find_joins"]


@dataclass(frozen=True)
class Join:
    """One operation, or chain of them, that consumes every member of a pack exactly once."""

    kind: Literal["stack", "cat", "sum"]  # `stack` or `cat` along `dim`, or `sum` over the members
    root: Operation  # the operation whose value the join gives
    removed: tuple[Operation, ...]  # the operations that the join replaces, the root among them
    dim: int = 0  # of a stack or cat, as the user wrote it
    addends: tuple[Any, ...] = ()  # of a sum: what else is added; whole packs as such


def find_joins(ensemble: Ensemble) -> dict[Pack, list[Join]]:
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
    """Return the sum whose addends include each member once.

    Other additions than those on the way to it may mean something else, as those of booleans do.
    """
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
        if len(left.users) != 1 or not (left.operator == "add" or _is_fresh(left, operation)):
            return False
        operation = left
    return True


def _is_fresh(total: Operation, addition: Operation) -> bool:
    return writes_to_fresh_value(addition) or (_is_new_tensor(total) and same_type(total, addition.args[1]))


def _is_new_tensor(operation: Operation) -> bool:
    name = getattr(operation.target, "__name__", operation.target)
    return operation.kind in ("call_function", "call_method") and name in (
        "zeros", "zeros_like", "ones", "full", "full_like", "new_zeros", "new_full", "ones_like",
    )  # fmt: skip
