"""What stands in a graph for the results of a part that ran under `torch.no_grad()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...compat import is_transformed, same_memory

__all__ = ["WithoutGradient"]


@dataclass(frozen=True)
class WithoutGradient:
    """Give a tensor in the same memory that passes no gradient on, but derivatives in forward mode, as no_grad does."""

    operator: ClassVar[str] = "detach"
    __name__ = "without_gradient"

    def __call__(self, x: Tensor) -> Tensor:
        if not is_transformed():
            return x.detach()
        with torch.no_grad():  # into views that are made here nobody may write later
            return same_memory(x)
