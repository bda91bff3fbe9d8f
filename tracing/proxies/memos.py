"""Memoised functions (`functools.lru_cache`): a call is a node, and the memo is asked at every call anew.

Memos know tensors by identity, and those that a forward computes are new ones in each call. So where what is called
goes to a memo or, while it is compiled, to the function itself, and is given tensors, the function is traced.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any, cast

from torch import Tensor, nn

from ...runtime.values import copied, flatten, map_leaves
from .protocol import Tracer
from .proxy import UNKNOWN

__all__ = ["asks_memo", "call_memo", "is_memoised"]

_MEMO = type(functools.lru_cache(lambda: None))


def is_memoised(value: object) -> bool:
    """Tell whether a value is a memoised function, or a function that a decorator made around one."""
    if type(value) is not FunctionType:
        return type(value) is _MEMO
    inner = value.__dict__.get("__wrapped__")
    return inner is not None and any(type(v) is _MEMO and v.__wrapped__ is inner for v in _closed_over(value))


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def call_memo(tracer: Tracer, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a call of a memoised function, which asks the memo whenever the graph runs."""
    if not _has_name(function):
        tracer.fail(
            f"it calls the memoised function {function.__name__}, which is not an attribute of a module or class"
        )
    with tracer.session.aside():
        values = tracer.values((args, kwargs))
        is_traced = _does_without_memo(function) and _is_given_tensors(values)
        if not is_traced:
            map_leaves(functools.partial(_check, tracer, function), values)
    if is_traced:
        return cast("Any", function).__wrapped__(*args, **kwargs)
    if values is UNKNOWN:
        return tracer.add("call_function", function, args, kwargs, UNKNOWN)
    with tracer.session.suspended():
        held = copied(function(*values[0], **values[1]))
    with tracer.session.aside():
        tracer.changes.protect(held)
    return tracer.add("call_function", function, args, kwargs, held, optional=True)


_ASKING = frozenset("torch compiler _dynamo is_compiling is_dynamo_compiling is_torchdynamo_compiling".split())
"""What a function reads by name that only asks whether it is compiled."""


def _does_without_memo(function: Callable[..., Any]) -> bool:
    """Tell whether a function around a memo calls what the memo is of where it is compiled, and decides by that alone;
    so what that reads is known and guarded.
    """
    if type(function) is not FunctionType or function.__dict__["__wrapped__"] not in [*_closed_over(function)]:
        return False
    names = {*function.__code__.co_names}
    return bool(names) and names <= _ASKING


def _is_given_tensors(values: Any) -> bool:
    """Tell whether tensors are among arguments, and no module: for one, memos remember what its parameters gave."""
    if values is UNKNOWN:
        return False
    given = list(flatten(values).values())
    return any(isinstance(each, Tensor) for each in given) and not any(isinstance(each, nn.Module) for each in given)


def _check(tracer: Tracer, function: Callable[..., Any], value: object) -> None:
    """Refuse what a memo knows by identity: to ask it for an example would leave that in the user's memo."""
    if isinstance(value, (Tensor, nn.Module)):
        tracer.fail(f"it calls the memoised function {function.__name__} with a {type(value).__name__}")


def _has_name(function: Callable[..., Any]) -> bool:
    """Tell whether a function can be found by its module and name, as pickles need it."""
    module = sys.modules.get(function.__module__)
    try:
        return operator.attrgetter(function.__qualname__)(module) is not None
    except AttributeError:
        return False


def asks_memo(frame: FrameType) -> bool:
    """Tell whether the code in a frame calls a memoised function itself, which would keep what it is given."""
    local, names = list(frame.f_locals.values()), frame.f_code.co_names
    seen: list[Any] = [*local, *(frame.f_globals.get(name) for name in names)]
    seen += [inspect.getattr_static(cast("Any", type(value)), name, None) for value in local for name in names]
    return any(type(value) is _MEMO for value in seen)
