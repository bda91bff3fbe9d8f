"""Read steps from JSON: fxopt's own, those of other packages by entry point or, where that is trusted, by class."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args, get_origin, get_type_hints

from ...errors import StateError
from .quantized_steps import QuantizeByData, QuantizeSmoothed, QuantizeTrained, QuantizeWeight
from .state_steps import Concatenate, ConcatenateOfSome, Deal, Mask, Rename, Select, Stack, StackOfSome, StateStep

__all__ = ["GROUP", "step_from_json"]

GROUP = "fxopt.state_steps"
"""The entry-point group of steps from other distributions, by their kinds; fxopt's own win where kinds are equal."""

_OWN: Mapping[str, type[StateStep]] = {
    step.kind: step
    for step in (
        Rename,
        Stack,
        Concatenate,
        Select,
        Mask,
        QuantizeByData,
        QuantizeSmoothed,
        QuantizeTrained,
        QuantizeWeight,
        StackOfSome,
        ConcatenateOfSome,
        Deal,
    )
}


def step_from_json(data: object, trust: Sequence[str] | bool = ()) -> StateStep:
    """Return the step that `to_json` described; `trust` names packages whose classes may be imported, True is any.
    Raises a StateError if it is malformed, or of a kind that is not known or not trusted.
    """
    if not isinstance(data, dict):
        raise StateError(f"a step is an object with a kind, not {data!r}")
    fields = dict(cast("dict[str, Any]", data))
    kind, path = fields.pop("kind", None), fields.pop("class", None)
    step = _step_type(kind, path, trust)
    types = {field.name: get_type_hints(step)[field.name] for field in dataclasses.fields(cast("Any", step))}
    if set(fields) != set(types):
        raise StateError(f"a {kind} step has the fields {', '.join(sorted(types))}, not {', '.join(sorted(fields))}")
    return step(**{name: _field_from_json(kind, name, value, types[name]) for name, value in fields.items()})


def _step_type(kind: object, path: object, trust: Sequence[str] | bool) -> type[StateStep]:
    """Return the class of a step."""
    if isinstance(kind, str) and kind in _OWN:
        return _OWN[kind]
    entries = [entry for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == kind]
    if entries:
        return _checked(entries[0].load(), kind, entries[0].value)
    if not isinstance(path, str):
        raise StateError(f"unknown kind of step {kind!r}; known are {', '.join(_OWN)}")
    module, _, name = path.partition(":")
    if trust is not True and not any(module == each or module.startswith(f"{each}.") for each in trust or ()):
        advice = f"register it in the entry-point group '{GROUP}', or pass trust=[{module.partition('.')[0]!r}]"
        raise StateError(f"a step of kind {kind!r} would import {path!r}; {advice}")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise StateError(f"the step {path!r} cannot be imported: {error}") from error
    return _checked(found, kind, path)


def _checked(found: object, kind: object, where: str) -> type[StateStep]:
    if not (inspect.isclass(found) and issubclass(found, StateStep) and dataclasses.is_dataclass(found)):
        raise StateError(f"{where!r} is not a dataclass derived from fxopt.StateStep")
    if found.kind != kind:
        raise StateError(f"{where!r} is a step of kind {found.kind!r}, not {kind!r}")
    return found


def _field_from_json(kind: object, name: str, value: Any, wanted: Any) -> Any:
    if get_origin(wanted) is tuple:
        item = get_args(wanted)[0]
        if isinstance(value, list) and all(type(each) is item for each in cast("list[Any]", value)):
            return tuple(cast("list[Any]", value))
    elif type(value) is wanted:
        return value
    raise StateError(f"field '{name}' of a {kind} step cannot be {value!r}")
