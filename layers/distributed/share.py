"""What a process has of rows or columns that are divided over all, and all of them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ...compat.distributed import gathered_in_order

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Gathered", "Share"]


@dataclass(frozen=True)
class Share:
    """What a process has of so many rows or columns: as DTensors are divided, the last ones may have fewer."""

    mesh: DeviceMesh
    size: int

    @property
    def widest(self) -> int:
        """Return how many the first process has."""
        return -(-self.size // self.mesh.size())

    @property
    def start(self) -> int:
        return min(self.mesh.get_local_rank() * self.widest, self.size)

    @property
    def end(self) -> int:
        return min(self.start + self.widest, self.size)


@dataclass(frozen=True)
class Gathered:
    """Gather what the processes have, [..., columns of this process], to [..., all columns]."""

    share: Share

    @property
    def __name__(self) -> str:
        return "gathered"

    def __call__(self, columns: Tensor) -> Tensor:
        return gathered_in_order(columns, self.share.mesh, -1, self.share.size)
