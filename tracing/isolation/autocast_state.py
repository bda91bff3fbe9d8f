"""What is switched on around a call: autocast, which a graph has none of by itself, and inference mode."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["AutocastState", "autocast_state_now", "outside_inference_mode"]

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class AutocastState:
    """Hold the device types that autocast is on for, with their dtypes."""

    autocast: tuple[tuple[str, torch.dtype], ...]

    @contextmanager
    def entered(self) -> Generator[None]:
        """Switch the same autocast on."""
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


def autocast_state_now() -> AutocastState | None:
    """Return the autocast that is on now, or None."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return None
    return AutocastState(tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)))


@contextmanager
def outside_inference_mode() -> Generator[None]:
    """Leave inference mode for a while, without gradients as in it: what is made in it can never have any."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
