"""The entries in the folder of decisions: a file for each key, written whole or not at all, and what it may say."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ...decision_files import DecisionFiles
from ...errors import PlanError
from ...runtime.record import Decision, Plan
from ...storage import write_atomically

__all__ = ["Cache", "Entry"]

_LOG = logging.getLogger("fxopt")
_FORMAT = 3
_MOST_OF_ONE = 16 * 2**20
_LARGEST = 1e15
"""No figure is larger, be it of nanoseconds or bytes."""
_SPEEDS = ("speedup", "speedup_low", "speedup_high")
_NUMBERS = (*_SPEEDS, "before_us", "after_us", "meaning_error", "precision_error", "gradient_jump")


@dataclass(frozen=True)
class Entry:
    """What was decided once, and measured then."""

    plan: Plan
    timings: Mapping[str, Any] | None = None  # of the whole model, as a record has them
    memory: Mapping[str, int] | None = None
    made: str = ""  # when, as a date with a time
    rounding: float = 0.0  # how far it took the results of the whole model, of their scale, where that was looked at
    granted: float = 0.0  # seconds that there were to decide
    forward: float = 0.0  # seconds that a call of the model took
    is_compared: bool = True  # whether the whole model was compared as usual, and no time was missing
    fixed: tuple[bool, ...] = ()  # of each region: whether its engine holds it for the example's shapes alone, too

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values."""
        return {
            "format": _FORMAT, "made": self.made, "plan": self.plan.to_json(), "timings": self.timings,
            "memory": self.memory, "rounding": self.rounding, "granted": self.granted, "forward": self.forward,
            "is_compared": self.is_compared, "fixed": list(self.fixed),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> Entry:
        """Return the entry that `to_json` described; raise PlanError or ValueError for anything else."""
        given = _mapping(data)
        if given.get("format") != _FORMAT:
            raise ValueError("it is of another format")
        made = datetime.fromisoformat(str(given.get("made"))).isoformat()
        plan = Plan.from_json(given.get("plan"))
        for decision in plan.decisions:
            _check_decision(decision)
        for name in ("rounding", "granted", "forward"):
            _check_number(given.get(name))
        return cls(
            replace(plan, optimizer_form=None), _timings(given.get("timings")), _memory(given.get("memory")), made,
            abs(given["rounding"]), given["granted"], abs(given["forward"]), given.get("is_compared") is True,
            tuple(each is True for each in _list(given.get("fixed"))),
        )  # fmt: skip


class Cache(DecisionFiles):
    """The entries in a folder; where that cannot be read or written, there are none."""

    def read(self, key: str) -> Entry | None:
        """Return the entry of a key, which counts as used now; None for one that is not there, or that is damaged."""
        path = self._path(key)
        try:
            data = _content(path)
            if len(data) > _MOST_OF_ONE:
                raise ValueError("it is too large")
            entry = Entry.from_json(json.loads(data))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, PlanError, RecursionError, ArithmeticError) as error:
            _LOG.debug("the decisions in '%s' are not used: %s", path, error)
            return None
        with suppress(OSError):
            os.utime(path)
        return entry

    def write(self, key: str, entry: Entry) -> None:
        """Keep decisions under a key, in the place of those that are there; where that fails, nothing is kept."""
        entry = entry if entry.made else replace(entry, made=datetime.now(UTC).isoformat(timespec="seconds"))
        try:
            data = json.dumps(entry.to_json(), separators=(",", ":"), allow_nan=False)
            Entry.from_json(json.loads(data))  # what could not be read is not written
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._path(key)
            if path.is_symlink():
                path.unlink()
            write_atomically(path, data, durable=False)
            self.make_room()
        except (OSError, ValueError, TypeError, PlanError, RecursionError) as error:
            _LOG.debug("no decisions are kept in '%s': %s", self.folder, error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _content(path: Path) -> bytes:
    """Return what is in a regular file, up to a byte more than an entry may have; no link is followed."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        return file.read(_MOST_OF_ONE + 1)


# -- what a file may say: reports write it down ------------------------------------------------------------------------


def _check_decision(decision: Decision) -> None:
    """Raise ValueError for what no run writes down."""
    for name in _NUMBERS:
        if decision.figures.get(name) is not None:
            _check_number(decision.figures[name])
    for each in _mapping(decision.figures.get("lowerings", {})).values():
        _check_number(each)
    _check_finite([decision.figures, decision.values, decision.site])
    if decision.site is not None:
        _mapping(decision.site.get("data"))


def _timings(given: object) -> Mapping[str, Any] | None:
    """Return the times of the whole model, alone and by kinds of calls and by sizes."""
    if given is None:
        return None
    found = _mapping(given)
    _check_speeds(found, ("before_ms", "after_ms", *_SPEEDS))
    for each in (each for name in ("calls", "sizes") for each in _mapping(found.get(name, {})).values()):
        _check_speeds(_mapping(each), _SPEEDS)
    if not all(isinstance(reason, str) for reason in _mapping(found.get("untimed_sizes", {})).values()):
        raise ValueError("a size was not timed for no reason")
    _check_finite(found)
    return found


def _check_speeds(given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        _check_number(given.get(name))


def _memory(given: object) -> Mapping[str, int] | None:
    if given is None:
        return None
    found = _mapping(given)
    for name in ("live_before", "live_after", "peak_before", "peak_after"):
        _check_number(found.get(name))
    return found


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it has {str(value)[:40]!r} in the place of an object")
    return cast("dict[str, Any]", value)


def _list(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"it has {str(value)[:40]!r} in the place of a list")
    return cast("list[Any]", value)


def _check_number(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise ValueError(f"it has {str(value)[:40]!r} in the place of a number")


def _check_finite(value: object) -> None:
    """Raise ValueError for a number that is not finite."""
    if isinstance(value, dict):
        for each in cast("dict[str, object]", value).values():
            _check_finite(each)
    elif isinstance(value, list):
        for each in cast("list[object]", value):
            _check_finite(each)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it has a number that is not finite")
