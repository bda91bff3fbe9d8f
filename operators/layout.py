"""How images lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat import is_transformed

__all__ = ["CHANNELS_LAST", "laid_last"]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of dimensions -> the format in which channels come last in memory."""


def laid_last(x: Tensor) -> Tensor:
    """Return images [N, C, H, W] or [N, C, D, H, W] channels last; as they are under transforms and else."""
    kind = CHANNELS_LAST.get(x.dim())
    if kind is None or (not torch.compiler.is_compiling() and is_transformed()):
        return x
    return x.contiguous(memory_format=kind)
