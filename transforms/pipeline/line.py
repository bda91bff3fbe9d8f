"""The processes of one pipeline: all that there are, or one of each group that shares a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Line"]


@dataclass(frozen=True)
class Line:
    """The processes that have one model in stages among them."""

    ranks: Sequence[int]  # among all processes
    group: Any = None  # of them; None is that of all processes

    @classmethod
    def of(cls, mesh: DeviceMesh | None = None) -> Line:
        """Return the line that this process is in: that of a mesh with one dimension, or all processes."""
        if mesh is None:
            return cls(range(distributed.get_world_size()))
        return cls(distributed.get_process_group_ranks(mesh.get_group()), mesh.get_group())

    @property
    def size(self) -> int:
        """Return how many processes there are."""
        return len(self.ranks)

    def on_processors(self) -> Any:
        """Return a group of the same processes that works on processors, or None where theirs can be used."""
        if distributed.get_backend() == "fake":  # ranks that are not there, to plan without them, have only that
            return None
        return distributed.new_group(list(self.ranks), backend="gloo", use_local_synchronization=True)
