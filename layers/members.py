"""Where the parameters of a fused ensemble live, and the live views, sealed in, that the members keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat import REGISTERS, own_children, own_parameters, own_tensor
from ..errors import FusedMemberError, UsageError
from ..runtime.graphs import Capture, capture_of, install, own_class, regions_of, share_children
from ..runtime.state import VIEWS
from ..runtime.values import INTERNAL
from .parts import FUSED_FROM, FusedPart, fused_class
from .register import Children, Register
from .saving import SavesWhatMembersDoNot, count_slices
from .slices import MEMBERS, View, by_member
from .steps import watch_steps
from .views import SEALED, sealed_names, views_of

__all__ = [
    "FusedMembers", "attach_member", "seal", "settings_of", "stacked_weights", "vector_size", "ways_to", "written_out",
]  # fmt: skip


_SET_BY_TORCH = INTERNAL | {"_flat_weights"}
"""Attributes that torch itself sets in modules."""


class FusedMembers(SavesWhatMembersDoNot):
    """Hold the parameters and buffers of an ensemble's N members, stacked, under the names that they have in a member.
    Matrices are [N, *member shape]; vectors stay vectors, [N * size], as optimizers are told by dimensions what to
    decay. Members that read the slices save and load them. The tensors are taken over, not copied.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        requires_grad: bool | Mapping[str, bool] = True,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        watch_steps(self)
        for name, tensor in parameters.items():
            store, last = self._place(name)
            trains = requires_grad if isinstance(requires_grad, bool) else requires_grad[name]
            if tensor.ndim == 2:
                store.__dict__.setdefault(MEMBERS, {})[last] = tensor.shape[0]
                tensor = tensor.flatten()
            store.register_parameter(last, nn.Parameter(tensor.detach(), trains))
        for name, tensor in (buffers or {}).items():
            store, last = self._place(name)
            store.register_buffer(last, tensor.detach())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        watch_steps(self)

    def holder(self, name: str) -> tuple[FusedMembers, str]:
        """Return which module holds a tensor, itself or one inside, and how it is called there."""
        path, _, last = name.rpartition(".")
        return cast("FusedMembers", self.get_submodule(path)), last

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return cast("Any", super())._apply(partial(_applied, fn), recurse)

    def _place(self, name: str) -> tuple[FusedMembers, str]:
        *path, last = name.split(".")
        store = self
        for part in path:
            if part not in own_children(store):
                store.add_module(part, FusedMembers({}))
            store = cast("FusedMembers", own_children(store)[part])
        return store, last

    def extra_repr(self) -> str:
        tensors = (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        return ", ".join(f"{name}={list(tensor.shape)}" for name, tensor in tensors)


def _applied(fn: Callable[[Tensor], Tensor], stacked: Tensor) -> Tensor:
    """Apply a function to stacked weights, or to all members' behind one another: images have four dimensions."""
    try:
        return fn(stacked)
    except RuntimeError:
        if stacked.ndim != 5:
            raise
    return torch.unflatten(fn(stacked.flatten(0, 1)), 0, stacked.shape[:2])


def vector_size(owner: nn.Module, name: str) -> int | None:
    """Return the length of the vectors that lie behind one another in the parameter `name`; None of any other."""
    path, _, last = name.rpartition(".")
    store = owner.get_submodule(path)
    count: int | None = vars(store).get(MEMBERS, {}).get(last)
    tensor = own_tensor(store, last)
    return None if count is None or tensor is None else tensor.numel() // count


def stacked_weights(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters that are matrices of several members: [members, out, in]."""
    own = own_parameters(module).items()
    return [name for name, tensor in own if tensor is not None and tensor.ndim > 2 and min(tensor.shape) > 1]


def attach_member(
    module: nn.Module, views: Mapping[str, tuple[nn.Module, str, int]], sealed: Collection[str] = ()
) -> Callable[[], None]:
    """Let `module` read slices of stacked tensors in the place of its own; return a function that undoes it.
    `views` is name -> (holder, its name, index). Raises a FusedMemberError if the shapes differ.
    """
    held = own_children(module).keys() & sealed
    if not views:
        return partial(_in_turn, seal(module, sealed), _hold_children(module, held))
    slices = {name: View(*view) for name, view in views.items()}
    for name, view in slices.items():
        _check_slice(module, name, view)
    taken = [(key, module.__dict__[key]) for key in REGISTERS if not slices.keys().isdisjoint(module.__dict__[key])]
    count_slices(slices.values(), 1)
    undo = _change(module, {VIEWS: {**views_of(module), **slices}, SEALED: _with_sealed(module, sealed)})
    if not isinstance(module, FusedPart):  # else a forward of its own would find no parameters
        undo()
        count_slices(slices.values(), -1)
        raise FusedMemberError(f"this {type(module).__name__} has no class that reads its slices")
    listed = module.__dict__.pop("_flat_weights", None)  # a recurrent layer's second list of its parameters
    for key, register in taken:
        module.__dict__[key] = Register(register, slices)
    give_back = partial(_give_back, module, undo, slices, taken, listed)
    return partial(_in_turn, give_back, _hold_children(module, held))


def _in_turn(*steps: Callable[[], None]) -> None:
    for step in steps:
        step()


def _hold_children(module: nn.Module, names: Collection[str]) -> Callable[[], None]:
    """Refuse other children under some names, past attributes too; return how to go back."""
    before = own_children(module)
    known = before.held if isinstance(before, Children) else frozenset[str]()
    if known.issuperset(names) or regions_of(module):  # regions call what is in the register that they borrowed
        return lambda: None
    vars(module)["_modules"] = Children(before, known.union(names))

    def release() -> None:
        now = dict(own_children(module))
        before.clear()
        before.update(now)
        vars(module)["_modules"] = before
        share_children(module)  # of regions that came since

    return release


def _give_back(
    module: nn.Module,
    undo: Callable[[], None],
    slices: Mapping[str, View],
    taken: Sequence[tuple[str, dict[str, Any]]],
    listed: Any,
) -> None:
    undo()
    count_slices(slices.values(), -1)
    for key, old in taken:
        now = {name: tensor for name, tensor in module.__dict__[key].items() if name not in slices}
        old.update(now)
        module.__dict__[key] = old
    if listed is not None:
        module.__dict__["_flat_weights"] = listed


def seal(parent: nn.Module, names: Collection[str]) -> Callable[[], None]:
    """Let the attributes `names` of `parent` be neither replaced nor removed; a container takes in nothing either.
    With "forward" it refuses hooks, with "__class__" another class. Returns a function that takes the seal off.
    """
    return _change(parent, {SEALED: _with_sealed(parent, names)})


def settings_of(module: nn.Module) -> list[str]:
    """Return the names of a module's plain attributes, which its forward may read: a slope, a stride."""
    return [name for name in vars(module) if not name.startswith("_") and name not in INTERNAL]


def ways_to(paths: Iterable[str]) -> dict[str, set[str]]:
    """Return the path of each module above some others -> the names of its children on the way to these."""
    ways: dict[str, set[str]] = {}
    for path in paths:
        while path:
            parent, _, last = path.rpartition(".")
            ways.setdefault(parent, set()).add(last)
            path = parent
    return ways


def written_out(owner: nn.Module, paths: Sequence[str]) -> dict[str, set[str]]:
    """Return what to seal where a graph computes what calls of modules did: their settings, and the way there."""
    sealed = ways_to(paths)
    for path in paths:
        sealed.setdefault(path, set()).update(settings_of(owner.get_submodule(path)), ("forward",))
    return sealed


def _with_sealed(module: nn.Module, names: Collection[str]) -> frozenset[str]:
    if taken := sorted(_SET_BY_TORCH.intersection(names)):
        raise UsageError(f"{taken[0]!r} cannot be sealed: torch sets it where a model is trained, moved or copied")
    known = sealed_names(module)
    return known.union(names) if known else frozenset(names)


def _check_slice(module: nn.Module, name: str, view: View) -> None:
    parameter = own_tensor(module, name)
    if parameter is None:
        raise FusedMemberError(f"this {type(module).__name__} has no parameter '{name}' of its own")
    stacked = by_member(view.store, view.name, view.stacked)
    if stacked.shape[1:] != parameter.shape or not 0 <= view.position < stacked.shape[0]:
        raise FusedMemberError(
            f"'{name}' of this {type(module).__name__} has shape {list(parameter.shape)}; it cannot be slice "
            f"{view.position} of '{view.name}', which has shape {list(stacked.shape)}"
        )


# -- classes -------------------------------------------------------------------------------------------------------


def _change(module: nn.Module, entries: Mapping[str, Any]) -> Callable[[], None]:
    """Set or delete entries of `__dict__` and give the module the class that goes with them; return how to go back."""
    attributes = module.__dict__
    before = {key: attributes.get(key) for key in entries}
    capture, old_class = capture_of(module), own_class(module)
    owner = capture and capture.owner
    _set(module, entries)
    _put_class(module, _class_for(module, old_class), capture, owner)
    return partial(_change_back, module, before, old_class, capture, owner, capture_of(module))


def _change_back(
    module: nn.Module,
    before: Mapping[str, Any],
    old_class: type[nn.Module],
    capture: Capture | None,
    owner: weakref.ref[nn.Module] | None,
    installed: Capture | None,
) -> None:
    _set(module, before)
    current = capture_of(module)
    if current is installed:
        _put_class(module, old_class, capture, owner)
    else:
        _put_class(module, old_class, current, current and current.owner)


def _set(module: nn.Module, entries: Mapping[str, Any]) -> None:
    attributes = module.__dict__
    for key, value in entries.items():
        if value:
            attributes[key] = value
        else:
            attributes.pop(key, None)


def _class_for(module: nn.Module, cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that serves the module's views and seal; without any, the one that `cls` was made from."""
    base: type[nn.Module] = cls.__dict__.get(FUSED_FROM, cls)
    names = tuple(views_of(module))
    if not names and (issubclass(base, FusedPart) or not sealed_names(module)):
        return base
    return fused_class(base, names)


def _put_class(
    module: nn.Module, cls: type[nn.Module], capture: Capture | None, owner: weakref.ref[nn.Module] | None
) -> None:
    """Change the class below the module's graphs."""
    if capture is None:
        object.__setattr__(module, "__class__", cls)
        return
    # It may be a copy, for the other class: it belongs to whom the first belonged.
    install(module, capture, cls).owner = owner
