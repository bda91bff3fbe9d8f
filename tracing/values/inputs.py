"""Example inputs, in every form that users give them, as one tuple of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ...errors import UsageError

__all__ = ["Inputs", "normalize_inputs"]


class Inputs:
    """Hold the positional and keyword arguments of one call of a model."""

    __slots__ = ("args", "kwargs")

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __iter__(self) -> Iterator[Any]:
        yield self.args
        yield self.kwargs

    def __repr__(self) -> str:
        parts = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"Inputs({', '.join(parts)})"


def normalize_inputs(example_inputs: object) -> tuple[Inputs, ...]:
    """Return the calls meant by `example_inputs`.

    A tuple is positional, a mapping is keywords, `Inputs` is both, a list is several calls, None is none.

    Raises:
        UsageError: for anything else (a bare tensor, say), naming the form to use.
    """
    if example_inputs is None:
        return ()
    if isinstance(example_inputs, list):
        calls = cast("Sequence[object]", example_inputs)
        if not calls:
            raise UsageError("example_inputs is an empty list; give at least one call, or None")
        return tuple(_one_call(call) for call in calls)
    return (_one_call(example_inputs),)


def _one_call(call: object) -> Inputs:
    if isinstance(call, Inputs):
        return call
    if isinstance(call, tuple):
        return Inputs(*cast("tuple[Any, ...]", call))
    if isinstance(call, Mapping):
        mapping = cast("Mapping[str, Any]", call)
        if not all(isinstance(key, str) for key in mapping):
            raise UsageError("example_inputs as a dict is keyword arguments; every key must be a string")
        return Inputs(**mapping)
    raise UsageError(
        f"example_inputs is a {type(call).__name__}; give a tuple (positional), a dict (keywords), "
        "fxopt.Inputs(*args, **kwargs), or a list of these: for one tensor x write (x,)"
    )
