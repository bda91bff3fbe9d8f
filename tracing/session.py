"""What must be intercepted while forwards are traced, and put back afterwards."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import random
import sys
import threading
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..compat import torch_functions_off, untraceable_entries
from .checked import patch_checks
from .exclusive import alone
from .functions import patch_functions
from .objects import is_whole
from .observe import Observers
from .proxy import ValueProxy, proxies_in
from .record import calls_intercepted
from .stand_ins import stand_in
from .switches import patch_contexts
from .whole_functions import patch_whole_functions

if TYPE_CHECKING:
    from .tracer import ModuleTracer

__all__ = ["Session", "Untraceable", "tracing_session"]

_FACTORIES = (
    "arange as_tensor bartlett_window blackman_window complex empty empty_strided eye from_numpy full hamming_window "
    "hann_window kaiser_window linspace logspace normal ones polar rand randint randn randperm range scalar_tensor "
    "tensor tril_indices triu_indices zeros finfo iinfo"
).split()
_QUESTIONS = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled")
_MISSING = object()
_isinstance = builtins.isinstance


class Untraceable(Exception):
    """A forward does something that a graph cannot say.

    Attributes:
        reason: one clause about the forward ("it calls itself").
        location: the user's line, as "file.py:12"; empty if unknown.
    """

    def __init__(self, reason: str, location: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.location = location


class _Suspension:
    """Interrupt a trace."""

    __slots__ = ("_functions", "_session", "_tracer")

    def __init__(self, session: Session, functions: AbstractContextManager[None] | None) -> None:
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


class Session:
    """Know which tracer, if any, the code that runs now belongs to."""

    def __init__(self) -> None:
        self._tracer: ModuleTracer | None = None
        self._thread = threading.get_ident()
        self._patched_globals: set[int] = set()
        self._wrappers: dict[int, Any] = {}
        self.observers = Observers(self._wrappers)
        self._uses_numpy: dict[int, bool] = {}
        self._undo = ExitStack()
        self._undo.enter_context(alone())

    @property
    def tracer(self) -> ModuleTracer | None:
        """Return the tracer; code of other threads belongs to none."""
        return self._tracer if threading.get_ident() == self._thread else None

    @tracer.setter
    def tracer(self, tracer: ModuleTracer | None) -> None:
        self._tracer = tracer

    @contextmanager
    def tracing(self, tracer: ModuleTracer) -> Generator[None]:
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
        """Answer `isinstance`: for proxies from what they stand for, for modules as something that may decide.

        The `__class__` of proxies must not say so: torch's C++ asks it too, and would take one for a tensor's memory.
        """
        if type(value) is ValueProxy:
            return value.tracer.is_instance(value, kinds)
        if kinds is not nn.Module and _isinstance(value, nn.Module) and self.tracer is not None:
            self.tracer.attributes.questions.note_class(value)
        return _isinstance(value, kinds)

    def suspended(self) -> _Suspension:
        """Let what happens inside happen for real: the operations themselves, children whose results are not known."""
        return _Suspension(self, None)

    def aside(self) -> _Suspension:
        """Let the tracer look at values without seeing itself do so."""
        return _Suspension(self, torch_functions_off())

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the session ends."""
        before = cast("Any", vars(owner).get(name, _MISSING))
        setattr(owner, name, value)
        self._undo.callback(_unset, owner, name, before)

    def wrap(self, owner: Any, name: str, handler: Callable[..., Any]) -> None:
        """Send calls of `owner.name` made by traced code to `handler(tracer, original, args, kwargs)`."""
        original = getattr(owner, name, None)
        if original is not None:
            self.patch(owner, name, self.wrapper(original, handler))

    def wrapper(self, original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a function while forwards are traced, the same each time; see `wrap`."""
        if id(original) in self._wrappers:
            return self._wrappers[id(original)]

        @functools.wraps(original, updated=())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.tracer is None:
                return original(*args, **kwargs)
            return handler(self.tracer, original, args, kwargs)

        self._wrappers[id(original)] = wrapper
        return wrapper

    def wrap_globals(self, function: Callable[..., Any]) -> None:
        """Reach what a forward's module imported by name (`from math import sqrt`)."""
        namespace = getattr(function, "__globals__", None)
        if namespace is None or id(namespace) in self._patched_globals:
            return
        self._patched_globals.add(id(namespace))
        if "len" not in namespace:
            namespace["len"] = self.wrapper(len, _length)
            self._undo.callback(namespace.pop, "len", None)
        for name, value in list(namespace.items()):
            wrapper = self._wrappers.get(id(value))
            if wrapper is None and isinstance(value, type) and is_whole(value):
                wrapper = self._wrappers[id(value)] = stand_in(value, self._make)
            if wrapper is not None:
                namespace[name] = wrapper
                self._undo.callback(namespace.__setitem__, name, value)

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

    def close(self) -> None:
        """Put everything back."""
        self._undo.close()


def _unset(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


@contextmanager
def tracing_session() -> Generator[Session]:
    """Intercept, while inside, what traced forwards do; code that is not traced runs as always."""
    session = Session()
    try:
        _patch_modules(session)
        _patch_reads(session)
        _patch_plain_reads(session)
        for name in _FACTORIES:
            session.wrap(torch, name, _record)
        for name in _QUESTIONS:
            session.wrap(torch, name, _ask)
        for name, function in vars(math).items():
            if isinstance(function, types.BuiltinFunctionType):
                session.wrap(math, name, _record_if_traced)
        _patch_refused(session)
        patch_contexts(session)
        patch_functions(session)
        patch_whole_functions(session)
        patch_checks(session)
        with calls_intercepted(_call_handler(session)), torch.no_grad():
            yield session
    finally:
        session.close()


def _record(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    return tracer.torch_function(original, args, kwargs)


def _record_if_traced(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    if next(proxies_in((args, kwargs)), None) is None:
        return original(*args, **kwargs)
    return tracer.create_proxy("call_function", original, args, kwargs)


def _length(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    """Answer `len(x)` as `x.shape[0]` is answered: with a value, which decides nothing as long as nobody asks."""
    if len(args) == 1 and type(args[0]) is ValueProxy and isinstance(args[0].fxopt_value, torch.Tensor):
        return tracer.decisions.length_of_tensor(args[0])
    return original(*args, **kwargs)


def _ask(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    return tracer.attributes.ask(original, args, kwargs)


def _patch_refused(session: Session) -> None:
    """Give up on what fx would drop or break open without a word."""
    refusals = [
        (torch, "manual_seed", "the random seed is set inside the forward"),
        (torch, "set_rng_state", "the random state is set inside the forward"),
        (torch.autograd, "grad", "gradients are computed inside the forward"),
        *untraceable_entries(),
    ]
    for owner, name, reason in refusals:
        _refuse(session, owner, name, reason)


def _refuse(session: Session, owner: Any, name: str, reason: str) -> None:
    original = cast("Callable[..., Any]", vars(owner)[name])

    @functools.wraps(original)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if session.tracer is not None:
            session.tracer.fail(reason)
        return original(*args, **kwargs)

    session.patch(owner, name, refused)


def _call_handler(session: Session) -> Callable[..., Any]:
    def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        tracer = session.tracer
        if tracer is None:
            return original(module, *args, **kwargs)
        return tracer.children.call(original, module, args, kwargs)

    return call


def _patch_modules(session: Session) -> None:
    """Send reads of `training`, and assignments, on modules to the tracer."""
    write = nn.Module.__setattr__
    delete = cast("Callable[[nn.Module, str], None]", nn.Module.__delattr__)

    def write_attribute(module: nn.Module, name: str, value: Any) -> None:
        if session.tracer is None or session.tracer.attributes.accepts(module, name, value):
            write(module, name, value)

    def delete_attribute(module: nn.Module, name: str) -> None:
        if session.tracer is not None:
            session.tracer.fail(f"deletes self.{name}")
        delete(module, name)

    def training(module: nn.Module) -> Any:
        value = module.__dict__["training"]
        return value if session.tracer is None else session.tracer.attributes.read_training(module, value)

    def set_training(module: nn.Module, value: Any) -> None:
        if session.tracer is not None:
            session.tracer.attributes.made(module)
        module.__dict__["training"] = value

    session.patch(nn.Module, "__setattr__", write_attribute)
    session.patch(nn.Module, "__delattr__", delete_attribute)
    session.patch(nn.Module, "training", property(training, set_training))


def _patch_reads(session: Session) -> None:
    """Send reads of tensors and of children, and those in vain, to the tracer."""
    read = nn.Module.__getattr__

    def read_attribute(module: nn.Module, name: str) -> Any:
        tracer = session.tracer
        if tracer is None:
            return read(module, name)
        try:
            value = read(module, name)
        except AttributeError:
            tracer.attributes.questions.note_missing(module, name)
            raise
        return tracer.attributes.read(module, name, value, sys._getframe(1))  # pyright: ignore[reportPrivateUsage]

    session.patch(nn.Module, "__getattr__", read_attribute)


def _patch_plain_reads(session: Session) -> None:
    """Show the tracer which plain attributes of modules inside the traced one are read."""
    look_up: Callable[[nn.Module, str], Any] = object.__getattribute__

    def read_any(module: nn.Module, name: str) -> Any:
        value = look_up(module, name)
        tracer = session.tracer
        if tracer is not None and module is not tracer.module:
            if name in look_up(module, "__dict__"):
                tracer.attributes.note_plain(module, name, value)
            else:
                frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
                tracer.attributes.questions.note_class_read(module, name, frame)
        return value

    session.patch(nn.Module, "__getattribute__", read_any)


class _Mode(TorchFunctionMode):
    """Send every torch function that traced code calls to the tracer, also those on plain tensors."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tracer = self._session.tracer
        if tracer is None:
            return func(*args, **(kwargs or {}))
        return tracer.torch_function(func, args, kwargs or {})
