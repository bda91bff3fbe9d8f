"""Whether processes that compute parts of the same layers are given the same rows, looked at in the first calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from ...compat import is_transformed
from ...errors import UsageError
from ...runtime.values import tensors_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SameRows"]

_CALLS = 16
"""So many calls are looked at; who gives other rows by mistake does so from the first one."""


class SameRows:
    """A hook before the forward of a whole model: compares what the processes of a mesh are given, in the first calls.

    Raises UsageError on all of them where that differs.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._left = mesh, _CALLS

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = self._mesh.get_group()
        is_plain = not torch.compiler.is_compiling() and not is_transformed()
        if not self._left or not is_plain or distributed.get_backend(group) == "fake":
            return
        given = list(tensors_in([args, kwargs]))
        if any(tensor.is_meta for tensor in given):
            return
        self._left -= 1
        other = self._another(_summary(given))
        if other:
            one, other = (distributed.get_global_rank(group, number) for number in (0, other))
            raise UsageError(
                f"rank {other} was given other rows than rank {one}, and both compute parts of the same layers; give "
                "them the same rows, in the same order"
            )

    def _another(self, number: int) -> int:
        """Return the first process whose number is not that of process 0, or 0; one short message where all agree."""
        own = torch.tensor([number, -number], device=self._mesh.device_type)
        most = own.clone()
        distributed.all_reduce(most, distributed.ReduceOp.MAX, self._mesh.get_group())
        if int(most.sum()) == 0:
            return 0
        everyone = [torch.empty_like(own) for _ in range(self._mesh.size())]
        distributed.all_gather(everyone, own, self._mesh.get_group())
        return next(place for place, each in enumerate(everyone) if not torch.equal(each, everyone[0]))


def _summary(tensors: Sequence[Tensor]) -> int:
    """Return a number that is equal for equal tensors, and for others hardly ever."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{[*tensor.shape]} {tensor.dtype} {tensor.layout}".encode())
        if tensor.layout is torch.strided and tensor.numel():
            values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            found.update(values)
    return int.from_bytes(found.digest()[:7], "big")
