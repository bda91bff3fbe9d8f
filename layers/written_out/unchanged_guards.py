"""Whether modules that something else computes are still what they were, asked at each call of what is around."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import getitem, is_
from typing import Any, cast

import torch
from torch import nn

from ...compat import REGISTERS, hook_registries, own_children, runs_hooks
from ...runtime.graphs import capture_of
from ...runtime.guards import NOT_HELD
from ...runtime.values import Absent, is_plain_structure, user_class

__all__ = ["Opened", "UnchangedGuard"]


@dataclass(frozen=True)
class Opened:
    """A module inside another one, as it was when its call was written out, or one on the way to it."""

    path: str
    kind: type[nn.Module]
    settings: tuple[tuple[str, Any], ...]  # attributes as they were written out
    has_graph: bool
    reads: tuple[str, ...]  # the names of all attributes that count
    without: tuple[str, ...]  # parameters and buffers that are None
    children: int | None  # how many, or None where that does not count

    @classmethod
    def leaf(cls, path: str, module: nn.Module, settings: tuple[tuple[str, Any], ...]) -> Opened:
        """Return what a layer is now, of which settings were written out; of what is only on the way none."""
        return cls(path, user_class(type(module)), settings, False, _names(settings), _without(module), _count(module))

    @classmethod
    def computed(cls, path: str, module: nn.Module, settings: Iterable[str]) -> Opened:
        """Return what a layer is now that is computed by something else; its own class refuses settings."""
        kept = tuple((name, _kept(vars(module)[name])) for name in settings if name in vars(module))
        return cls(path, user_class(type(module)), kept, False, (), _without(module), None)

    @classmethod
    def captured(cls, path: str, module: nn.Module, reads: Iterable[str]) -> Opened:
        """Return what a module is now, whose graph was written out, which was made for some attributes."""
        reads = tuple(reads)
        plain = tuple(
            (name, vars(module)[name]) for name in reads if is_plain_structure(vars(module).get(name, Absent))
        )
        settings = tuple((name, _kept(value)) for name, value in plain)
        return cls(path, user_class(type(module)), settings, True, reads, _without(module), _count(module))

    def inside(self, path: str) -> Opened:
        """Return it as it is called where the module around it is called `path`."""
        return replace(self, path=f"{path}.{self.path}" if path else self.path)

    def with_setting(self, name: str, value: Any) -> Opened:
        """Return it with one more attribute whose value was written out."""
        settings = (*self.settings, (name, value))
        reads = self.reads if name in self.reads else (*self.reads, name)
        return self if name in _names(self.settings) else replace(self, settings=settings, reads=reads)


def _names(settings: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    return tuple(name for name, _ in settings)


def _without(module: nn.Module) -> tuple[str, ...]:
    tensors = [item for register in REGISTERS for item in vars(module)[register].items()]
    return tuple(name for name, tensor in tensors if tensor is None)


def _count(module: nn.Module) -> int:
    return len(own_children(module))


class UnchangedGuard:
    """Say of a module whether those inside of it are what they were when calls were written out, and run no hooks.
    At each call lists are compared; copies and pickles look anew. `compiled` answers while `torch.compile` reads the
    code.
    """

    __name__ = "calls_unchanged"

    def __init__(self, opened: Sequence[Opened], children: int | None, *, compiled: bool = False) -> None:
        self.opened, self.children, self.compiled = tuple(opened), children, compiled
        self._known: dict[int, tuple[Any, ...]] = {}
        """By the identity of the module, for copies of a model may share a graph: what those inside are like.
        `places` at `names` hold `values` of `types`; `registries`, of attributes and children, are of `sizes`.
        """

    def __call__(self, module: nn.Module) -> bool:
        if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and not self.compiled):
            return self.compiled
        known = self._known.get(id(module))
        if known is not None:
            hooks, places, names, values, types, registries, sizes, modules, kinds, is_right, _ = known
            if any(hooks) and runs_hooks(hooks):
                return False
            try:
                held = [*map(getitem, places, names)]
                if (
                    held == values
                    and [*map(type, held)] == types
                    and [*map(len, registries)] == sizes
                    and [*map(type, modules)] == kinds
                    and all(map(is_, map(vars, modules), registries))  # attributes come first there
                ):
                    return is_right
            except NOT_HELD:
                pass
        return self._look(module)

    def _look(self, module: nn.Module) -> bool:
        """Look at each module, and note what it is like."""
        try:
            noted = self._noted(module)
        except NOT_HELD:
            return False  # one is not there
        key, known = id(module), self._known
        known[key] = (*noted, weakref.ref(module, lambda _: known.pop(key, None)))
        hooks, *_, is_right = noted
        return is_right and not runs_hooks(hooks)

    def _noted(self, module: nn.Module) -> tuple[Any, ...]:
        places: list[dict[str, Any]] = []
        names: list[str] = []
        modules: list[nn.Module] = []
        by_path, is_right = {"": module}, self.children in (None, _count(module))
        for each in self.opened:
            parent, _, last = each.path.rpartition(".")
            places.append(cast("dict[str, Any]", own_children(by_path[parent])))
            names.append(last)
            inside = by_path[each.path] = cast("nn.Module", places[-1][last])
            modules.append(inside)
            is_right = is_right and _is_unchanged(inside, each)
            for registry, own in ((vars(inside), each.reads), *((vars(inside)[r], each.without) for r in REGISTERS)):
                there = [name for name in own if name in registry]
                places += [registry] * len(there)
                names += there
        values = [_kept(place[name]) for place, name in zip(places, names, strict=True)]
        parents = [cast("dict[str, Any]", own_children(each)) for each in (module, *modules)]
        registries = [*map(vars, modules), *(children for children in parents if children)]
        return (
            hook_registries(*modules), places, names, values, [*map(type, values)], registries, [*map(len, registries)],
            modules, [*map(type, modules)], is_right,
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnchangedGuard) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(tuple(each.path for each in self.opened))

    def __repr__(self) -> str:
        return f"UnchangedGuard({len(self.opened)} modules)"

    def __deepcopy__(self, memo: dict[int, Any]) -> UnchangedGuard:
        return _unchanged_guard(*self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchanged_guard, self._settings

    @property
    def _settings(self) -> tuple[tuple[Opened, ...], int | None, bool]:
        return self.opened, self.children, self.compiled


def _unchanged_guard(opened: Sequence[Opened], children: int | None, compiled: bool) -> UnchangedGuard:
    return UnchangedGuard(opened, children, compiled=compiled)


def _is_unchanged(module: nn.Module, opened: Opened) -> bool:
    if opened.children not in (None, _count(module)):
        return False
    if _kind(module) is not opened.kind or "forward" in vars(module):
        return False
    if any(vars(module)[register].get(name) is not None for register in REGISTERS for name in opened.without):
        return False
    capture = capture_of(module) if opened.has_graph else None
    if opened.has_graph and (capture is None or not capture.is_whole):
        return False
    return all(_is_same(vars(module).get(name, Absent), value) for name, value in opened.settings)


def _kind(module: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module; a class that was derived of a dynamic one is one of its own."""
    kind = type(module)
    return user_class(kind) if "_fxopt_base" in vars(kind) else kind


def _is_same(now: Any, then: Any) -> bool:
    """Say whether plain values are the same; `==` takes 1, 1.0 and True for one."""
    return now is then or (type(now) is type(then) and now == then and repr(now) == repr(then))


def _kept(value: Any) -> Any:
    """Return a value to compare with later: of what may be changed in place a copy."""
    return copy.deepcopy(value) if type(value) in (list, dict, set) else value
