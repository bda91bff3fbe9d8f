"""Whether processes that compute parts of the same layers are given the same rows, looked at in the first calls."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

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
        if not self._left or torch.compiler.is_compiling() or distributed.get_backend(group) == "fake":
            return
        given = list(tensors_in([args, kwargs]))
        if any(tensor.is_meta for tensor in given):
            return
        self._left -= 1
        everyone: list[Any] = [None] * self._mesh.size()
        distributed.all_gather_object(everyone, [_summary(tensor) for tensor in given], group=group)
        other = next((number for number, summary in enumerate(everyone) if summary != everyone[0]), 0)
        if other:
            one, other = (distributed.get_global_rank(group, number) for number in (0, other))
            raise UsageError(
                f"rank {other} was given other rows than rank {one}, and both compute parts of the same layers; give "
                "them the same rows, in the same order"
            )


def _summary(tensor: Tensor) -> str:
    """Return a text that is equal for equal tensors, and for others hardly ever."""
    form = f"{[*tensor.shape]} {tensor.dtype} {tensor.layout}"
    if tensor.layout is not torch.strided or not tensor.numel():
        return form
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{form} {hashlib.sha256(values.numpy().tobytes()).hexdigest()}"
