"""Stack the tensors of alike members in one new child, and leave live views of the slices in the old places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...compat import tensor_at
from ...layers.members import FusedMembers, attach_member
from ...runtime.state import Stack, merge
from ...tracing.program import Program, TensorOwners
from .edit import Edit

__all__ = ["leave_views", "reason_against_stacking", "stack_members", "tensor_of"]

Places = Mapping[str, Sequence[str]]
"""Name of a stacked tensor -> the names of the tensors in it, one for each member."""


def tensor_of(owner: nn.Module, name: str) -> Tensor:
    """Return the tensor that a dotted name means."""
    value = tensor_at(owner, name)
    if value is None:
        raise LookupError(f"'{name}' is not a tensor")
    return value


def reason_against_stacking(
    names: Iterable[str], program: Program, owner: nn.Module, qualify: Callable[[str], str]
) -> str | None:
    """Return why tensors of `owner` cannot become slices of one: one is tied, or of a class of its own."""
    for name in names:
        aliases = program.analyses[TensorOwners].names(qualify(name))
        if len(aliases) > 1:
            return f"the parameter '{aliases[0]}' is tied to '{aliases[1]}'"
        kind = type(tensor_at(owner, name))
        if kind not in (Tensor, nn.Parameter):
            return f"'{name}' is of type {kind.__name__}, which is not stacked"
    return None


def stack_members(
    places: Places,
    edit: Edit,
    name: str,
    *,
    some: bool = False,
    laid_out: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> tuple[FusedMembers, str]:
    """Stack members' tensors; return the new child and its name. `some`: a call may use some members only. `laid_out`
    may give a stack another order in memory.
    """
    members = {place: [tensor_of(edit.owner, each) for each in names] for place, names in places.items()}
    stacked = {place: laid_out(place, torch.stack([each.detach() for each in of])) for place, of in members.items()}
    parameters = {place: tensor for place, tensor in stacked.items() if isinstance(members[place][0], nn.Parameter)}
    buffers = {place: tensor for place, tensor in stacked.items() if place not in parameters}
    store = FusedMembers(parameters, {place: members[place][0].requires_grad for place in parameters}, buffers)
    child = edit.add_owned(store, name=name)
    for place, names in places.items():
        new, example = f"{child}.{place}", members[place][0]
        edit.record_state(merge(names, new, example, some=some) if place in parameters else Stack(tuple(names), new))
    return store, child


def leave_views(
    places: Places, store: FusedMembers, edit: Edit, seals: Callable[[Iterable[str]], Mapping[str, Collection[str]]]
) -> None:
    """Leave views of what was stacked; `seals` says, given the modules with views, which attributes must stay where."""
    views: dict[str, dict[str, tuple[nn.Module, str, int]]] = {}
    for place, names in places.items():
        for index, name in enumerate(names):
            path, _, last = name.rpartition(".")
            views.setdefault(path, {})[last] = (*store.holder(place), index)
    sealed = seals(views)
    alike: dict[frozenset[str], frozenset[str]] = {}  # members have the same settings: they share one set of names
    undo: list[Callable[[], None]] = []
    try:
        for path in dict.fromkeys((*views, *sealed)):
            names = frozenset(sealed.get(path, ()))
            module = edit.holder.module.get_submodule(path)
            undo.append(attach_member(module, views.get(path, {}), alike.setdefault(names, names)))
    finally:
        edit.on_undo(lambda: [undo.pop()() for _ in range(len(undo))])
