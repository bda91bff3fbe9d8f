"""What modules hold besides children and tensors: optimizers, lists, dictionaries, objects with these."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...compat import modules_by_name
from ...tracing.values import INTERNAL

__all__ = ["Holding", "held_in"]

_ATOMS = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, enum.Enum, nn.Module,
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
    theirs = dict(_parts(other))
    for key, part in _parts(one):
        if key in theirs:
            at = f"{holding.path}[{key!r}]" if isinstance(one, (Mapping, tuple, list)) else f"{holding.path}.{key}"
            yield from _within(Holding(at, holding.owner, one, part, theirs[key], _putter(other, key)), seen)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a container or an object holds, by key, place or name."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[Any, Any]", value).items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(cast("list[Any]", value)))
    return list(vars(cast("object", value)).items()) if hasattr(value, "__dict__") else []


def _putter(container: Any, key: Any) -> Callable[[Any], None] | None:
    if isinstance(container, (dict, list)):
        return lambda value: cast("dict[Any, Any]", container).__setitem__(key, value)
    if isinstance(container, (tuple, Mapping)) or not hasattr(cast("object", container), "__dict__"):
        return None
    attributes: dict[Any, Any] = vars(cast("object", container))
    return lambda value: attributes.__setitem__(key, value)
