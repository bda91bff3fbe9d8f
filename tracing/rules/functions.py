"""How contexts are recorded that a forward opens, and functions that are one node each."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from torch import Tensor

from ...compat import autocast_settings
from ...compat.checkpoint import checkpoint_generator, is_reentrant_checkpoint
from ...compat.interception import function_entries
from ...runtime.graphs import Context
from ...runtime.values import ChangeCounts, FunctionCall, LeafCall, tensors_in
from ..proxies import UNKNOWN, ValueProxy, proxies_in
from ..reads import LEAF_LIBRARY, leaf_function_places, user_frame
from ..trace import ModuleTracer, TracingSession

__all__ = ["patch_checks", "patch_contexts", "patch_functions", "patch_leaf_functions", "record_if_traced"]


def patch_functions(session: TracingSession) -> None:
    """Send calls of custom autograd functions made by traced code to its tracer."""
    (single, apply), (dead, unwrap) = function_entries()
    original = getattr(dead, unwrap)

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        if session.tracer is None:
            return cast("Any", super(single, function)).apply(*args, **kwargs)
        if is_reentrant_checkpoint(function):
            session.tracer.fail("it uses checkpoint with use_reentrant=True")
        return _call(session.tracer, FunctionCall(function), args, {})

    def unwrapped(args: Any) -> Any:
        return original(args) if session.tracer is None else args

    session.patch(single, apply, classmethod(called))
    session.patch(dead, unwrap, unwrapped)
    session.wrap(LeafCall, "__call__", _call_leaf)


def _call_leaf(tracer: ModuleTracer, _: Any, args: Any, kwargs: Any) -> Any:
    """Record the call of a function that was declared a leaf."""
    return _call(tracer, args[0], args[1:], kwargs)


def _call(
    tracer: ModuleTracer, function: FunctionCall | LeafCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a call; whether it writes into its arguments is seen on the example values."""
    with tracer.session.aside():
        values = tracer.values((args, kwargs))
        counts = ChangeCounts(tensors_in(values))
    result = tracer.create_proxy("call_function", function, args, kwargs)
    node = tracer.graph.find_nodes(op="call_function", target=function)[-1]
    with tracer.session.aside():
        changed = counts.changed()
    node.meta["writes"] = bool(changed) or values is UNKNOWN
    return result


def patch_leaf_functions(session: TracingSession) -> None:
    """Send calls that traced code makes of leaf functions to its tracer, also those from inside their library."""
    for module, name, function in leaf_function_places():
        session.patch(module, name, session.wrapper(function, record_if_traced))
    aggregations = sys.modules.get(f"{LEAF_LIBRARY}.nn.aggr.base")
    if aggregations is not None:
        session.wrap(aggregations.Aggregation, "__call__", _call_aggregation)


def _call_aggregation(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    """Record the call of a leaf that works on its arguments before `nn.Module.__call__` sees them."""
    return tracer.children.call(original, args[0], args[1:], kwargs)


def record_if_traced(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    """Record a call that is given a value of the trace."""
    if next(proxies_in((args, kwargs)), None) is None:
        return original(*args, **kwargs)
    return tracer.create_proxy("call_function", original, args, kwargs)


def patch_checks(session: TracingSession) -> None:
    """Send the checks that traced code makes to its tracer."""
    session.wrap(torch, "_check", _record_check)
    library = sys.modules.get("transformers.utils.import_utils")
    if library is not None:
        session.wrap(library, "torch_compilable_check", _record_check)


def _record_check(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    """Decide by the condition, and by nothing else."""
    condition = kwargs["cond"] if "cond" in kwargs else args[0]
    if type(condition) is not ValueProxy and callable(condition):
        condition = condition()
    if type(condition) is ValueProxy:
        holds = condition.all() if isinstance(condition.fxopt_value, Tensor) else condition
        if not holds:
            tracer.fail("one of its own checks fails")
    elif not (condition.all() if isinstance(condition, Tensor) else condition):
        return original(*args, **kwargs)
    tracer.decisions.messages.close(user_frame())
    return None


def patch_contexts(session: TracingSession) -> None:
    """Send what traced code does with contexts to its tracer."""
    for kind in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        _patch_mode(session, kind)
    _patch_set_grad_enabled(session)
    _patch_autocast(session)
    _patch_checkpoint(session)


def _replace(session: TracingSession, owner: Any, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """Let traced code run `handler(tracer, self, ...)` in the place of a method; return the method."""
    original = cast("Callable[..., Any]", getattr(owner, name))

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session.tracer is None:
            return original(self, *args, **kwargs)
        return handler(session.tracer, self, *args, **kwargs)

    session.patch(owner, name, replaced)
    return original


def _patch_mode(session: TracingSession, owner: type) -> None:
    """Follow a context that switches gradients; while tracing they are off, whatever it says."""

    def enter(tracer: ModuleTracer, self: Any) -> None:
        settings = {"mode": self.mode} if owner is torch.inference_mode else {}
        tracer.contexts.enter(self, Context(owner.__name__, settings))

    _replace(session, owner, "__enter__", enter)
    _replace(session, owner, "__exit__", _leave)


def _leave(tracer: ModuleTracer, self: Any, error: Any = None, *_: Any) -> None:
    tracer.contexts.leave(self, error)


def _patch_set_grad_enabled(session: TracingSession) -> None:
    """Follow `set_grad_enabled`, which switches when it is made, with or without a `with` around it."""

    def make(tracer: ModuleTracer, self: Any, mode: Any) -> None:
        self.prev, self.mode = True, bool(tracer.contexts.plain(mode))
        tracer.contexts.enter(self, Context("set_grad_enabled", {"mode": self.mode}))

    def decorate(tracer: ModuleTracer, *_: Any) -> None:
        tracer.fail("it decorates a function with set_grad_enabled")

    def enter(*_: Any) -> None:
        """Do nothing: it was entered when it was made."""

    for name, handler in (("__init__", make), ("__call__", decorate), ("__enter__", enter), ("__exit__", _leave)):
        _replace(session, torch.set_grad_enabled, name, handler)


def _patch_autocast(session: TracingSession) -> None:
    """Follow autocast, and switch it: the example values are to have its types."""
    signature = inspect.signature(torch.autocast.__init__)
    given = session.autocasts

    def make(tracer: ModuleTracer, self: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(signature.bind(self, *args, **kwargs).arguments)
        settings = {name: tracer.contexts.plain(value) for name, value in named.items() if name != "self"}
        with tracer.session.suspended():
            really_make(self, **settings)
        given[id(self)] = self, settings

    def enter(tracer: ModuleTracer, self: Any) -> Any:
        settings = given[id(self)][1] if id(self) in given else autocast_settings(self)
        tracer.contexts.enter(self, Context("autocast", settings), lambda: really_leave(self, None, None, None))
        with tracer.session.suspended():
            return really_enter(self)

    def leave(tracer: ModuleTracer, self: Any, error: Any = None, *rest: Any) -> None:
        with tracer.session.suspended():
            really_leave(self, error, *rest)
        tracer.contexts.leave(self, error)

    really_make = _replace(session, torch.autocast, "__init__", make)
    really_enter = _replace(session, torch.autocast, "__enter__", enter)
    really_leave = _replace(session, torch.autocast, "__exit__", leave)


def _patch_checkpoint(session: TracingSession) -> None:
    """Follow checkpointing that does not reenter: what runs meanwhile is to be run, and computed again, as one."""
    owner, name = checkpoint_generator()
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def follow(*args: Any, **kwargs: Any) -> Generator[None]:
        tracer = session.tracer
        if tracer is None:
            yield from original(*args, **kwargs)
            return
        key, settings = object(), _settings(signature, args, kwargs, tracer)
        tracer.contexts.enter(key, Context("checkpoint", settings))
        try:
            yield
        except BaseException as error:
            tracer.contexts.leave(key, error)
            raise
        tracer.contexts.leave(key)

    session.patch(owner, name, follow)


def _settings(signature: inspect.Signature, args: Any, kwargs: Any, tracer: ModuleTracer) -> dict[str, Any]:
    """Return the settings of a checkpoint that are not torch's defaults."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    settings = {name: tracer.contexts.plain(given[name]) for name in _CHECKPOINT if name in given}
    settings = {name: value for name, value in settings.items() if value != signature.parameters[name].default}
    if "<locals>" in getattr(settings.get("context_fn"), "__qualname__", ""):
        tracer.fail("it makes the context_fn of a checkpoint itself")
    return settings


_CHECKPOINT = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
