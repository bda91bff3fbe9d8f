"""What an engine is: whether it is there, and how it takes a computation over."""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ...errors import one_line

__all__ = ["Engine", "OtherSizes", "Session"]


class OtherSizes(ValueError):
    """A session was compiled for other sizes of its inputs: the region's own operations compute these."""


class Session(Protocol):
    """A computation that an engine has compiled; several threads may call it.

    It may have a method `fixed(example)`, which returns a session for inputs of the shapes of `example` alone, and say
    by `is_compiled` that it holds no tensors yet.
    """

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the results as tensors of their own, which no later call writes to; inputs are contiguous.

        Raises:
            OtherSizes: it does not compute inputs of such shapes.
        """
        ...


class Engine(ABC):
    """One engine. A subclass says what to import, and makes sessions.

    Attributes:
        name: what users call it.
        packages: the distributions that it needs, the first being the engine itself.
        dtypes: the types that it can compute float32 models in. `int8`: where operations read what torch's fake
            quantization gives, it computes them in 8 bits.
        by_name: whether it is only used where its name is given, since compiling takes long.
        shares_memory: whether sessions hold on to the memory of the model's tensors beside what they make of them.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    by_name: ClassVar[bool] = False
    shares_memory: ClassVar[bool] = False

    def reason_against(self, dtype: torch.dtype) -> str:
        """Return why it cannot be used here, or ""."""
        if dtype not in self.dtypes:
            return f"{self.name} does not compute in {str(dtype).removeprefix('torch.')}"
        for package in self.packages:
            if _version(package) is None:
                return f"{self.name} needs the package {package}: pip install {' '.join(self.packages)}"
        try:
            self.imported()
        except Exception as error:  # a broken installation may raise anything
            return f"importing {self.packages[0]} fails: {one_line(error)}"
        return ""

    def imported(self) -> Any:
        """Return the package of the engine, imported."""
        return importlib.import_module(self.packages[0])

    @property
    def version(self) -> str:
        """Return the version of the engine, or "" where it is not installed."""
        return _version(self.packages[0]) or ""

    def seconds_to_take(self, nodes: int, forward: float) -> float:
        """Return about how much processor time it takes to make a region of so many operations and tensors ready, a
        call of which takes `forward` seconds by itself; 0 where nobody knows.
        """
        return 0.0

    @abstractmethod
    def compile(self, computation: nn.Module, example: Sequence[Tensor], dtype: torch.dtype, threads: int) -> Session:
        """Compile a module of plain operations, of as many inputs as `example` has, each of any shape that fits it.

        May raise anything for what the engine does not know: the region stays as it is.
        """


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
