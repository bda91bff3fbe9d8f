"""Who is traced now, what is patched meanwhile, and how to step aside from it."""

from __future__ import annotations

import builtins
import functools
import inspect
import random
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...compat import torch_functions_off
from ...runtime.values import Absent, is_whole
from ..isolation import redirect
from ..reads import Observers
from .memos import call_memo, is_memoised
from .protocol import Tracer
from .proxy import ValueProxy, class_proxy

__all__ = ["Session"]

TracerT = TypeVar("TracerT", bound=Tracer)

_isinstance = builtins.isinstance


class _Suspension:
    """Interrupt a trace."""

    __slots__ = ("_functions", "_session", "_tracer")

    def __init__(self, session: Session[Any], functions: AbstractContextManager[None] | None) -> None:
        self._session = session
        self._functions = functions

    def __enter__(self) -> None:
        self._tracer, self._session.tracer = self._session.tracer, None
        builtins.isinstance = _isinstance
        if self._functions is not None:
            self._functions.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._functions is not None:
            self._functions.__exit__(None, None, None)
        self._session.tracer = self._tracer
        if self._tracer is not None:
            builtins.isinstance = self._session.is_instance


class _Patch(NamedTuple):
    """An attribute of a class or module of torch's, and what it is to be for a while."""

    owner: Any
    name: str
    before: Any
    value: Any

    def is_current(self) -> bool:
        return self.owner.__dict__.get(self.name, Absent) is self.before

    def make(self) -> None:
        setattr(self.owner, self.name, self.value)

    def undo(self) -> None:
        if self.before is not Absent:
            setattr(self.owner, self.name, self.before)
        elif self.name in self.owner.__dict__:
            delattr(self.owner, self.name)


class Session(Generic[TracerT]):
    """Know which tracer, if any, the code that runs now belongs to. What is patched is worked out once; a session that
    is closed may be opened again.
    """

    def __init__(self) -> None:
        self._wrappers: dict[int, Any] = {}
        self.observers = Observers(self._wrappers)
        self.autocasts: dict[int, tuple[object, Mapping[str, Any]]] = {}
        self._tracer: TracerT | None = None
        self._thread = threading.get_ident()
        self._patched_globals: set[int] = set()
        self._uses_numpy: dict[int, bool] = {}
        self._patches: list[_Patch] = []
        self._made_proxies: dict[int, Any] = {}
        self._undo = ExitStack()
        self._loaded = len(sys.modules)

    def open(self) -> None:
        """Begin to intercept."""
        self._thread = threading.get_ident()
        for patch in self._patches:
            patch.make()

    def close(self) -> None:
        """Put everything back."""
        self._undo.close()
        for patch in reversed(self._patches):
            patch.undo()
        self.observers = Observers(self._wrappers)  # an idle session keeps no class of the user's alive
        self.autocasts.clear()
        self._patched_globals.clear()
        self._uses_numpy.clear()
        self._made_proxies.clear()

    def is_current(self) -> bool:
        """Tell whether what was there when the patches were worked out is still there, and nothing else."""
        return len(sys.modules) == self._loaded and all(patch.is_current() for patch in self._patches)

    @property
    def tracer(self) -> TracerT | None:
        """Return the tracer; code of other threads belongs to none."""
        return self._tracer if threading.get_ident() == self._thread else None

    @tracer.setter
    def tracer(self, tracer: TracerT | None) -> None:
        self._tracer = tracer

    @contextmanager
    def tracing(self, tracer: TracerT) -> Generator[None]:
        """Send what happens inside to `tracer`."""
        with _Mode(self):
            self.tracer = tracer
            builtins.isinstance = self.is_instance
            try:
                yield
            finally:
                builtins.isinstance = _isinstance
                self.tracer = None

    def is_instance(self, value: Any, kinds: Any) -> bool:
        """Answer `isinstance`: for proxies from what they stand for, for modules as something that may decide. The
        `__class__` of proxies must not say so: torch's C++ asks it too, and would take one for a tensor's memory.
        """
        if type(value) is ValueProxy:
            return value.tracer.is_instance(value, kinds)
        if kinds is not nn.Module and _isinstance(value, nn.Module) and self.tracer is not None:
            self.tracer.note_class(value)
        return _isinstance(value, kinds)

    def suspended(self) -> _Suspension:
        """Let what happens inside happen for real: the operations themselves, children whose results are not known."""
        return _Suspension(self, None)

    def aside(self) -> _Suspension:
        """Let the tracer look at values without seeing itself do so."""
        return _Suspension(self, torch_functions_off())

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Let an attribute be `value` whenever the session is open."""
        self._patches.append(_Patch(owner, name, vars(owner).get(name, Absent), value))

    def patch_now(self, owner: Any, name: str, value: Any) -> None:
        """Let an attribute be `value` until the session, which is open, is closed."""
        patch = _Patch(owner, name, vars(owner).get(name, Absent), value)
        self._undo.callback(patch.undo)
        patch.make()

    def redirect(self, function: Any, handler: Callable[..., Any]) -> None:
        """Let calls of a method of modules run `handler(original, ...)` until the session is closed."""
        self._undo.callback(redirect(function, handler))

    def wrap(self, owner: Any, name: str, handler: Callable[..., Any]) -> None:
        """Send calls of `owner.name` made by traced code to `handler(tracer, original, args, kwargs)`."""
        original = getattr(owner, name, None)
        if original is not None:
            self.patch(owner, name, self.wrapper(original, handler))

    def wrapper(self, original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a function while forwards are traced, the same each time; see `wrap`."""
        if id(original) not in self._wrappers:
            self._wrappers[id(original)] = self._wrapping(original, handler)
        return self._wrappers[id(original)]

    def _wrapping(self, original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.tracer is None:
                return original(*args, **kwargs)
            return handler(self.tracer, original, args, kwargs)

        return wrapper

    def is_new(self, owner: object) -> bool:
        """Tell, the first time that it is asked for a namespace or class, that nothing in it was replaced yet."""
        known = id(owner) in self._patched_globals
        self._patched_globals.add(id(owner))
        return not known

    def function_proxy(self, original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a function of the user's until the session is closed; see `wrap`."""
        if id(original) not in self._made_proxies:
            self._made_proxies[id(original)] = self._wrapping(original, handler)
        return self._made_proxies[id(original)]

    def wrap_globals(self, function: Callable[..., Any]) -> None:
        """Reach what a forward's module imported by name (`from math import sqrt`)."""
        namespace = getattr(function, "__globals__", None)
        if namespace is None or not self.is_new(namespace):
            return
        if "len" not in namespace:
            namespace["len"] = self.wrapper(len, _length)
            self._undo.callback(namespace.pop, "len", None)
        for name, value in list(namespace.items()):
            wrapper = self._wrappers.get(id(value)) or self._made_proxies.get(id(value))
            if wrapper is None and isinstance(value, type) and is_whole(value):
                wrapper = self._made_proxies[id(value)] = class_proxy(value, self._make)
            if wrapper is None and is_memoised(value):
                wrapper = self.function_proxy(value, call_memo)
            if wrapper is not None:
                namespace[name] = wrapper
                self._undo.callback(namespace.__setitem__, name, value)

    def wrap_memos(self, cls: type) -> None:
        """Send calls of the memoised functions in a class and its bases, made by traced code, to its tracer."""
        for owner in cls.__mro__:
            if owner.__module__.partition(".")[0] in ("torch", "builtins") or not self.is_new(owner):
                continue
            for name, value in list(vars(owner).items()):
                function: Any = value.__func__ if isinstance(value, staticmethod) else value
                if is_memoised(function):
                    made = self.function_proxy(function, call_memo)
                    self.patch_now(owner, name, staticmethod(made) if isinstance(value, staticmethod) else made)

    def _make(self, cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make an object that traced code asks for: a node, if it is to be handed on whole."""
        return (
            cls(*args, **kwargs)
            if self.tracer is None
            else self.tracer.create_proxy("call_function", cls, args, kwargs)
        )

    def host_draws(self, function: Callable[..., Any]) -> Any:
        """Return the state of the generators outside torch that `function` may draw from: Python's, perhaps numpy's."""
        numpy = sys.modules.get("numpy")
        namespace = getattr(inspect.unwrap(function), "__globals__", {})
        known = self._uses_numpy.get(id(namespace))
        if known is None:
            known = self._uses_numpy[id(namespace)] = numpy is not None and any(v is numpy for v in namespace.values())
        return random.getstate(), numpy.random.get_state()[2:] if known and numpy is not None else None


def _length(tracer: Tracer, original: Any, args: Any, kwargs: Any) -> Any:
    """Answer `len(x)` as `x.shape[0]` is answered: with a value, which decides nothing as long as nobody asks."""
    if len(args) == 1 and type(args[0]) is ValueProxy and isinstance(args[0].fxopt_value, Tensor):
        return tracer.create_proxy("call_function", len, args, {})
    return original(*args, **kwargs)


class _Mode(TorchFunctionMode):
    """Send every torch function that traced code calls to the tracer, also those on plain tensors."""

    def __init__(self, session: Session[Any]) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracer = self._session.tracer
        if tracer is None:
            return func(*args, **(kwargs or {}))
        return tracer.torch_function(func, args, kwargs or {})
