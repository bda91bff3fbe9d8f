"""How functions are recorded that are one node each: custom autograd functions, leaf functions of
libraries, and checks that forwards make of their own data.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ...compat.checkpoint import is_reentrant_checkpoint
from ...compat.interception import function_entries
from ...runtime.values import FunctionCall, change_count, tensors_in
from ..proxies import UNKNOWN, ValueProxy, proxies_in
from ..reads import LEAF_LIBRARY, leaf_function_places, user_frame
from ..trace import ModuleTracer, TracingSession

__all__ = ["patch_checks", "patch_functions", "patch_leaf_functions"]


def patch_functions(session: TracingSession) -> None:
    """Send calls of custom autograd functions made by traced code to its tracer."""
    (single, apply), (dead, unwrap) = function_entries()
    original = getattr(dead, unwrap)

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        if session.tracer is None:
            return cast("Any", super(single, function)).apply(*args, **kwargs)
        return _call(session.tracer, function, args)

    def unwrapped(args: Any) -> Any:
        return original(args) if session.tracer is None else args

    session.patch(single, apply, classmethod(called))
    session.patch(dead, unwrap, unwrapped)


def _call(tracer: ModuleTracer, function: type[Function], args: tuple[Any, ...]) -> Any:
    """Record a call; whether it writes into its arguments is seen on the example values."""
    if is_reentrant_checkpoint(function):
        tracer.fail("it uses checkpoint with use_reentrant=True")
    with tracer.session.aside():
        values = tracer.values(args)
        counts = [(tensor, change_count(tensor)) for tensor in tensors_in(values)]
    result = tracer.create_proxy("call_function", FunctionCall(function), args, {})
    node = tracer.graph.find_nodes(op="call_function", target=FunctionCall(function))[-1]
    with tracer.session.aside():
        changed = any(change_count(tensor) != count for tensor, count in counts)
    node.meta["writes"] = changed or values is UNKNOWN
    return result


def patch_leaf_functions(session: TracingSession) -> None:
    """Send calls that traced code makes of leaf functions to its tracer, also those from inside their library."""
    for module, name, function in leaf_function_places():
        session.patch(module, name, session.wrapper(function, _record))
    aggregations = sys.modules.get(f"{LEAF_LIBRARY}.nn.aggr.base")
    if aggregations is not None:
        session.wrap(aggregations.Aggregation, "__call__", _call_aggregation)


def _call_aggregation(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
    """Record the call of a leaf that works on its arguments before `nn.Module.__call__` sees them."""
    return tracer.children.call(original, args[0], args[1:], kwargs)


def _record(tracer: ModuleTracer, original: Any, args: Any, kwargs: Any) -> Any:
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
    elif not _all(condition):
        return original(*args, **kwargs)
    tracer.messages.close(user_frame())
    return None


def _all(condition: Any) -> bool:
    return bool(condition.all() if isinstance(condition, Tensor) else condition)
