"""What is intercepted while forwards are traced: worked out once, switched on for each session."""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ...compat.interception import untraceable_entries
from ..isolation import patching
from ..recording import calls_intercepted
from ..trace import ModuleTracer, TracingSession
from .functions import patch_checks, patch_contexts, patch_functions, patch_leaf_functions, record_if_traced

__all__ = ["tracing_session"]

_FACTORIES = (
    "arange as_tensor bartlett_window blackman_window complex empty empty_strided eye from_numpy full hamming_window "
    "hann_window kaiser_window linspace logspace normal ones polar rand randint randn randperm range scalar_tensor "
    "tensor tril_indices triu_indices zeros finfo iinfo"
).split()
_QUESTIONS = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled")
_idle: list[TracingSession] = []
"""At most one session, which nobody uses now."""


@contextmanager
def tracing_session(modules: Iterable[nn.Module]) -> Generator[TracingSession]:
    """Intercept, while inside, what forwards of `modules` and of those inside them do while they are traced."""
    with patching:
        session = _idle.pop() if _idle else None
        if session is None or not session.is_current():
            session = _prepared()
        try:
            session.open()
            _redirect_modules(session)
            _patch_plain_reads(session, set(map(type, modules)))
            with calls_intercepted(_call_handler(session)), torch.no_grad():
                yield session
        finally:
            session.close()
            _idle[:] = [session]


def _prepared() -> TracingSession:
    """Return a session that knows what it will patch."""
    session = TracingSession()
    for name in _FACTORIES:
        session.wrap(torch, name, ModuleTracer.torch_function)
    for name in _QUESTIONS:
        session.wrap(torch, name, _ask)
    for name, function in vars(math).items():
        if isinstance(function, types.BuiltinFunctionType):
            session.wrap(math, name, record_if_traced)
    _patch_training(session)
    _patch_refused(session)
    patch_contexts(session)
    patch_functions(session)
    patch_leaf_functions(session)
    patch_checks(session)
    return session


def _ask(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    return tracer.attributes.ask(original, args, kwargs)


def _patch_refused(session: TracingSession) -> None:
    """Give up on what fx would drop or break open silently."""
    refusals = [
        (torch, "manual_seed", "it sets the random seed"),
        (torch, "set_rng_state", "it sets the random state"),
        (torch.autograd, "grad", "it computes gradients"),
        *untraceable_entries(),
    ]
    for owner, name, reason in refusals:
        _refuse(session, owner, name, reason)


def _refuse(session: TracingSession, owner: Any, name: str, reason: str) -> None:
    original = cast("Callable[..., Any]", vars(owner)[name])

    @functools.wraps(original)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if session.tracer is not None:
            session.tracer.fail(reason)
        return original(*args, **kwargs)

    session.patch(owner, name, refused)


def _call_handler(session: TracingSession) -> Callable[..., Any]:
    def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        tracer = session.tracer
        if tracer is None:
            return original(module, *args, **kwargs)
        return tracer.children.call(original, module, args, kwargs)

    return call


def _redirect_modules(session: TracingSession) -> None:
    """Send reads of tensors and of children, those in vain, and assignments to the tracer."""

    def read_attribute(read: Callable[..., Any], module: nn.Module, name: str) -> Any:
        tracer = session.tracer
        if tracer is None:
            return read(module, name)
        try:
            value = read(module, name)
        except AttributeError:
            tracer.attributes.questions.note_missing(module, name)
            raise
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  past the redirection
        return tracer.attributes.read(module, name, value, frame)

    def write_attribute(write: Callable[..., Any], module: nn.Module, name: str, value: Any) -> None:
        if session.tracer is None or session.tracer.attributes.accepts(module, name, value):
            write(module, name, value)

    def delete_attribute(delete: Callable[..., Any], module: nn.Module, name: str) -> None:
        if session.tracer is not None:
            session.tracer.fail(f"deletes self.{name}")
        delete(module, name)

    session.redirect(nn.Module.__getattr__, read_attribute)
    session.redirect(nn.Module.__setattr__, write_attribute)
    session.redirect(nn.Module.__delattr__, delete_attribute)


def _patch_training(session: TracingSession) -> None:
    """Send reads of the training flag to the tracer."""

    def training(module: nn.Module) -> Any:
        value = module.__dict__["training"]
        return value if session.tracer is None else session.tracer.attributes.read_training(module, value)

    def set_training(module: nn.Module, value: Any) -> None:
        if session.tracer is not None:
            session.tracer.attributes.made(module)
        module.__dict__["training"] = value

    session.patch(nn.Module, "training", property(training, set_training))


def _patch_plain_reads(session: TracingSession, classes: Iterable[type[nn.Module]]) -> None:
    """Show the tracer which plain attributes of modules inside the traced one are read."""
    readers: set[Any] = set()
    for cls in sorted(classes, key=lambda cls: len(cls.__mro__)):  # a class comes before those that inherit from it
        read: Any = cls.__getattribute__
        if read not in readers:
            reader = _reader(session, read)
            readers.add(reader)
            session.patch_now(cls, "__getattribute__", reader)


def _reader(session: TracingSession, read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return what reads an attribute by `read`, and tells the tracer."""

    def read_any(module: nn.Module, name: str) -> Any:
        value = read(module, name)
        tracer = session.tracer
        if tracer is not None and module is not tracer.module:
            if name in read(module, "__dict__"):
                tracer.attributes.note_plain(module, name, value)
            else:
                frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
                tracer.attributes.questions.note_class_read(module, name, frame)
        return value

    return read_any
