"""The processes and devices over which a model is sharded."""

from __future__ import annotations

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...compat import all_modules
from ...errors import UsageError
from ...tracing.values import all_tensors

__all__ = ["data_mesh", "device_type"]


def device_type(model: nn.Module, pass_name: str) -> str:
    """Return on what kind of device a model is sharded: where it is; for one on the meta device, where the group works.

    Raises:
        UsageError: it is on several, or the process group does not work there.
    """
    served = [pair.partition(":")[0] for pair in distributed.get_backend_config().split(",")]
    kinds = {tensor.device.type for tensor in all_tensors(all_modules(model)) if not tensor.is_meta}
    if len(kinds) > 1:
        raise UsageError(f"pass '{pass_name}': the model is on {' and '.join(sorted(kinds))}; move it to one device")
    kind = next(iter(kinds), "cuda" if "cuda" in served and "nccl" in distributed.get_backend_config() else "cpu")
    if kind not in served:
        raise UsageError(
            f"pass '{pass_name}': the model is on {kind}, and the process group works on {', '.join(served)}; "
            "move the model there before fxopt.optimize, each process to its own device"
        )
    return kind


def data_mesh(model: nn.Module, pass_name: str) -> DeviceMesh:
    """Return the mesh of all processes."""
    return init_device_mesh(device_type(model, pass_name), (distributed.get_world_size(),))
