"""Several parallelisms at once: the passes for each, over one mesh of processes."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import distributed, nn

from ..compat import submodule
from ..errors import UsageError
from ..layers.distributed import SyncBatchNorm
from ..passes.contract import Pass, device_type, launch_command, require_process_group, require_same_weights
from ..passes.sites import Goal, Numerics, Phase, Refusal, Site
from ..tracing.program import Program
from .fsdp import Fsdp
from .pipeline import Line, Pipeline
from .tensor_parallel import TensorParallel, blocks_in, prepare, vocabularies_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Parallel"]


@dataclass(frozen=True)
class Parallel(Pass):
    """Train over a mesh of processes: replicas, shards, split layers and stages, each over a dimension of its own.

    Before: a model        After: the same, in parts; with stages a `PipelineModule`
    Refuses: numbers of processes that do not fit each other, layers or heads.

    Options:
        data: replicas, whose gradients are averaged.
        shard: over how many processes each parameter, gradient and state of an optimizer is sharded (FSDP2).
        tensor: over how many the layers of MLPs and of attention are split (as `tensor_parallel`).
        pipeline: in how many stages the model is cut (as `pipeline`).
        dtype: see `fsdp`.
        reshard: see `fsdp`; with stages, units stay gathered for a step.
        unit_size: see `fsdp`.
        budget: see `fsdp`.
        schedule: see `pipeline`; one with a stage for each process.
        microbatches: see `pipeline`.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    dtype: torch.dtype | None = None
    reshard: bool = True
    unit_size: int | None = None
    budget: float = 0.05
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    microbatches: int | None = None

    goal: ClassVar[Goal] = Goal.PARALLEL
    phase: ClassVar[Phase] = Phase.BOTH

    def __post_init__(self) -> None:
        wrong = next((name for name, size in self.sizes.items() if type(size) is not int or size < 1), None)
        if wrong is not None:
            raise UsageError(f"pass 'parallel': {wrong}={self.sizes[wrong]!r}; give a number of processes from 1")
        if self.dtype is not None and (self.pipeline > 1 or not self._averages):
            where = "with stages" if self.pipeline > 1 else "without data or shard"
            raise UsageError(
                f"pass 'parallel': dtype={self.dtype} does not work {where}; list autocast before it instead"
            )
        # What is computed in another dtype is held to the budget; stages are not called to be compared.
        object.__setattr__(self, "numerics", Numerics.REASSOCIATED if self.dtype is None else Numerics.APPROXIMATE)
        object.__setattr__(self, "trains_by_call", self.pipeline == 1)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the dimensions of the mesh, the outermost first: neighbours send each other most."""
        return {"pipeline": self.pipeline, "data": self.data, "shard": self.shard, "tensor": self.tensor}

    def rows(self, rank: int, size: int) -> tuple[int, int]:
        return rank // self.tensor % (self.data * self.shard), self.data * self.shard

    def check(self, model: nn.Module) -> None:
        needed = math.prod(self.sizes.values())
        require_process_group(self.name, needed)
        world = distributed.get_world_size()
        if needed != world:
            sizes = " x ".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1)
            raise UsageError(
                f"pass 'parallel': {sizes or 'no size at all'} makes {needed} processes, and there are {world}; give "
                f"sizes whose product is {world}, or run {launch_command(needed)}"
            )
        device_type(model, self.name)
        if self._averages:
            self._sharding.check(model)
        if self.pipeline > 1:
            self._stages.check_for(model, self.pipeline)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        data, details = dict[str, Any](), list[str]()
        if self.tensor > 1:
            data["blocks"] = yield from self._blocks(program)
            words = sum("embeddings" in block for block in data["blocks"])
            count = f"{len(data['blocks']) - words} blocks" + f" and {words} vocabulary" * bool(words)
            details.append(f"{count} split over {self.tensor}")
        if self._averages:
            found = yield from _sites(self._sharding.find(program))
            data["units"] = [site.data["modules"] for site in found]
            parts = {"replicas": self.data, "shards": self.shard}
            several = " of ".join(f"{count} {kind}" for kind, count in parts.items() if count > 1)
            details.append(f"{len(found)} units in {several}")
        if self.pipeline > 1:
            (cut,) = yield from _sites(self._stages.find(program))
            data["routes"] = cut.data["routes"]
            details.append(cut.detail)
        yield Site(program, "", {}, data=data, detail="; ".join(details))

    def _blocks(self, program: Program) -> Generator[Refusal, None, list[dict[str, Any]]]:
        """Return the layers to split; UsageError where there are none."""
        for name, module in program.names.modules.items():
            if isinstance(module, SyncBatchNorm):
                raise UsageError(
                    f"pass 'parallel': '{name}' would count each row {self.tensor} times; leave tensor out"
                )
        blocks, refusals = blocks_in(program, self.tensor, must_divide=True)
        if self.pipeline > 1:  # each process has the tensors of its stages only
            order = "with stages, outputs stay in their order, and it computes several parts"
            refusals += [Refusal(order, at=block.columns[0]) for block in blocks if block.sections]
            blocks = [block for block in blocks if not block.sections]
        yield from refusals
        if not blocks:
            reasons = "".join(f"; '{refusal.at}': {refusal.reason}" for refusal in refusals[:2])
            raise UsageError(
                f"pass 'parallel': tensor={self.tensor}, and no layers can be split; leave tensor out{reasons}"
            )
        data, taken = [block.data() for block in blocks], {name for block in blocks for name in block.layers}
        if self.pipeline == 1:  # an embedding and its head are in different stages
            for found in vocabularies_in(program, self.tensor, taken, even=self._averages):
                if isinstance(found, Refusal):
                    yield found
                else:
                    data.append(found)
        return data

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh

        (site,) = sites
        if not site.data:  # one process
            return model
        require_same_weights(model, self.name)
        kind, sizes = device_type(model, self.name), self.sizes
        mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        prepare(model, site.data.get("blocks", ()), self.tensor)
        if self.pipeline == 1:
            units = [[model.get_submodule(name) for name in names] for names in site.data.get("units", ())]
            self._divide(Program(model), site.data, mesh, model, units)
            return model
        staged = self._stages.cut(model, site.data["routes"], Line.of(mesh["pipeline"]))
        called, data = staged.called, site.data
        named = [[submodule(model, name) for name in names if name] for names in data.get("units", ())]
        here = [[module for module in unit if module is not None and module in called] for unit in named]
        staged.divide_stage(
            lambda stage: self._divide(Program(model), data, mesh, stage, [*filter(None, here), [stage]])
        )
        return staged

    def _divide(
        self,
        program: Program,
        data: Mapping[str, Any],
        mesh: DeviceMesh,
        root: nn.Module,
        units: Sequence[list[nn.Module]],
    ) -> None:
        """Split layers, then shard what that leaves to each process; `root` runs all that is left of the model."""
        if "blocks" in data:
            around = () if root is program.model else (root,)
            TensorParallel().split(program, data["blocks"], mesh["tensor"], around)
        if "units" in data:
            self._sharding.shard(root, units, mesh["data", "shard"] if self.data > 1 else mesh["shard"])

    @property
    def _averages(self) -> bool:
        return self.data * self.shard > 1

    @property
    def _sharding(self) -> Fsdp:
        # Each microbatch would gather its units again.
        return Fsdp(self.dtype, self.reshard and self.pipeline == 1, self.unit_size, self.budget)

    @property
    def _stages(self) -> Pipeline:
        return Pipeline(self.pipeline, self.schedule, self.microbatches or 2 * self.pipeline)


def _sites(found: Iterable[Site | Refusal]) -> Generator[Refusal, None, list[Site]]:
    """Return the sites among what a pass found, and yield the refusals."""
    sites = list[Site]()
    for each in found:
        if isinstance(each, Refusal):
            yield each
        else:
            sites.append(each)
    return sites
