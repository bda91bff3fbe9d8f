"""Where the members of a pack come together again: stack, cat, and sums however they are written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from ..inlining import Operation
from .canonicalization import same_type, writes_to_fresh_value
from .packs import Pack

__all__ = ["Join", "find_joins"]


@dataclass(frozen=True)
class Join:
    """One operation, or chain of them, that consumes every member of a pack exactly once.

    Attributes:
        kind: `stack` or `cat` along `dim`, or `sum` over the members.
        root: the operation whose value the join gives.
        removed: the operations that the join replaces, the root among them.
        dim: of a stack or cat, as the user wrote it.
        addends: of a sum, what else is added (tensors as operations, numbers as they are).
    """

    kind: Literal["stack", "cat", "sum"]
    root: Operation
    removed: tuple[Operation, ...]
    dim: int = 0
    addends: tuple[Any, ...] = ()


def find_joins(pack: Pack) -> Iterator[Join]:
    """Yield the joins of a pack's members."""
    if pack.result != "stacked":
        return
    for user in pack.members[0].users:
        join = _list_join(user, pack) if user.operator in ("stack", "cat") else None
        if join is not None:
            yield join
    chain = _sum_chain(pack)
    if chain is not None:
        yield chain


def _list_join(user: Operation, pack: Pack) -> Join | None:
    tensors = user.args[0] if user.args else user.kwargs.get("tensors")
    dim = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", user.kwargs.get("axis", 0))
    if not isinstance(tensors, (list, tuple)) or not isinstance(dim, int) or "out" in user.kwargs:
        return None
    listed = cast("Sequence[object]", tensors)
    if len(listed) != pack.size or any(t is not m for t, m in zip(listed, pack.members, strict=True)):
        return None
    return Join("stack" if user.operator == "stack" else "cat", user, (user,), dim)


def _sum_chain(pack: Pack) -> Join | None:
    """Return the sum whose addends include each member once, found by climbing the additions from the members.

    Only additions on the way from a member to the sum are taken apart: others may mean something else, as those of
    booleans do.
    """
    inner: dict[Operation, None] = {}
    for member in pack.members:
        added = [user for user in member.users if _is_addition(user)]
        if len(added) != 1:
            return None
        inner.update(dict.fromkeys(_climbed(added[0], inner)))
    members = set(pack.members)
    roots = [addition for addition in inner if not any(user in inner for user in addition.users)]
    addends = [arg for addition in inner for arg in addition.args if not (isinstance(arg, Operation) and arg in inner)]
    rest = tuple(addend for addend in addends if not (isinstance(addend, Operation) and addend in members))
    if len(roots) != 1 or len(addends) - len(rest) != pack.size:
        return None
    return Join("sum", roots[0], tuple(inner), addends=rest)


def _climbed(addition: Operation, known: Collection[Operation]) -> Iterator[Operation]:
    """Yield `addition` and the longer ones that it is only a step of, up to what is known."""
    # Not a recursion: chains are long.
    while addition not in known:
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
