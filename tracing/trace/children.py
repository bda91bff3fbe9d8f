"""Calls of children while their parent is traced, and what else a forward asks of them: their classes may decide.

A child of the module itself that is replaced by one of another class is noticed when that happens; what is further
inside, and what was asked for its class, is guarded.
"""

from __future__ import annotations

import dis
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import all_modules, own_children
from ...runtime.guards import Attribute, Guard, Is, Lacks, Method, equal, key_of, module_at, of_class, type_of
from ...runtime.values import CONTAINERS, all_tensors, graft, is_leaf, is_library, map_leaves, objects_in, user_class
from ..isolation import Change, Changes, Watch
from ..proxies import UNKNOWN, Tracer, ValueProxy
from ..reads import NestedReads, class_attribute, frames_of_trace, guards_on, is_users
from ..recording import Call, Computed

__all__ = ["ChildReads", "Children"]


class Children:
    """Record the calls of children; each gives what the same call gave when the model was recorded."""

    def __init__(self, tracer: Tracer, call: Call | None, questions: ChildReads, changes: Changes) -> None:
        self._tracer = tracer
        self._questions = questions
        self._changes = changes
        self._called: set[nn.Module] = set()
        self._results: dict[nn.Module, deque[Call]] = {}
        for child, child_call in [] if call is None else call.children:
            self._results.setdefault(child, deque()).append(child_call)

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record a call; a module that is no child, and holds no tensors, is traced through."""
        path = self._tracer.names.relative(self._tracer.owner, module)
        if path is None:
            if all_tensors(all_modules(module)):
                self._tracer.fail(f"it calls a {type(module).__name__} that is not registered as its child")
            return original(module, *args, **kwargs)
        if not path:
            self._tracer.fail("it calls itself")
        if self._tracer.opens(module):
            return user_class(type(module)).forward(module, *args, **kwargs)
        self._questions.note_called(module)
        value, lasting = self._outcome(original, module, args, kwargs)
        self._called.add(module)
        fixed = is_library(type(module)) and is_leaf(module)
        return self._tracer.add("call_module", path, args, kwargs, value, optional=True, fixed=fixed, lasting=lasting)

    def _outcome(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Change | None]:
        """Return the example value of a call, and what it changed that outlives the traced forward."""
        calls = self._results.get(module)
        if calls and _are_tensors(args) and _are_tensors(kwargs.values()):  # as most calls are
            call = calls.popleft()
            with self._tracer.session.aside():
                return call.example(call.output), None
        with self._tracer.session.aside():
            given = objects_in(self._tracer.values((args, kwargs)))
            watch = Watch(self._changes, given)
        value = self._value(original, module, args, kwargs, given)
        with self._tracer.session.aside():
            return value, watch.lasting()

    def guards(self) -> list[Guard]:
        """Return guards that called modules of several names are still one: a graph calls them by the first."""
        found: list[Guard] = []
        for module in self._called:
            first, *others = (name.split(".") for name in self._tracer.names.all_relative(self._tracer.owner, module))
            reason = f"'{'.'.join(first)}' has other names, too"
            found += [Guard(module_at(other), Is(module_at(first)), reason) for other in others]
        return found

    def has_called(self, module: nn.Module) -> bool:
        """Tell whether a module, or one that it is inside of, was called."""
        return any(module in called.modules() for called in self._called)

    def _value(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, given: Sequence[Any]
    ) -> Any:
        calls = self._results.get(module)
        if calls:
            with self._tracer.session.aside():
                call = calls.popleft()
                call.note_computed(*map_leaves(_mark, (args, kwargs), ValueProxy))
                for mine, before, after in zip(given, objects_in((call.args, call.kwargs)), call.after, strict=False):
                    graft(mine, before, after)
                return call.example(call.output)
        values = self._tracer.values((args, kwargs))
        if values is UNKNOWN:
            return UNKNOWN
        with self._tracer.session.suspended():
            return original(module, *values[0], **values[1])


def _are_tensors(arguments: Iterable[Any]) -> bool:
    return all(type(given) is ValueProxy and type(given.fxopt_value) is Tensor for given in arguments)


def _mark(leaf: Any) -> Any:
    """Return what stands for an argument of the traced call: only whether it was computed matters."""
    if not issubclass(type(leaf), ValueProxy):
        return None
    value = leaf.fxopt_value
    return Computed(value) if type(value) in (int, torch.Size) else None


_INHERITED = frozenset(vars(nn.Module)) - {"forward"}
"""What every module has: to read it says nothing of a class."""
_REGISTRIES = ("__dict__", "_parameters", "_buffers", "_modules")


class ChildReads:
    """Note what is asked of the modules inside the traced one; `read` are own children, if not only to be called."""

    def __init__(self, tracer: Tracer, nested: NestedReads) -> None:
        self.read: set[str] = set()
        self._tracer = tracer
        self._nested = nested

    def note_read(self, module: nn.Module, name: str, value: nn.Module | None, frame: FrameType) -> None:
        """Note that a child, or None in the place of one, is read from `module` by the code in `frame`."""
        if frame.f_lasti in _method_reads(frame.f_code):
            return
        if module is self._tracer.module:
            self.read.add(name)
        elif value is not None:
            self.note_class(value)
        else:
            self._note_none(module, name)

    def _note_none(self, module: nn.Module, name: str) -> None:
        registry = next(registry for registry in _REGISTRIES if name in getattr(module, registry))
        for path in self._paths(module):
            found = Method(Attribute(module_at(path), registry), "get", (key_of(name),))
            self._nested.keep(equal(found, None, f"{'.'.join(path)}.{name} is None"))

    def note_class(self, module: nn.Module) -> None:
        """Note that the class of a module may decide something."""
        cls = user_class(type(module))
        for path in self._paths(module):
            source, reason = module_at(path), f"{'.'.join(path)} is a {cls.__name__}"
            self._nested.keep(of_class(source, cls, reason))
            self._nested.keep(equal(Attribute(type_of(source), "__module__"), cls.__module__, reason))

    def note_class_read(self, module: nn.Module, name: str, frame: FrameType) -> None:
        """Note that something is read that a module has from its class: a method, say, that is traced through."""
        if (name not in _INHERITED or name == "__class__") and is_users(frame.f_code):
            self.note_class(module)
            self._note_value(module, name)

    def _note_value(self, module: nn.Module, name: str) -> None:
        """Note the value of a plain attribute that a module has from its class."""
        value = class_attribute(user_class(type(module)), name)
        for path in self._paths(module):
            told = f"{name} of the class of {'.'.join(path)}"
            for guard in guards_on(Attribute(type_of(module_at(path)), name), value, told):
                self._nested.keep(guard)

    def note_missing(self, module: nn.Module, name: str) -> None:
        """Note that an attribute is looked for in vain."""
        if name.startswith("__"):
            return
        self.note_class(module)
        for path in self._paths(module):
            for registry in _REGISTRIES:
                source = Attribute(module_at(path), registry)
                self._nested.keep(Guard(source, Lacks(key_of(name)), f"{'.'.join(path)} has no {name}"))

    def note_called(self, module: nn.Module) -> None:
        """Note that a module is called, by code that may have asked for its type."""
        caller = next((frame for frame in frames_of_trace() if not _is_method_of(module, frame)), None)
        if caller is not None and _mentions_type(caller.f_code):
            self.note_class(module)

    def settle(self, forward: Callable[..., Any]) -> None:
        """Note the classes of what is in the containers that were read, where the forward's code asks for types."""
        code = getattr(inspect.unwrap(forward), "__code__", None)
        if code is not None and _mentions_type(code):
            for name in self.read:
                for module in _items(own_children(self._tracer.module).get(name)):
                    self.note_class(module)

    def _paths(self, module: nn.Module) -> list[list[str]]:
        """Return the names that lead from the traced module to one inside it."""
        with self._tracer.session.aside():
            return [path.split(".") for path in self._tracer.names.all_relative(self._tracer.owner, module) if path]


def _items(module: nn.Module | None) -> Iterator[nn.Module]:
    if isinstance(module, (*CONTAINERS, nn.Sequential)):
        for item in own_children(module).values():
            if item is not None:
                yield item
                yield from _items(item)


def _is_method_of(module: nn.Module, frame: FrameType) -> bool:
    """Say whether a frame runs a method of the module itself, such as a `__call__` of its own."""
    names = frame.f_code.co_varnames[:1]
    return frame.f_code.co_name == "__call__" and bool(names) and frame.f_locals.get(names[0]) is module


@lru_cache(maxsize=4096)
def _method_reads(code: CodeType) -> frozenset[int]:
    """Return where code reads what it calls at once (`self.child(x)`), so that nothing else becomes of it."""
    return frozenset(
        instruction.offset
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_METHOD"
        or (instruction.opname == "LOAD_ATTR" and "LOAD_METHOD" not in dis.opmap and (instruction.arg or 0) & 1)
    )


@lru_cache(maxsize=4096)
def _mentions_type(code: CodeType) -> bool:
    """Say whether code, or a function made in it, uses the builtin `type`."""
    if "type" in code.co_names and any(
        instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "type"
        for instruction in dis.get_instructions(code)
    ):
        return True
    return any(_mentions_type(inner) for inner in code.co_consts if isinstance(inner, CodeType))
