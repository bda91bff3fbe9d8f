"""How layers are split: torch's own styles for `nn.Linear`, and the same for GPT-2's linear layer."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

__all__ = ["column_style", "row_style"]


def column_style(transposed: bool) -> ParallelStyle:
    """Return the style that splits a layer by its outputs; `transposed` is a weight [in, out]."""
    return _Conv1dColumns() if transposed else ColwiseParallel()


def row_style(transposed: bool) -> ParallelStyle:
    """Return the style that splits a layer by its inputs."""
    return _Conv1dRows() if transposed else RowwiseParallel()


class _Conv1dColumns(ColwiseParallel):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distributed(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)}, (Replicate(),))


class _Conv1dRows(RowwiseParallel):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distributed(self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()}, (Shard(-1),))


def _distributed(
    style: Any, module: nn.Module, mesh: DeviceMesh, placements: dict[str, Shard | Replicate], wanted: Any
) -> nn.Module:
    """Split the parameters of a layer, and let hooks take and give what torch's own style does."""

    def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            split = distribute_tensor(parameter, mesh, [placements[name]], src_data_rank=style.src_data_rank)
            layer.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))

    inputs = partial(style._prepare_input_fn, style.input_layouts, wanted)
    outputs = partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    return distribute_module(module, mesh, partition, cast("Any", inputs), cast("Any", outputs))
