"""The table of engines: what each is, whether it is there, and how it takes a computation over."""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from ...errors import UsageError, did_you_mean

__all__ = ["GROUP", "Engine", "Session", "engine_named", "engines"]

GROUP = "fxopt.engines"
"""The entry-point group of engines from other distributions, one line each: `name = "module:EngineClass"`."""


class Session(Protocol):
    """A computation that an engine has compiled; several threads may call it."""

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the results as tensors of their own, which no later call writes to. Inputs are contiguous, on the CPU."""
        ...


class Engine(ABC):
    """One engine. A subclass says what to import, and makes sessions.

    Attributes:
        name: what users call it.
        packages: the distributions that it needs, the first being the engine itself.
        dtypes: the types that it can compute float32 models in.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def reason_against(self, dtype: torch.dtype) -> str:
        """Return why it cannot be used here, or ""."""
        if dtype not in self.dtypes:
            return f"{self.name} does not compute in {str(dtype).removeprefix('torch.')}"
        for package in self.packages:
            if _version(package) is None:
                return f"{self.name} needs the package {package}: pip install {' '.join(self.packages)}"
        return _import_error(self.packages[0])

    @property
    def version(self) -> str:
        """Return the version of the engine, or "" where it is not installed."""
        return _version(self.packages[0]) or ""

    @abstractmethod
    def compile(self, function: torch.jit.ScriptFunction[..., Any] | torch.jit.ScriptModule,
                example: Sequence[Tensor], dtype: torch.dtype, threads: int) -> Session:  # fmt: skip
        """Compile a traced computation, of as many inputs as `example` has, each of any shape that fits it.

        May raise anything for what the engine does not know: the region stays as it is.
        """


@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _import_error(package: str) -> str:
    try:
        importlib.import_module(package)
    except Exception as error:  # a broken installation may raise anything
        return f"importing {package} fails: {error}"
    return ""


def engines() -> Mapping[str, Engine]:
    """Return all engines by name, in order of preference: fxopt's own, then those of other distributions."""
    return dict(_all())


@cache
def _all() -> tuple[tuple[str, Engine], ...]:
    return tuple((each.name, each) for each in (*_own(), *_others()))


def _own() -> Iterator[Engine]:
    from .onnx_runtime import OnnxRuntime
    from .open_vino import OpenVINO

    yield OpenVINO()
    yield OnnxRuntime()


def _others() -> Iterator[Engine]:
    for point in importlib.metadata.entry_points(group=GROUP):
        yield cast("type[Engine]", point.load())()


def engine_named(name: str) -> Engine:
    """Return an engine, or raise UsageError for a name that no engine has."""
    known = engines()
    if name not in known:
        raise UsageError(f"there is no engine {name!r}{did_you_mean(name, [*known])}")
    return known[name]
