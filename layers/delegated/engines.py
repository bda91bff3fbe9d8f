"""The table of engines: fxopt's own rows, and those of other distributions."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...errors import UsageError, did_you_mean, one_line
from ...known_passes import ENGINES
from .aot_inductor import AOTInductor
from .engine import Engine, Session
from .onnx_runtime import OnnxRuntime
from .open_vino import OpenVINO

__all__ = ["engine_named", "engines"]

_FOR_GPUS = ": engines compute on CPUs here; leave the pass out for models on GPUs"


def engines() -> Mapping[str, Engine]:
    """Return all engines by name, in order of preference: fxopt's own, then those of other distributions."""
    return dict(_all())


@cache
def _all() -> tuple[tuple[str, Engine], ...]:
    known = {each.name: each for each in _own()}
    for each in _others():
        known.setdefault(each.name, each)  # fxopt's own win where names are equal
    return tuple(known.items())


def _own() -> Iterator[Engine]:
    yield OpenVINO()
    yield OnnxRuntime()
    yield AOTInductor()


def _others() -> Iterator[Engine]:
    for point in importlib.metadata.entry_points(group=ENGINES):
        try:
            found = point.load()
            if not (inspect.isclass(found) and issubclass(found, Engine)):
                raise TypeError("it is no class derived from fxopt.layers.delegated.Engine")
            yield found()
        except Exception as error:  # code of others, as it is imported, may raise anything
            reason = f"engine {point.name!r} ({point.value}) cannot be loaded: {one_line(error)}"
            yield type("Unloadable", (_Unloadable,), {"name": point.name, "packages": (), "reason": reason})()


class _Unloadable(Engine):
    """Stands for an engine of another distribution that cannot be loaded: models go without it."""

    reason: ClassVar[str]

    @property
    def version(self) -> str:
        return ""

    def reason_against(self, dtype: torch.dtype) -> str:
        return self.reason

    def compile(self, computation: nn.Module, example: Sequence[Tensor], dtype: torch.dtype, threads: int) -> Session:
        raise RuntimeError(self.reason)


def engine_named(name: str) -> Engine:
    """Return an engine, or raise UsageError for a name that no engine has."""
    known = engines()
    if name not in known:
        hint = _FOR_GPUS if name == "tensorrt" else did_you_mean(name, [*known])
        raise UsageError(f"there is no engine {name!r}{hint}")
    return known[name]
