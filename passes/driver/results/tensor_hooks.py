"""Hooks on parameters: copies do not have them, so they are registered again on what stands in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, cast

from torch import Tensor, nn

from ....compat import tensor_hooks

__all__ = ["carry_tensor_hooks", "lost_hooks_text"]

_Hooks = list[tuple[str, Callable[..., Any]]]


def carry_tensor_hooks(source: nn.Module, target: nn.Module, originals: Iterable[str] = ()) -> list[str]:
    """Register the hooks on a model's parameters on those of another with the same `originals`; return names left out.

    A member of fused ones has a live view there, whose hooks act on its slice. Torch's copies have no such hooks.
    """
    lost: list[str] = []
    for names, tensor, hooks in _hooked(source, originals):
        places = (_tensor_at(target, name) for name in names)
        place = next((found for found in places if found is not None and found.shape == tensor.shape), None)
        if place is None or not place.requires_grad:
            lost.append(names[0])
            continue
        for method, hook in hooks:
            getattr(place, method)(hook)
    return lost


def lost_hooks_text(names: Sequence[str]) -> str:
    """Say which parameters lost their hooks, and what to do; "" where none did."""
    if not names:
        return ""
    shown = ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"hooks on the gradient of {shown} were not carried over: no parameter of this name and shape is trained any "
        "more; register them on the parameters of the result"
    )


def _hooked(model: nn.Module, originals: Iterable[str]) -> Iterator[tuple[list[str], Tensor, _Hooks]]:
    """Yield parameters that have hooks, fused members' too, with all names of each."""
    own: Mapping[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found: dict[object, tuple[list[str], Tensor]] = {}
    for name in dict.fromkeys((*own, *originals)):
        tensor = own[name] if name in own else _tensor_at(model, name)
        if isinstance(tensor, Tensor):
            found.setdefault(_identity(tensor), ([], tensor))[0].append(name)
    for names, tensor in found.values():
        hooks = _hooks_of(tensor)
        if hooks:
            yield names, tensor, hooks


def _identity(tensor: Tensor) -> object:
    """Return what is equal for one tensor under several names: live views are made anew each time."""
    view = getattr(tensor, "_fxopt_view", None)
    return id(tensor) if view is None else (id(view.stacked), view.position)


def _hooks_of(tensor: Tensor) -> _Hooks:
    """Return the user's hooks on a parameter, or on the member of fused ones that a live view stands for."""
    view = getattr(tensor, "_fxopt_view", None)
    if view is None:
        plain = [(method, hook) for method, hook in tensor_hooks(tensor) if not hasattr(hook, "of_member")]
        return [(method, hook) for method, hook in plain if not _is_of_fxopt(hook)]
    of_members = [(method, getattr(hook, "of_member", None)) for method, hook in tensor_hooks(view.stacked)]
    return [(method, member[1]) for method, member in of_members if member is not None and member[0] == view.position]


def _is_of_fxopt(hook: Callable[..., Any]) -> bool:
    """Say whether a hook is a method of something that a pass made, which belongs to its model."""
    return type(getattr(hook, "__self__", None)).__module__.startswith(f"{__name__.partition('.')[0]}.")


def _tensor_at(model: nn.Module, name: str) -> Tensor | None:
    """Return what code finds that reaches for a tensor by its name; a live view of a fused member, say."""
    try:
        found: object = reduce(getattr, name.split("."), cast("Any", model))
    except (AttributeError, KeyError, IndexError):
        return None
    return found if isinstance(found, Tensor) else None
