"""The table of engines: fxopt's own rows, and those of other distributions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from functools import cache
from typing import cast

from ...errors import UsageError, did_you_mean
from ...known_passes import ENGINES
from .aot_inductor import AOTInductor
from .engine import Engine
from .onnx_runtime import OnnxRuntime
from .open_vino import OpenVINO

__all__ = ["engine_named", "engines"]

_FOR_GPUS = ": engines compute on CPUs here; leave the pass out for models on GPUs"


def engines() -> Mapping[str, Engine]:
    """Return all engines by name, in order of preference: fxopt's own, then those of other distributions."""
    return dict(_all())


@cache
def _all() -> tuple[tuple[str, Engine], ...]:
    return tuple((each.name, each) for each in (*_own(), *_others()))


def _own() -> Iterator[Engine]:
    yield OpenVINO()
    yield OnnxRuntime()
    yield AOTInductor()


def _others() -> Iterator[Engine]:
    for point in importlib.metadata.entry_points(group=ENGINES):
        yield cast("type[Engine]", point.load())()


def engine_named(name: str) -> Engine:
    """Return an engine, or raise UsageError for a name that no engine has."""
    known = engines()
    if name not in known:
        hint = _FOR_GPUS if name == "tensorrt" else did_you_mean(name, [*known])
        raise UsageError(f"there is no engine {name!r}{hint}")
    return known[name]
