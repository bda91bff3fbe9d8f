"""Linear layers of whose outputs, or inputs, each process has a share: what runs for one asks for its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...compat.distributed import gathered_in_order, handed_to_all
from .share import Gathered, Share

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["COLUMNS", "DealtColumns", "SplitColumns", "own_share"]

COLUMNS = "columns"
"""What a layer is called whose outputs are in another order."""


class DealtColumns(nn.Module):
    """A linear layer whose outputs are several parts (queries, keys and values, say): what one process has of all parts
    lies together. It gives all outputs, in the order of one process, to who does not ask for its `part`, if it knows
    the `mesh`.
    """

    _fxopt_is_operation: ClassVar[bool] = True

    def __init__(self, layer: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.columns, self.sizes = layer, tuple(sizes)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor, *, part: bool = False) -> Tensor:
        own: Tensor = self.columns(x)
        return own if part or self.mesh is None else self._in_order(gathered_in_order(own, self.mesh, -1), self.mesh)

    def _in_order(self, dealt: Tensor, mesh: DeviceMesh) -> Tensor:
        count, given = len(self.sizes), cast("Any", dealt)
        pieces: Sequence[Tensor] = given.split([size // mesh.size() for size in self.sizes] * mesh.size(), -1)
        return torch.cat([piece for number in range(count) for piece in pieces[number::count]], -1)


class SplitColumns(nn.Linear):
    """A linear layer of whose outputs each process has a share; it gives all to who does not ask for its `part`."""

    _fxopt_is_operation = True
    share: Share

    def __call__(self, input: Tensor, *, part: bool = False) -> Tensor:  # noqa: A002  its name in torch
        own: Tensor = super().__call__(input)
        return own if part else Gathered(self.share)(own)


def own_share(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this process's share of the last dimension of what all processes have whole."""
    given: Any = handed_to_all(x, mesh) if x.requires_grad and torch.is_grad_enabled() else x
    size = x.shape[-1] // mesh.size()
    return given.narrow(-1, mesh.get_local_rank() * size, size)
