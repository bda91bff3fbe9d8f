"""Routers that give no token to some of their experts, as they do once these are gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .under_modes import under_mode

__all__ = ["without_experts"]


def without_experts(router: nn.Module, size: int, kept: Sequence[int]) -> None:
    """Let a router of `size` experts give the others logits of minus infinity: no token chooses them."""
    under_mode(router, _Without(size, kept))


class _Without(TorchFunctionMode):
    """Put minus infinity where a linear layer gives the logits of experts that are gone."""

    def __init__(self, size: int, kept: Sequence[int]) -> None:
        super().__init__()
        self._size, self._kept = size, list(kept)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.linear or result.shape[-1] != self._size:
            return result
        gone = torch.ones(self._size, dtype=torch.bool, device=result.device)
        gone[self._kept] = False
        return result.masked_fill(gone, float("-inf"))
