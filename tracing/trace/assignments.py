"""Attributes that a forward sets, on its module or on modules inside: a node sets them again, at the same place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...runtime.guards import (
    SELF,
    Attribute,
    Dictionary,
    Guard,
    Lacks,
    Source,
    Truth,
    exactly,
    is_tensor,
    key_of,
    module_at,
)
from ...runtime.values import INTERNAL, Absent, qualified
from ..isolation import Change
from ..proxies import Tracer, ValueProxy

__all__ = ["Assignments", "State", "assign"]

State = Mapping[tuple[nn.Module, str], Any]
_Place = tuple[nn.Module, str]
"""What attributes of modules are: (module, name) -> value; what is not there is `Absent`."""

_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
_REGISTERED = (nn.Parameter, nn.Buffer, nn.Module)
"""What becomes more than an attribute when it is assigned."""


def assign(setter: Callable[[str, Any], None], name: str, value: Any) -> None:
    """Set an attribute, in a graph; `setter` is the `__setattr__` of the module."""
    setter(name, value)


class Assignments:
    """Record the attributes that a traced forward sets, as proxies for the rest of the trace. `by_calls`: own
    attributes that calls set, if that is `recorded`; `state`: what attributes are to be; `left`: what the call leaves
    where the next one may need another graph.
    """

    def __init__(
        self,
        tracer: Tracer,
        by_calls: Mapping[nn.Module, frozenset[str]],
        state: State,
        keep: Callable[[Tensor], object],
        *,
        recorded: bool,
    ) -> None:
        self._recorded = recorded
        self.by_calls = by_calls
        self.state = state
        self.left: State | None = None
        self._keep = keep
        self.nodes: list[fx.Node] = []
        self._tracer = tracer
        self.names: set[str] = set()
        self.guards: list[Guard] = []
        self._before: dict[_Place, Any] = {}
        self._start: dict[_Place, Any] = {}
        self._read: set[_Place] = set()
        self._written: dict[_Place, Any] = {}

    def begin(self) -> None:
        """Give modules the attributes that they had when the call to trace was recorded."""
        for (module, name), value in self.state.items():
            self._before.setdefault((module, name), _held(module, name))
            _put(module, name, value)

    def note_read(self, module: nn.Module, name: str) -> None:
        """Note that an attribute is read: what it was before the call matters, if the call has not set it yet."""
        if (module, name) not in self._written:
            self._read.add((module, name))

    def is_written(self, module: nn.Module, name: str) -> bool:
        """Tell whether the call has set an attribute."""
        return (module, name) in self._written

    def record(self, module: nn.Module, path: str, name: str, value: Any) -> None:
        """Record one; give up if no graph can say it."""
        target = qualified(path, name)
        with self._tracer.session.aside():
            if _held(module, name) is value and not self._may_be_another(module, name):
                return
            is_buffer = name in module.__dict__["_buffers"] and isinstance(_example(value), Tensor)
            if not _is_plain(module, name) or not (is_buffer or _can_be_set(value)):
                self._tracer.fail(f"it assigns self.{target}")
            if module is self._tracer.module and name in self._tracer.seen_names():
                self.note_read(module, name)
            self._write(module, path, name, value)

    def _may_be_another(self, module: nn.Module, name: str) -> bool:
        """Tell whether an attribute that has a value now may have another one at a later call: some call sets it."""
        if (module, name) in self._written:
            return False
        return not self._recorded or name in self.by_calls.get(module, ())

    def change(self, places: Iterable[_Place], other: Change | None) -> Change:
        """Return the change that a call which sets attributes makes, and `other` with it."""
        attributes: list[tuple[str, str]] = []
        revocable = other is None or other.revocable
        for module, name in places:
            path = self._tracer.names.relative(self._tracer.owner, module)
            revocable &= path is not None and _can_be_set(_held(module, name))
            attributes.append((_setter(path or ""), name))
        return Change(revocable, paths={} if other is None else other.paths, attributes=attributes)

    def _write(self, module: nn.Module, path: str, name: str, value: Any) -> None:
        now = _held(module, name)
        self._start.setdefault((module, name), now)
        if isinstance(now, Tensor):
            self._keep(now)  # whoever holds it will go on with it, and not with the new one
        graph = self._tracer.graph
        setter = graph.get_attr(_setter(path))
        node = graph.call_function(assign, (setter, name, self._tracer.constant(value)))
        node.meta["val"] = setter.meta["val"] = None
        self._tracer.note_lasting(node, Change(revocable=True, attributes=[(_setter(path), name)]))
        self.nodes.append(node)
        self._written[module, name] = value
        _put(module, name, value)

    def settle(self, seen: Collection[str]) -> None:
        """Make guards of what was read, and see what the call leaves; `seen` are names read of the module itself."""
        module = self._tracer.module
        set_by_calls = self.by_calls.get(module, frozenset())
        self._read |= {(module, name) for name in set_by_calls & set(seen) if (module, name) not in self._written}
        self.names = {name for owner, name in self._written if owner is module} | set_by_calls
        for owner, name in sorted(self._read, key=lambda place: place[1]):
            if (owner, name) in self._written or owner is module:
                value = self._start.get((owner, name), _held(owner, name))
                path = self._tracer.names.relative(self._tracer.owner, owner) or ""
                self.guards += _guards_on(module_at(filter(None, path.split("."))), name, value)
        self._see_what_is_left()

    def _see_what_is_left(self) -> None:
        after = {place: _example(value) for place, value in self._written.items()}
        for place in self._read & self._written.keys():
            if _guards_on(SELF, place[1], self._start[place]) != _guards_on(SELF, place[1], after[place]):
                self.left = {**self.state, **after}

    def undo(self) -> None:
        """Put the attributes back as the call found them."""
        for (module, name), value in self._start.items():
            _put(module, name, value)

    def end(self) -> None:
        """Put the attributes back as they were before the trace."""
        self.undo()
        for (module, name), value in self._before.items():
            _put(module, name, value)


def _setter(path: str) -> str:
    return f"{path}.__setattr__" if path else "__setattr__"


def _held(module: nn.Module, name: str) -> Any:
    """Return an attribute or buffer as it is held, or Absent."""
    buffers = module.__dict__["_buffers"]
    return buffers[name] if name in buffers else module.__dict__.get(name, Absent)


def _put(module: nn.Module, name: str, value: Any) -> None:
    buffers = module.__dict__["_buffers"]
    if value is Absent:
        module.__dict__.pop(name, None)
    elif name in buffers:
        buffers[name] = value
    else:
        module.__dict__[name] = value


def _is_plain(module: nn.Module, name: str) -> bool:
    """Tell whether setting an attribute only puts a value into the dictionary of its module, or that of its buffers."""
    attributes = module.__dict__
    if name in INTERNAL or not name.isidentifier():
        return False
    if any(name in cast("dict[str, Any]", attributes[kind]) for kind in ("_parameters", "_modules")):
        return False
    return not hasattr(inspect.getattr_static(type(module), name, None), "__set__")


def _can_be_set(value: Any) -> bool:
    example = _example(value)
    if isinstance(example, _REGISTERED):
        return False
    if type(example) is tuple:
        return all(map(_can_be_set, cast("tuple[Any, ...]", example)))
    return isinstance(example, (Tensor, *_VALUES))


def _example(value: Any) -> Any:
    return value.fxopt_value if issubclass(type(value), ValueProxy) else value


def _guards_on(owner: Source, name: str, value: Any) -> list[Guard]:
    """Return guards on what an attribute that calls set is when a call starts."""
    source, reason = Attribute(owner, name), f"{name}, which calls set, was {_described(value)} at capture"
    if value is Absent:
        return [Guard(Dictionary(owner), Lacks(key_of(name)), reason)]
    if isinstance(value, Tensor):
        return [is_tensor(source, True, reason)]
    guards = exactly(source, value, reason) if _can_be_set(value) else []
    return guards or [Guard(key_of(False), Truth(True), reason)]


def _described(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else "not there" if value is Absent else repr(value)
