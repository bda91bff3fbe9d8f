"""The tensors of an archive: each stored once, contiguous and on the CPU, in the safetensors format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import ArchiveError, one_line

__all__ = ["WEIGHTS", "read_weights", "stored_once", "weights_bytes"]

WEIGHTS = "weights.safetensors"


def stored_once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, ready to be stored, and alias -> name for tied ones; or raise `ArchiveError`."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in state.items():
        _check_storable(name, tensor)
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        if first.setdefault(identity, name) != name:
            aliases[name] = first[identity]
        else:
            # A view into a stacked tensor shares its storage, which the format refuses.
            stored[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return stored, aliases


def _check_storable(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise ArchiveError(f"{name!r} is a {type(tensor).__name__}, not a tensor; an archive holds tensors only")
    if tensor.is_meta:
        raise ArchiveError(f"{name!r} is on the meta device and has no values to save")
    if tensor.layout != torch.strided:
        raise ArchiveError(f"{name!r} is sparse ({tensor.layout}); an archive holds dense tensors only")


def weights_bytes(stored: dict[str, Tensor]) -> bytes:
    """Return tensors as a safetensors file; raise `ArchiveError` if the format has no place for one."""
    try:
        return safetensors.torch.save(stored)
    except (KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArchiveError(f"the weights cannot be stored: {one_line(error)}") from error


def read_weights(where: Path, data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; raise `ArchiveError` if it is none."""
    try:
        return safetensors.torch.load(data)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError, SafetensorError) as error:
        raise ArchiveError(f"{where}: its weights are unreadable: {one_line(error)}") from error
