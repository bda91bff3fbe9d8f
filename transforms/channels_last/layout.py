"""How tensors lie in memory: what rewritten graphs call, and how weights of convolutions are laid."""

from __future__ import annotations

from torch import Tensor

from ...layers.packed import CHANNELS_LAST

__all__ = ["laid_last"]


def laid_last(x: Tensor) -> Tensor:
    """Return images that lie in memory channels last.

    Args:
        x: [N, C, H, W] or [N, C, D, H, W]; what has other dimensions is returned as it is.
    """
    kind = CHANNELS_LAST.get(x.dim())
    return x if kind is None else x.contiguous(memory_format=kind)
