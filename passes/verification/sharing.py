"""Which outputs of a call lie in memory that writing into them would change for others, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["MEMORY_OF_MODULE", "is_expanded", "shared_memory"]

MEMORY_OF_MODULE = "the module's own tensors"


def is_expanded(tensor: Tensor) -> bool:
    """Say whether elements of a tensor share memory, so that torch refuses to write into it."""
    steps = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return any(size > 1 and step == 0 for size, step in steps)


def shared_memory(
    outputs: Mapping[str, object], arguments: Mapping[str, Tensor], own: Iterable[Tensor]
) -> frozenset[tuple[str, str]]:
    """Return (output, owner) for each output in the memory of an argument, of the module, or of an earlier output.

    Outputs that lie side by side in one piece of memory (the parts of a batched product) do not share it.
    """
    owners = {_memory(tensor): name for name, tensor in arguments.items()}
    owners.update((_memory(tensor), MEMORY_OF_MODULE) for tensor in own)
    owners.pop(None, None)
    starts: dict[int, str] = {}
    shared: set[tuple[str, str]] = set()
    for name, value in outputs.items():
        memory = _memory(value) if isinstance(value, Tensor) else None
        if memory is None or not isinstance(value, Tensor):
            continue
        if memory in owners:
            shared.add((name, owners[memory]))
        first = starts.setdefault(value.data_ptr(), name)
        if first is not name:
            shared.add((name, first))
    return frozenset(shared)


def _memory(tensor: Tensor) -> int | None:
    """Return where the memory of a tensor begins; None where it has none of its own to speak of."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:  # it is made of other tensors, as quantized ones are
        return None
