"""The autocast that a module is called under: its graph has none of its own, but its values depend on it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Ambient", "ambient_now"]

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Ambient:
    """Hold the device types that autocast is on for, with their dtypes."""

    autocast: tuple[tuple[str, torch.dtype], ...]

    @contextmanager
    def entered(self) -> Generator[None]:
        """Switch the same autocast on."""
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


def ambient_now() -> Ambient | None:
    """Return the autocast that is on now, or None."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return None
    return Ambient(tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)))
