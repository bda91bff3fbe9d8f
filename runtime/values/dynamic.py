"""Classes made on the fly, that pass for the class they derive from: one factory for all of them.
One that is not captured carries `_fxopt_base`, the user's class, and `_fxopt_recipe`, a picklable function and its
arguments that make it again. Where several meet, the captured class is outermost.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import fx, nn

from ...compat import REGISTERS

__all__ = [
    "Quiet", "Remade", "cached_by_class", "class_recipe", "empty_module", "identity", "in_class", "remade_by",
    "same_kind", "subclass", "user_class",
]  # fmt: skip

_Key = tuple[type, tuple[type, ...], object]
_classes: weakref.WeakValueDictionary[_Key, type] = weakref.WeakValueDictionary()


def subclass(
    base: type, mixins: tuple[type, ...], body: Callable[[], Mapping[str, Any]], *, key: object = None
) -> type[Any]:
    """Return the subclass of `mixins` and `base` that passes for `base`: the same name, module and description.
    `body` makes further attributes. Classes are kept by `key` while in use; None makes one anew each time.
    """
    known = None if key is None else _classes.get((base, mixins, key))
    if known is not None:
        return known
    presented = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    namespace = {**presented, **body()}
    made = types.new_class(base.__name__, (*mixins, base), exec_body=lambda names: names.update(namespace))
    if key is not None:
        _classes[base, mixins, key] = made
    return made


class Quiet:
    """Keep the user's `__init_subclass__` from seeing the classes made here."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class Remade(Quiet):
    """Let instances of a dynamic class be copied and pickled: the class is made again from its recipe."""

    def __reduce__(self) -> tuple[Any, ...]:
        return empty_module, class_recipe(cast("Any", type(self))), vars(self)


def user_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the user's class under a dynamic one; any other class is its own."""
    return getattr(cls, "_fxopt_base", cls)


def same_kind(one: object, other: object) -> bool:
    """Say whether two values are modules of one class, but for what was made of it on the fly.

    Torch makes a class for each `GraphModule`, also for a copy: what these have in common is their code.
    """
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        return one.code == other.code
    if not isinstance(one, nn.Module) or not isinstance(other, nn.Module):
        return False
    return user_class(type(one)) is user_class(type(other))


def identity(cls: type[nn.Module]) -> type[nn.Module]:
    """Return `cls`: how to make a class that pickles by name."""
    return cls


def class_recipe(cls: type[nn.Module]) -> tuple[Callable[..., type[nn.Module]], tuple[Any, ...]]:
    """Return a function and arguments, all picklable, that make `cls` again."""
    return getattr(cls, "_fxopt_recipe", (identity, (cls,)))


def remade_by(make: Callable[..., type[nn.Module]], base: type[nn.Module], *arguments: Any) -> dict[str, Any]:
    """Return what a class that `make(base, *arguments)` makes says of itself: the user's class, and its recipe."""
    return {"_fxopt_base": user_class(base), "_fxopt_recipe": (_remade, (make, class_recipe(base), arguments))}


def _remade(make: Callable[..., type[nn.Module]], of_base: tuple[Any, ...], arguments: tuple[Any, ...]) -> type[Any]:
    """Return a class again, whose base may be one that was made on the fly, too."""
    make_base, given = of_base
    return make(make_base(*given), *arguments)


def empty_module(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> nn.Module:
    """Return a module without attributes, of the class that a recipe makes: what a pickle of one begins with."""
    return nn.Module.__new__(make(*arguments))


def in_class(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Return a module of another class that has what `module` has, with registers of its own."""
    made = nn.Module.__new__(cls)
    registers = {name: dict(vars(module)[name]) for name in (*REGISTERS, "_modules")}
    vars(made).update(vars(module) | registers)
    return made


T = TypeVar("T")


def cached_by_class(function: Callable[[type[Any]], T]) -> Callable[[type[Any]], T]:
    """Let a function of one class be computed once for each, and keep none alive: its result must not refer to it."""
    known: weakref.WeakKeyDictionary[type[Any], T] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(cls: type[Any]) -> T:
        try:
            return known[cls]
        except KeyError:
            answer = known[cls] = function(cls)
            return answer

    return cached
