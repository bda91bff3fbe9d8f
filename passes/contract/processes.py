"""What passes for several processes need: a process group of `torch.distributed`, one device each, the same weights."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed, nn

from ...compat import all_modules
from ...errors import UsageError
from ...runtime.values import all_tensors, tensors_by_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "device_type",
    "launch_command",
    "mesh_of_same_weights",
    "missing_process_group",
    "require_process_group",
    "require_same_weights",
]

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 1 << 20  # so many numbers are looked at together: a copy of all would be as large as the tensor


def missing_process_group(name: str, processes: int = 2) -> str:
    """Say that a pass called so lacks its process group, and how to start so many processes; "" where there is one."""
    if distributed.is_available() and distributed.is_initialized():
        return ""
    if distributed.is_available() and distributed.is_torchelastic_launched():
        step = "call torch.distributed.init_process_group() before fxopt.optimize"
    else:
        step = (
            f"run {launch_command(processes)}, and call torch.distributed.init_process_group() in it before "
            "fxopt.optimize"
        )
    return f"pass '{name}' works on several processes, and there is no process group; {step}"


def require_process_group(name: str, processes: int = 2) -> None:
    """Raise UsageError, with the command to run, where the process group of a pass is not initialized."""
    missing = missing_process_group(name, processes)
    if missing:
        raise UsageError(missing)


def launch_command(processes: int) -> str:
    """Return, for a message, the command that starts this script in several processes."""
    return f"`torchrun --nproc-per-node={processes} {Path(sys.argv[0]).name or 'train.py'}`"


def device_type(model: nn.Module, name: str) -> str:
    """Return on what kind of device processes run a model; raise UsageError for several, or one the group has not."""
    backends = distributed.get_backend_config()
    served = [pair.partition(":")[0] for pair in backends.split(",")]
    kinds = {tensor.device.type for tensor in all_tensors(all_modules(model)) if not tensor.is_meta}
    if len(kinds) > 1:
        raise UsageError(f"pass '{name}': the model is on {' and '.join(sorted(kinds))}; move it to one device")
    kind = next(iter(kinds), "cuda" if "nccl" in backends else "cpu")
    if kind not in served:
        raise UsageError(
            f"pass '{name}': the model is on {kind}, and the process group works on {', '.join(served)}; "
            "move the model there before fxopt.optimize, each process to its own device"
        )
    return kind


def mesh_of_same_weights(model: nn.Module, name: str) -> DeviceMesh:
    """Return the mesh of all processes, once they are seen to have the same weights (`require_same_weights`)."""
    from torch.distributed.device_mesh import init_device_mesh

    require_same_weights(model, name)
    return init_device_mesh(device_type(model, name), (distributed.get_world_size(),))


def require_same_weights(model: nn.Module, name: str) -> None:
    """Raise UsageError on all processes, naming a tensor, where their weights differ: a collective call."""
    mine = {key: _summary(value) for key, value in tensors_by_name(model).items() if not value.is_meta}
    everyone: list[dict[str, str]] = [{} for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(everyone, mine)
    for rank, other in enumerate(everyone):
        key = next((key for key, value in everyone[0].items() if other.get(key) != value), None)
        if key is not None:
            step = "seed all processes alike, or let all load one checkpoint, before fxopt.optimize"
            raise UsageError(f"pass '{name}': '{key}' of rank {rank} is not that of rank 0; {step}")


def _summary(tensor: Tensor) -> str:
    """Return a text that is equal for equal tensors, and hardly ever for others: of their bits, in whole numbers."""
    if tensor.layout is not torch.strided:
        return ""
    values = tensor.detach().contiguous()
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.flatten().view(_WHOLE_NUMBERS[values.element_size()])
    parts: Sequence[Tensor] = cast("Any", bits).split(_PART)
    sums = [(part.long() * torch.arange(1, len(part) + 1, device=part.device)).sum() for part in parts]
    return hashlib.sha256(repr(cast("Any", torch.stack(sums)).tolist()).encode()).hexdigest()
