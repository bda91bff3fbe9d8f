"""Find passes by name: fxopt's own by their file or folder, others by entry point, each imported when asked for."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any, cast

from ...errors import UsageError, did_you_mean
from ...known_passes import PRESETS, TRANSFORMS, class_name, entry_points, own_names, pass_names
from ..contract import Pass, format_value, option_types, snake_case, type_text
from ..sites import Goal, Numerics, Phase

__all__ = ["Option", "PassInfo", "available", "find_pass"]


@dataclass(frozen=True)
class Option:
    """One option of a pass: its name, what it takes in words, and its default as text (None if it must be given)."""

    name: str
    takes: str
    default: str | None


@dataclass(frozen=True)
class PassInfo:
    """What is known of a pass without running it; `problem` says why one that is listed cannot be used."""

    name: str
    origin: str
    summary: str = ""
    numerics: Numerics | None = None
    goal: Goal | None = None
    phase: Phase | None = None
    options: tuple[Option, ...] = ()
    problem: str = ""


def find_pass(name: str) -> type[Pass]:
    """Return the class of a pass; raise UsageError if none or several distributions have it, or its import fails."""
    if name in own_names():
        return getattr(importlib.import_module(f"{TRANSFORMS}.{name}"), class_name(name))
    entries = [entry for entry in entry_points() if entry.name == name]
    if not entries:
        raise UsageError(f"unknown pass {name!r}{did_you_mean(name, [*pass_names(), *PRESETS])}")
    if len({entry.value for entry in entries}) > 1:
        raise UsageError(f"several distributions have a pass {name!r}: {', '.join(sorted(e.value for e in entries))}")
    return _load(entries[0])


def available() -> dict[str, PassInfo]:
    """Describe every pass there is, by name; one that cannot be loaded is listed with its problem."""
    return {name: _describe(name, origin) for name, origin in sorted(pass_names().items())}


def _load(entry: importlib.metadata.EntryPoint) -> type[Pass]:
    where = f"pass {entry.name!r} ({entry.value})"
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where} cannot be loaded: {error}") from error
    if not (inspect.isclass(found) and issubclass(found, Pass) and dataclasses.is_dataclass(found)):
        raise UsageError(f"{where} is not a dataclass derived from fxopt.Pass")
    if snake_case(found.__name__) != entry.name:
        raise UsageError(f"{where} must be registered as {snake_case(found.__name__)!r}, after its class")
    return found


def _describe(name: str, origin: str) -> PassInfo:
    try:
        found = find_pass(name)
        options = _options(found)
    except (UsageError, ImportError) as error:
        return PassInfo(name, origin, problem=str(error))
    summary = (inspect.getdoc(found) or "").split("\n", 1)[0]
    return PassInfo(name, origin, summary, found.numerics, found.goal, found.phase, options)


def _options(found: type[Pass]) -> tuple[Option, ...]:
    wanted = option_types(found)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, found))}
    return tuple(Option(key, type_text(kind), _default(fields[key], kind)) for key, kind in wanted.items())


def _default(field: dataclasses.Field[Any], kind: Any) -> str | None:
    if field.default is not dataclasses.MISSING:
        return format_value(field.default, kind)
    return format_value(field.default_factory(), kind) if callable(field.default_factory) else None
