"""Copies of module trees, and what modules hold besides children and tensors: optimizers, lists, objects with these."""

from __future__ import annotations

import copy
import enum
import functools
import types
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...compat import all_modules, modules_by_name, own_buffers, own_parameters, transient_buffers
from ...errors import StateError
from ...runtime.graphs import capture_of
from ...runtime.values import INTERNAL, all_tensors, held_tensors, is_scripted

__all__ = ["Holding", "copied_module", "held_in", "parts_of", "plain_registries", "shallow_clone", "skeleton_of"]


M = TypeVar("M", bound=nn.Module)


def copied_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return `copy.deepcopy(module, memo)`. Tensors that a forward left in attributes or buffers are copied without
    their history, where `deepcopy` raises.
    """
    memo = {} if memo is None else memo
    for tensor in _left_behind(module):
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
    with warnings.catch_warnings():  # what `torch.export` wrote is copied by a class of torch that warns of itself
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        made = copy.deepcopy(module, memo)
    for inner, before in zip(all_modules(made), all_modules(module), strict=False):
        if is_scripted(inner):  # torch copies its parameters with a history
            for parameter, old in zip(inner.parameters(), before.parameters(), strict=True):
                parameter.detach_().requires_grad_(old.requires_grad)
    return made


def _left_behind(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that still have the graph that they come from."""
    for inner in all_modules(module):
        yield from (tensor for tensor in held_tensors(inner) if not tensor.is_leaf)


def shallow_clone(module: M) -> M:
    """Return a copy of the module tree as it runs now, on the same parameters and buffers. Later rewrites of `module`
    do not reach the copy; writes into its parameters do.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in all_tensors(all_modules(module))}
    memo |= {id(optimizer): optimizer for optimizer in _held_optimizers(module)}
    for submodule in all_modules(module):
        capture = capture_of(submodule)
        if capture is not None:
            memo[id(capture)] = capture
    made = copied_module(module, memo)
    _make_registries_plain(made)
    return made


def skeleton_of(module: M) -> M:
    """Return the structure of a module: a copy in which what state dicts hold is on the meta device."""
    return copied_module(module, {id(tensor): _on_meta(tensor) for tensor in (*_saved(module), *_moments(module))})


def _saved(module: nn.Module) -> Iterator[Tensor]:
    for inner in all_modules(module):
        transient = transient_buffers(inner)
        for registry, left_out in ((own_parameters(inner), ()), (own_buffers(inner), transient)):
            yield from (tensor for name, tensor in registry.items() if tensor is not None and name not in left_out)


def _moments(module: nn.Module) -> Iterator[Tensor]:
    """Yield what the optimizers that a model holds know of its parameters."""
    for optimizer in _held_optimizers(module):
        for known in optimizer.state.values():
            yield from (value for value in known.values() if isinstance(value, Tensor))


def _held_optimizers(module: nn.Module) -> list[Optimizer]:
    return [each.one for each in held_in(module, module) if isinstance(each.one, Optimizer)]


def _on_meta(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor.to("meta")  # a quantized one, say, which makes no empty one like itself
    skeleton = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(skeleton, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else skeleton


_REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextmanager
def plain_registries(model: nn.Module) -> Generator[None]:
    """Let scripted modules inside `model` show their tensors and children as plain dictionaries for a while."""
    scripted = [module for module in all_modules(model) if is_scripted(module)]
    kept = [(vars(module), {name: vars(module)[name] for name in _REGISTRIES}) for module in scripted]
    try:
        _make_registries_plain(model)
        yield
    finally:
        for attributes, registries in kept:
            attributes.update(registries)


def _make_registries_plain(model: nn.Module) -> None:
    """Let scripted modules inside a copy that no user gets show their tensors and children as plain dictionaries."""
    for module in filter(is_scripted, all_modules(model)):
        vars(module).update({name: dict(vars(module)[name].items()) for name in _REGISTRIES})


_ATOMS = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, enum.Enum, nn.Module,
    Tensor, torch.Generator, str, bytes, int, float, complex, bool, type(None),
)  # fmt: skip
_OF_RECURRENT_LAYERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Second lists of their parameters, which these layers make anew by themselves."""


@dataclass(frozen=True)
class Holding:
    """A container, or an object, that holds something; and what has the same place in the other model."""

    path: str  # where it is, for messages
    owner: str  # the qualified name of the module
    around: Any  # what it is in, in the first model: attributes of a module, a container, an object
    one: Any  # what is there in the first model
    other: Any  # and in the other
    # puts something else in the place of `other`; None where that is in a tuple or a set
    put: Callable[[Any], None] | None


def held_in(model: nn.Module, other: nn.Module) -> list[Holding]:
    """Return every container and object in the attributes of a model's modules, beside that in the other model, from
    outside inwards; none that only one model has. StateError: a set holds several optimizers of one type.
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
            if name in theirs and not isinstance(value, _ATOMS):
                at = f"{path}.{name}" if path else name
                found += _within(Holding(at, path, vars(module), value, theirs[name], _putter(theirs, name)), seen)
    return found


def _within(holding: Holding, seen: set[int]) -> Generator[Holding]:
    one, other = holding.one, holding.other
    if type(one) is not type(other) or id(one) in seen:
        return
    yield holding
    if isinstance(one, Optimizer):  # wherever it is: schedulers have it, too
        return
    seen.add(id(one))
    theirs = dict(_in_set_like(holding) if isinstance(one, (set, frozenset)) else parts_of(other))
    for key, part in parts_of(one):
        if key in theirs and not isinstance(part, _ATOMS):
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
