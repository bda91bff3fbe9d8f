"""The options of the pass, which schemes read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["READ_BY", "SchemeName", "Settings"]

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


READ_BY: Mapping[str, tuple[SchemeName, ...]] = {
    "group_size": ("int4_weight",),
    "per_channel": ("int8_dynamic", "int8_static", "int8_weight", "float8"),
    "observer": ("int8_static",),
    "batches": ("int8_static",),
    "calibration": ("int8_static",),
}
"""Option -> the schemes that read it."""
