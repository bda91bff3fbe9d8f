"""Calls of children while their parent is traced: nodes, with the recorded results for values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import all_modules
from ...runtime.guards import Guard, Is, module_at
from ...runtime.values import all_tensors, graft, is_leaf, is_library, map_leaves, objects_in, user_class
from ..isolation import Change, Changes, Watch
from ..proxies import UNKNOWN, ValueProxy
from ..recording import Call, Computed
from .child_reads import ChildReads
from .protocol import Tracer

__all__ = ["Children"]


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
            first, *others = (name.split(".") for name in self._names(module))
            reason = f"'{'.'.join(first)}' has other names, too"
            found += [Guard(module_at(other), Is(module_at(first)), reason) for other in others]
        return found

    def _names(self, module: nn.Module) -> Iterator[str]:
        return self._tracer.names.all_relative(self._tracer.owner, module)

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
