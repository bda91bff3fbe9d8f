"""Where the members of a pack come together again: stack, cat, and sums however they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .expansion import Operation
from .forms import writes_to_fresh_value
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
    if len(tensors) != pack.size or any(t is not m for t, m in zip(tensors, pack.members, strict=True)):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return None
    return Join("stack" if user.operator == "stack" else "cat", user, (user,), dim)


def _sum_chain(pack: Pack) -> Join | None:
    """Return the sum whose addends include each member once, found by climbing the additions from the first member."""
    root = _top_addition(pack.members[0])
    if root is None:
        return None
    inner: list[Operation] = []
    addends: list[Any] = []
    _flatten_sum(root, inner, addends)
    members = set(pack.members)
    found = [addend for addend in addends if isinstance(addend, Operation) and addend in members]
    if len(found) != pack.size or len(set(found)) != pack.size:
        return None
    rest = tuple(addend for addend in addends if not (isinstance(addend, Operation) and addend in members))
    return Join("sum", root, tuple(inner), addends=rest)


def _top_addition(member: Operation) -> Operation | None:
    current = next((user for user in member.users if _is_addition(user)), None)
    while current is not None:
        above = current.users[0] if len(current.users) == 1 else None
        if above is None or not _is_addition(above) or not _links(current):
            return current
        current = above
    return None


def _flatten_sum(addition: Operation, inner: list[Operation], addends: list[Any]) -> None:
    """Collect the additions below `addition` and what they add; a loop, since chains are as long as ensembles."""
    pending: list[Any] = [addition]
    while pending:
        item = pending.pop()
        if isinstance(item, Operation) and (item is addition or (_is_addition(item) and _links(item))):
            inner.append(item)
            pending.extend(reversed(item.args[:2]))
        else:
            addends.append(item)


def _links(addition: Operation) -> bool:
    """Say whether an addition is only a step of a longer one."""
    return len(addition.users) == 1 and _is_addition(addition.users[0])


def _is_addition(operation: Operation) -> bool:
    if operation.operator != "add" or operation.kwargs or len(operation.args) != 2:
        return False
    return not operation.mutates or _adds_onto_fresh_value(operation)


def _adds_onto_fresh_value(operation: Operation) -> bool:
    """Say whether `total += x` overwrites a total that nothing else reads: a number, a new tensor or the step before."""
    left = operation.args[0]
    if not isinstance(left, Operation):
        return True
    if len(left.users) != 1:
        return False
    # An addition below gives either a new tensor or the same running total, which is judged where the chain starts.
    return left.operator == "add" or writes_to_fresh_value(operation) or _is_new_tensor(left)


def _is_new_tensor(operation: Operation) -> bool:
    name = getattr(operation.target, "__name__", operation.target)
    return operation.kind in ("call_function", "call_method") and name in (
        "zeros", "zeros_like", "ones", "full", "full_like", "new_zeros", "new_full", "ones_like",
    )  # fmt: skip
