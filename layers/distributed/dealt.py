"""Linear layers whose outputs are several parts, of which each process has a share: queries, keys and values, say."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

__all__ = ["COLUMNS", "DealtColumns"]

COLUMNS = "columns"
"""What a layer is called whose outputs are in another order."""


class DealtColumns(nn.Module):
    """A linear layer whose outputs are in another order: what one process has of all parts lies together."""

    _fxopt_is_operation: ClassVar[bool] = True

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.columns = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.columns(x)
