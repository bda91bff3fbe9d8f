"""How layers are split: torch's own styles for `nn.Linear`, and the same for GPT-2's linear layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...compat import own_children, own_parameters, same_memory
from ...errors import InputError
from ...layers.distributed import COLUMNS, SameRows, own_share, replicate_parameters
from ...passes.rewriting import holds_inputs_first, layer_of
from ...runtime.graphs import specializations_of
from ...runtime.values import qualified
from ...tracing.program import Program, TensorReads
from .write_vocabulary import places_of, split_vocabulary

__all__ = ["split"]


def split(
    program: Program,
    blocks: Sequence[Mapping[str, Any]],
    mesh: DeviceMesh,
    around: Sequence[nn.Module] = (),
) -> None:
    """Split the layers that `blocks` name over the processes of a mesh; all other parameters are replicated.

    Layers that are on other ranks are left out. `around`: modules outside of the model that read its parameters.
    """
    model, plan = program.model, dict[str, ParallelStyle]()
    here = {name: module for name, module in program.names.modules.items() if own_parameters(module)}
    for block in blocks:
        in_sections = block.get("sections", ())
        columns = [qualified(name, COLUMNS) if name in in_sections else name for name in block["columns"]]
        plan |= {name: _column_style(holds_inputs_first(here[name])) for name in columns if name in here}
        plan |= {name: _row_style(holds_inputs_first(here[name])) for name in block["rows"] if name in here}
    readers = _readers(program)
    vocabularies = [(block, places_of(program, block["embeddings"][0])) for block in blocks if "embeddings" in block]
    for name in plan:
        here[name].register_forward_pre_hook(_refuse_empty)
    for name in (name for block in blocks for name in block["rows"] if name in here):
        here[name].register_forward_pre_hook(partial(_take_share, mesh, _inputs(here[name])))
    # Every process has the whole weights: nothing needs to be sent.
    if plan:
        parallelize_module(model, mesh, plan, src_data_rank=None)
    for name in plan:
        here[name].register_forward_hook(_no_view)
    for block, places in vocabularies:
        split_vocabulary(program, block, places, mesh)
    if not around:
        model.register_forward_pre_hook(SameRows(mesh), with_kwargs=True)
    replicate_parameters(model, mesh, lambda parameter: (*around, *readers[parameter]))


def _refuse_empty(_: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse what has no rows: torch computes how to lay it out over processes, for some sizes without an end."""
    x = args[0] if args else None
    if isinstance(x, Tensor) and x.ndim > 2 and not x.numel():
        raise InputError(
            f"a layer that is split over processes gets {list(x.shape)}, without rows, which torch cannot split; "
            "leave such batches out, on all processes"
        )


def _no_view(_: nn.Module, _given: tuple[Any, ...], output: Any) -> Any:
    """Return what torch gives as a view of a DTensor as a tensor that may be written to: activations work in place."""
    return same_memory(output) if isinstance(output, Tensor) else output


def _inputs(module: nn.Module) -> int:
    layer = layer_of(module)
    return 0 if layer is None else layer.channels[0]


def _take_share(mesh: DeviceMesh, inputs: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let a layer that is split by inputs take its share where code that no graph is for gives it all of them."""
    x = args[0] if args else None
    return (own_share(x, mesh), *args[1:]) if isinstance(x, Tensor) and x.shape[-1] == inputs else args


def _readers(program: Program) -> Mapping[nn.Parameter, Sequence[nn.Module]]:
    """Return, by parameter, the modules that may read it though it is not their own."""
    reads, found = program.analyses[TensorReads], defaultdict[nn.Parameter, list[nn.Module]](list)
    for parameter in program.model.parameters():
        for reader in reads.readers_of(parameter):
            found[parameter].append(program.module("" if reader == "(root)" else reader))
    for module in program.names.distinct:
        if not specializations_of(module) and any(own_children(module).values()):  # nothing shows what it reads
            for parameter in module.parameters():
                found[parameter].append(module)
    return found


def _column_style(transposed: bool) -> ParallelStyle:
    """Return the style that splits a layer by its outputs; `transposed` is a weight [in, out]."""
    return _Conv1dColumns() if transposed else ColwiseParallel()


def _row_style(transposed: bool) -> ParallelStyle:
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
