"""What stands in graphs where values go to the members of an ensemble that a process computes, and come from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...compat.distributed import added_up, gathered_in_order, handed_to_all

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AllMembers", "Crossing", "MeanOfMembers", "OwnMembers", "SharedByMembers", "SumOfMembers"]


class Crossing:
    """A function of one value, for graphs; the processes of a mesh compute some members each, of the same inputs."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.__name__, self.__module__ = type(self).__name__, type(self).__module__  # what torch.fx prints

    def __call__(self, value: Tensor) -> Tensor:
        raise NotImplementedError


class SharedByMembers(Crossing):
    """What all members read: its gradient is the sum over the members of all processes."""

    def __call__(self, value: Tensor) -> Tensor:
        needs_sum = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        return handed_to_all(value, self.mesh) if needs_sum else value


class OwnMembers(SharedByMembers):
    """Of what each member reads, [N, ...], that of the members of this process."""

    def __call__(self, value: Tensor) -> Tensor:
        size = value.shape[0] // self.mesh.size()
        return super().__call__(value).narrow(0, self.mesh.get_local_rank() * size, size)


class AllMembers(Crossing):
    """The results of all members, [N, ...], from those of each process."""

    def __call__(self, value: Tensor) -> Tensor:
        return gathered_in_order(value, self.mesh)


class SumOfMembers(Crossing):
    """The sum over the members of all processes, from that of each."""

    def __call__(self, value: Tensor) -> Tensor:
        return added_up(value, self.mesh)


class MeanOfMembers(SumOfMembers):
    """The mean over the members of all processes, as many each, from that of each."""

    def __call__(self, value: Tensor) -> Tensor:
        return super().__call__(value) / self.mesh.size()
