"""The arguments of a call in one spelling: by name, those that were left out filled in."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from ..compat import is_registered_operator, overloads_of
from .info import registered_operator
from .registry import NAMESPACES

__all__ = ["CallArguments", "normalized_arguments"]


@dataclass(frozen=True)
class CallArguments:
    """What a call passes: `positional` values in the order of the parameters, and by name with defaults filled in."""

    positional: Sequence[Any]
    named: Mapping[str, Any]
    given: int  # how many of them the call itself passes


def normalized_arguments(operator: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallArguments:
    """Return the arguments of a call of an operator by name; the first operand is `input`.
    A call that fits no known signature, such as `x.view(2, 3)`, keeps its arguments as they are.
    """
    for signature in (*_signatures_of(target), *_signatures(operator)):
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            continue
        bound.apply_defaults()
        named = dict(bound.arguments)
        return CallArguments(tuple(named.values()), named, len(args) + len(kwargs))
    return CallArguments(args, kwargs, len(args) + len(kwargs))


def _signatures_of(target: Any) -> tuple[inspect.Signature, ...]:
    """Return the signatures of what is called, where it is a function of Python or an operator of `torch.ops`."""
    if not isinstance(target, FunctionType) and not is_registered_operator(target):
        return ()
    return _known_signatures(target)


@cache
def _signatures(operator: str) -> tuple[inspect.Signature, ...]:
    """Return the signatures of an operator: of torch's own one, then of the functions that have its name."""
    found = registered_operator(operator if "::" in operator else f"aten::{operator}")
    functions = [getattr(namespace, operator, None) for namespace in NAMESPACES]
    candidates = [found, *(function for function in functions if isinstance(function, FunctionType))]
    return tuple(signature for each in candidates if each is not None for signature in _known_signatures(each))


@cache
def _known_signatures(function: Any) -> tuple[inspect.Signature, ...]:
    if is_registered_operator(function):
        return tuple(_signatures_in_schemas(function))
    try:
        return (inspect.signature(function),)
    except (TypeError, ValueError):
        return ()


def _signatures_in_schemas(operator: Any) -> Iterator[inspect.Signature]:
    for _, schema in overloads_of(operator):
        try:
            yield inspect.Signature([_parameter(argument) for argument in schema.arguments])
        except ValueError:  # a name that Python does not allow
            continue


def _parameter(argument: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter("input" if argument.name == "self" else argument.name, kind, default=default)
