"""What a scheme is, and the options that schemes read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from ...passes.rewriting import Edit
from ...passes.sites import Refusal, Site
from ...tracing.program import Program

__all__ = ["Scheme", "SchemeName", "Settings"]

SchemeName = Literal["int8_dynamic", "int8_static", "int8_weight", "int4_weight", "float8"]


@dataclass(frozen=True)
class Settings:
    """What the user asks for; `Quantize` says what each option means."""

    scheme: SchemeName = "int8_dynamic"
    keep: tuple[str, ...] = ()
    budget: float | None = None
    per_channel: bool = True
    group_size: int = 64
    aim: Literal["speed", "size"] = "speed"
    observer: Literal["histogram", "minmax", "moving_average"] = "histogram"
    batches: int = 32
    calibration: Any = field(default=None, compare=False, repr=False)

    @property
    def error_budget(self) -> float:
        """Return the error that is allowed, relative to the scale; `Quantize` knows the defaults."""
        raise NotImplementedError

    @property
    def group(self) -> int:
        """Return how many weights of an int8 layer have a scale in common: 0 is those of an output, -1 is all."""
        return 0 if self.per_channel else -1


class Scheme(ABC):
    """One way to quantize; `budget` is by default, and of the `options` are those that not all schemes read."""

    budget: ClassVar[float] = 0.05
    options: ClassVar[tuple[str, ...]] = ("per_channel",)
    folds_norms: ClassVar[bool] = False
    profiles_itself: ClassVar[bool] = True

    def check(self, settings: Settings, model: nn.Module) -> None:  # noqa: B027 - most refuse nothing
        """Raise `UsageError`, before any work, for options and machines that it can do nothing with."""

    @abstractmethod
    def find(self, settings: Settings, program: Program) -> Iterable[Site | Refusal]:
        """Yield the layers to quantize, and why others stay; see `Pass.find`."""

    @abstractmethod
    def rewrite(self, settings: Settings, site: Site, edit: Edit) -> None:
        """Rewrite one site; see `Pass.rewrite`."""
