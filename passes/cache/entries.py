"""The folder of decisions: a file for each key, written whole or not at all, and of so many bytes in all at most."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ...errors import PlanError
from ...runtime.record import Decision, Plan
from ...storage import write_atomically

__all__ = ["Cache", "Entry"]

_LOG = logging.getLogger("fxopt")
_FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.json\.[0-9a-f]+\.tmp")
_MOST = 256 * 2**20
"""Bytes of all entries; a plan of a large model has a few hundred thousand."""
_MOST_OF_ONE = 16 * 2**20
_ABANDONED = 3600.0
"""A temporary file of so many seconds has no writer any more."""
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

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values."""
        return {
            "format": _FORMAT, "made": self.made, "plan": self.plan.to_json(), "timings": self.timings,
            "memory": self.memory,
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
        return cls(
            replace(plan, optimizer_form=None), _timings(given.get("timings")), _memory(given.get("memory")), made
        )


@dataclass(frozen=True)
class Cache:
    """The entries in a folder; where that cannot be read or written, there are none."""

    folder: Path

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

    def write(self, key: str, plan: Plan, timings: Mapping[str, Any] | None, memory: Mapping[str, int] | None) -> None:
        """Keep decisions under a key, in the place of those that are there; where that fails, nothing is kept."""
        entry = Entry(plan, timings, memory, datetime.now(UTC).isoformat(timespec="seconds"))
        try:
            data = json.dumps(entry.to_json(), separators=(",", ":"), allow_nan=False)
            Entry.from_json(json.loads(data))  # what could not be read is not written
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._path(key)
            if path.is_symlink():
                path.unlink()
            write_atomically(path, data, durable=False)
            self._make_room()
        except (OSError, ValueError, TypeError, PlanError, RecursionError) as error:
            _LOG.debug("no decisions are kept in '%s': %s", self.folder, error)

    def usage(self) -> tuple[int, int]:
        """Return how many entries there are, and their bytes."""
        sizes = [status.st_size for _, status in self._files(_NAME)]
        return len(sizes), sum(sizes)

    def clear(self) -> tuple[int, int]:
        """Remove all entries, and return how many there were, and their bytes; raise OSError where one stays."""
        count, size = self.usage()
        for path, _ in (*self._files(_NAME), *self._files(_TEMPORARY)):
            path.unlink(missing_ok=True)
        return count, size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _files(self, name: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
        """Return the files of the cache; other files in the folder are left alone."""
        found: list[tuple[Path, os.stat_result]] = []
        try:
            with os.scandir(self.folder) as files:
                for each in files:
                    if name.fullmatch(each.name) and each.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):  # another process may remove it
                            found.append((Path(each.path), each.stat(follow_symlinks=False)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return found

    def _make_room(self) -> None:
        """Remove what was not used for longest, until the rest fits; and what a writer has left behind."""
        entries = sorted(self._files(_NAME), key=lambda each: each[1].st_mtime)
        left = sum(status.st_size for _, status in entries)
        for path, status in entries:
            if left <= _MOST:
                break
            path.unlink(missing_ok=True)
            left -= status.st_size
        for path, status in self._files(_TEMPORARY):
            if time.time() - status.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)


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
