"""Every environment variable that fxopt reads, read in one place."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from .errors import UsageError, expect

__all__ = ["Measure", "Settings", "current", "environment_with", "on_trial", "weights_only"]

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Measure(enum.Enum):
    """Whether what is made for speed is timed, and how; only `NO` is false."""

    NO = "no"
    YES = "yes"
    COLD = "cold"
    """With caches emptied before each call, as by other work between two calls."""

    @classmethod
    def of(cls, given: object) -> Measure:
        """Read what a user gave as `measure`: True, False or "cold"; raise `UsageError` for anything else."""
        wanted = "True, False or 'cold'"
        expect(given, (bool, str), "measure", wanted)
        if isinstance(given, str):
            if given != cls.COLD.value:
                raise UsageError(f"measure={given!r}; give {wanted}")
            return cls.COLD
        return cls.YES if given else cls.NO

    @property
    def is_cold(self) -> bool:
        """Say whether caches are emptied before each call."""
        return self is Measure.COLD

    def __bool__(self) -> bool:
        return self is not Measure.NO


def _own_kernels() -> Path:
    """Return a folder that nobody else writes to: what is in it is loaded and run."""
    return Path(os.path.expanduser("~/.cache/fxopt/kernels"))  # noqa: PTH111 - without a home, Path would raise


def _own_decisions() -> Path | None:
    """Return the folder of decisions of this user; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = given if os.path.isabs(given) else os.path.expanduser("~/.cache")  # noqa: PTH111, PTH117
    return Path(caches, "fxopt", "decisions") if os.path.isabs(caches) else None  # noqa: PTH117


@dataclass(frozen=True)
class Settings:
    """What the environment says; each field is the variable `FXOPT_` and its name in capitals."""

    verify: bool = True
    measure: Measure = Measure.YES
    pass_timeout: float = 300.0  # seconds until a pass counts as hung; 0 sets no limit
    reproducer_dir: Path = field(default_factory=lambda: Path(gettempdir()) / "fxopt")
    time_budget: str | None = None  # as `optimize` reads it
    kernel_cache: Path = field(default_factory=_own_kernels)
    engines: bool = True  # whether presets hand regions to engines that are installed
    cache: Path | None = field(default_factory=_own_decisions)  # where decisions are kept; None: nowhere


def current(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `environment`, by default the process's own; raise `UsageError` for a wrong value."""
    source = os.environ if environment is None else environment
    given: dict[str, Any] = {}
    for field_ in fields(Settings):
        variable = f"FXOPT_{field_.name.upper()}"
        if text := source.get(variable):
            given[field_.name] = _READERS[field_.name](variable, text)
    return Settings(**given)


def environment_with(**variables: str) -> dict[str, str]:
    """Return the environment of this process with other variables, for a process that it starts."""
    return {**os.environ, **variables}


@contextmanager
def on_trial(folder: Path) -> Generator[None]:
    """Keep no decisions of what is tried out meanwhile, and write reproducers into a folder that goes afterwards."""
    names = {"FXOPT_CACHE": "0", "FXOPT_REPRODUCER_DIR": str(folder)}
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def weights_only() -> Generator[None]:
    """Let `torch.load` unpickle nothing but tensors, whatever its caller asks for: torch's own readers ask for more."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ[names[0]] = "1"
    try:
        yield
    finally:
        del os.environ[names[0]]
        os.environ.update(before)


def _flag(key: str, text: str) -> bool:
    if text.lower() not in _WORDS:
        raise UsageError(f"{key}={text!r} is neither on nor off; use 1 or 0")
    return _WORDS[text.lower()]


def _measure(key: str, text: str) -> Measure:
    word = text.lower()
    if word != Measure.COLD.value and word not in _WORDS:
        raise UsageError(f"{key}={text!r} is neither on, off nor cold; use 1, 0 or cold")
    return Measure.of(_WORDS.get(word, word))


def _seconds(key: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{key}={text!r} is not a number of seconds, zero or more")
    return seconds


def _cache(_: str, text: str) -> Path | None:
    if text.lower() in _WORDS:
        return _own_decisions() if _WORDS[text.lower()] else None
    try:
        return Path(os.path.expanduser(text)).absolute()  # noqa: PTH111
    except FileNotFoundError:  # the working folder is gone, and the path begins there
        return None


_READERS: Mapping[str, Callable[[str, str], object]] = {
    "verify": _flag,
    "measure": _measure,
    "time_budget": lambda _, text: text,
    "pass_timeout": _seconds,
    "reproducer_dir": lambda _, text: Path(text).expanduser(),
    "kernel_cache": lambda _, text: Path(text).expanduser(),
    "engines": _flag,
    "cache": _cache,
}
