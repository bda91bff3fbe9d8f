"""How tensors lie in memory: what rewritten graphs call, and how weights of convolutions are laid."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FORMATS", "laid_last"]

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions."""


def laid_last(x: Tensor) -> Tensor:
    """Return images that lie in memory channels last.

    Args:
        x: [N, C, H, W] or [N, C, D, H, W]; what has other dimensions is returned as it is.
    """
    kind = FORMATS.get(x.dim())
    return x if kind is None else x.contiguous(memory_format=kind)
