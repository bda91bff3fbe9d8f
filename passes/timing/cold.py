"""Timing as between other work: what a call needs must come from memory again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

__all__ = ["Eviction", "last_level_bytes"]

_LAST_LEVEL = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_LARGE_CACHE = 64 * 2**20  # bytes of a last-level cache that is not told
_BEYOND = 1.5
"""So many times as much is written: what a cache drops to make room is chosen by rules that are only near to age."""


class Eviction:
    """Push all else out of the caches of the CPU, and of GPUs, by writing buffers larger than they are."""

    def __init__(self, gpus: Iterable[torch.device] = ()) -> None:
        sizes = {torch.device("cpu"): last_level_bytes(), **{gpu: _bytes_of(gpu) for gpu in gpus}}
        self._buffers = [
            torch.zeros(int(_BEYOND * size), dtype=torch.uint8, device=device) for device, size in sizes.items()
        ]

    def __call__(self) -> None:
        for buffer in self._buffers:
            buffer.add_(1)
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)


def last_level_bytes(told: Path = _LAST_LEVEL) -> int:
    """Return the size of the CPU's last-level cache, in bytes, as Linux tells it."""
    try:
        text = told.read_text(encoding="ascii").strip()
        return int(text.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return _LARGE_CACHE


def _bytes_of(gpu: torch.device) -> int:
    properties = cast("Any", torch.cuda).get_device_properties(gpu)
    return int(properties.L2_cache_size)
