"""What modules hold besides children and tensors: optimizers, lists, dictionaries, objects with these."""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...compat import modules_by_name
from ...errors import StateError
from ...runtime.values import INTERNAL

__all__ = ["Holding", "held_in", "parts_of"]

_ATOMS = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, enum.Enum, nn.Module,
    Tensor, torch.Generator, str, bytes, int, float, complex, bool, type(None),
)  # fmt: skip
_OF_RECURRENT_LAYERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Second lists of their parameters, which these layers make anew by themselves."""


@dataclass(frozen=True)
class Holding:
    """A container, or an object, that holds something; and what has the same place in the other model.

    Attributes:
        path: where it is, for messages.
        owner: the qualified name of the module.
        around: what it is in, in the first model: the attributes of a module, a container, an object.
        one, other: what is there in one model and in the other.
        put: puts something else in the place of `other`; None where that is in a tuple or a set.
    """

    path: str
    owner: str
    around: Any
    one: Any
    other: Any
    put: Callable[[Any], None] | None


def held_in(model: nn.Module, other: nn.Module) -> list[Holding]:
    """Return every container and object in the attributes of a model's modules, beside that in the other model.

    What a rewrite has put in another's place, and what is in one of the models only, is left out. The order is from
    outside inwards.

    Raises:
        StateError: a set holds several optimizers of one type, and so does its copy.
    """
    found: list[Holding] = []
    seen: set[int] = set()
    others = modules_by_name(other, every_name=True)
    for path, module in modules_by_name(model).items():
        if path not in others:
            continue
        for name, value in list(vars(module).items()):
            if name in INTERNAL or name in _OF_RECURRENT_LAYERS or name.startswith("_fxopt"):
                continue
            theirs = vars(others[path])
            if name in theirs:
                at = f"{path}.{name}" if path else name
                found += _within(Holding(at, path, vars(module), value, theirs[name], _putter(theirs, name)), seen)
    return found


def _within(holding: Holding, seen: set[int]) -> Generator[Holding]:
    one, other = holding.one, holding.other
    if isinstance(one, _ATOMS) or type(one) is not type(other) or id(one) in seen:
        return
    yield holding
    if isinstance(one, Optimizer):  # wherever it is: schedulers have it, too
        return
    seen.add(id(one))
    theirs = dict(_in_set_like(holding) if isinstance(one, (set, frozenset)) else parts_of(other))
    for key, part in parts_of(one):
        if key in theirs:
            is_container = isinstance(one, (Mapping, tuple, list, deque, set, frozenset))
            at = f"{holding.path}[{key!r}]" if is_container else f"{holding.path}.{key}"
            yield from _within(Holding(at, holding.owner, one, part, theirs[key], _putter(other, key)), seen)


def _in_set_like(holding: Holding) -> Generator[tuple[int, Any]]:
    """Yield what the copy of a set has for each item, by the item's place: in the copy they come in any order."""
    others: set[Any] = holding.other
    for place, item in parts_of(holding.one):
        alike = [item] if item in others else [each for each in others if type(each) is type(item)]
        if len(alike) == 1:
            yield place, alike[0]
        elif isinstance(item, Optimizer):
            raise StateError(
                f"the model holds several {type(item).__name__} in the set '{holding.path}'; the copies there "
                "cannot be told apart: hold them in a list"
            )


class _Nth(NamedTuple):
    """Stands for a key that is a tensor: the copy of a dictionary has another tensor in the same place."""

    place: int

    def __repr__(self) -> str:
        return f"parameter {self.place}"


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what a container or an object holds, by key, place or name."""
    if isinstance(value, Mapping):
        items = enumerate(cast("Mapping[Any, Any]", value).items())
        keyed = ((_Nth(place) if isinstance(key, Tensor) else key, part) for place, (key, part) in items)
        return [*keyed, *_beside_items(value)]
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return [*enumerate(cast("list[Any]", value)), *_beside_items(value)]
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, functools.partial):
        whole = cast("functools.partial[Any]", value)
        return [("func", whole.func), ("args", whole.args), ("keywords", whole.keywords)]
    return [*_in_slots(value), *(vars(value).items() if hasattr(value, "__dict__") else ())]


def _beside_items(container: Any) -> list[tuple[Any, Any]]:
    """Return the attributes of a container of a user's class, as one dictionary."""
    attributes = getattr(container, "__dict__", None)
    return [("__dict__", attributes)] if attributes and attributes is not container else []


def _in_slots(value: Any) -> list[tuple[Any, Any]]:
    names = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    return [(name, getattr(value, name)) for name in names if not name.startswith("__")]


def _slots(kind: type) -> tuple[str, ...]:
    slots: Any = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _putter(container: Any, key: Any) -> Callable[[Any], None] | None:
    if isinstance(key, _Nth) or isinstance(container, (tuple, set, frozenset, types.MethodType, functools.partial)):
        return None
    if isinstance(container, (dict, list, deque)):
        return lambda value: cast("dict[Any, Any]", container).__setitem__(key, value)
    if isinstance(container, Mapping):
        return None
    attributes: dict[Any, Any] = getattr(cast("object", container), "__dict__", {})
    if key in attributes:
        return lambda value: attributes.__setitem__(key, value)
    return lambda value: object.__setattr__(cast("object", container), key, value)  # a slot, of what is frozen, too
