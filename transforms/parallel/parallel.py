"""Several parallelisms at once: the passes for each, over one mesh of processes."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, distributed, nn

from ...compat import submodule
from ...errors import UsageError
from ...layers.distributed import Layout, SyncBatchNorm
from ...passes.contract import Pass, device_type, launch_command, require_process_group, require_same_weights
from ...passes.sites import Goal, Phase, Refusal, Site
from ...tracing.program import Program
from ..fsdp import Fsdp
from ..pipeline import Line, Pipeline
from ..tensor_parallel import TensorParallel, blocks_in, prepare, vocabularies_in
from .experts import deal_experts, mixtures_in
from .members import ensembles_in, split_ensembles

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
        tensor: over how many the layers of MLPs and of attention are split (as `tensor_parallel`), and
            experts and members of fused ensembles dealt.
        pipeline: in how many stages the model is cut (as `pipeline`).
        experts: deal the experts of mixtures to the processes of `shard`, and send tokens to them (all-to-all).
        param_dtype: see `fsdp`.
        reduce_dtype: see `fsdp`.
        reshard_after_forward: see `fsdp`; with stages, units stay gathered for a step.
        offload_policy: see `fsdp`.
        forward_prefetch: see `fsdp`.
        backward_prefetch: see `fsdp`.
        unit_size: see `fsdp`.
        budget: see `fsdp`.
        schedule: see `pipeline`; one with a stage for each process.
        microbatches: see `pipeline`.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    experts: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool | int = True
    offload_policy: Literal["cpu"] | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0
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
        if self.param_dtype is not None and (self.pipeline > 1 or not self._averages):
            where = "with stages" if self.pipeline > 1 else "without data or shard"
            raise UsageError(
                f"pass 'parallel': param_dtype={self.param_dtype} does not work {where}; list autocast before it"
            )
        if self.experts is True and (self.shard == 1 or self.param_dtype is not None):
            why = "shard=1: give the number of processes" if self.shard == 1 else "param_dtype: list autocast before it"
            raise UsageError(f"pass 'parallel': experts=true does not work with {why}")
        # What is computed in another dtype is held to the budget; stages are not called to be compared.
        object.__setattr__(self, "numerics", self._sharding.numerics)
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
                f"pass 'parallel': {sizes or 'no size at all'} makes {needed} process{'es' * (needed > 1)}, and there "
                f"are {world}; give sizes whose product is {world}, or run {launch_command(needed)}"
            )
        device_type(model, self.name)
        if self._averages:
            self._sharding.check_for(model, self.shard)
        if self.pipeline > 1:
            self._stages.check_for(model, self.pipeline)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        data, details = dict[str, Any](), list[str]()
        mixtures, whole = self._mixtures(program)
        yield from whole
        if mixtures:
            data["mixtures"] = mixtures
            details.append(f"experts of {len(mixtures)} mixtures dealt to {self._dealt}")
        if self.tensor > 1:
            data |= yield from self._divided(program, whole, must_find=not mixtures)
            words = sum("embeddings" in block for block in data["blocks"])
            blocks, ensembles = len(data["blocks"]) - words, len(data["ensembles"])
            split = {"blocks": blocks, "vocabulary": words, "fused ensembles": ensembles}
            counts = " and ".join(f"{count} {what}" for what, count in split.items() if count)
            details += [f"{counts} split over {self.tensor}"] if counts else []
        if self._averages:
            kept = [name for each in mixtures if self.experts for name in each["tensors"]]
            found = yield from _sites(self._sharding.find_beside(program, kept))
            data["units"] = [site.data["modules"] for site in found]
            parts = {"replicas": self.data, "shards": self.shard}
            several = " of ".join(f"{count} {kind}" for kind, count in parts.items() if count > 1)
            details.append(f"{len(found)} units in {several}")
        if self.pipeline > 1:
            (cut,) = yield from _sites(self._stages.find(program))
            data["routes"] = cut.data["routes"]
            details.append(cut.detail)
        yield Site(program, "", {}, data=data, detail="; ".join(details))

    @property
    def _dealt(self) -> int:
        """Return to how many processes experts are dealt."""
        return self.tensor * (self.shard if self.experts else 1)

    def _mixtures(self, program: Program) -> tuple[list[dict[str, Any]], list[Refusal]]:
        """Return the mixtures whose experts are dealt, and those that stay whole; UsageError where they are asked for
        and there are none.
        """
        if self._dealt == 1:
            return [], []
        mixtures, refusals = mixtures_in(program, self._dealt)
        if self.experts and refusals:
            raise UsageError(f"pass 'parallel': '{refusals[0].at}': {refusals[0].reason}; leave experts out")
        if self.experts and not mixtures:
            raise UsageError(
                "pass 'parallel': experts=true, and the model has no experts that fuse_experts computes together; list "
                "fuse_experts{lowering=loop} before it (listed alone, it says why it refuses), or leave experts out"
            )
        return mixtures, refusals

    def _divided(
        self, program: Program, whole: Sequence[Refusal], *, must_find: bool
    ) -> Generator[Refusal, None, dict[str, Any]]:
        """Return the layers and ensembles to split over `tensor`; UsageError where there are none."""
        for name, module in program.names.modules.items():
            if isinstance(module, SyncBatchNorm):
                raise UsageError(
                    f"pass 'parallel': '{name}' would count each row {self.tensor} times; leave tensor out"
                )
        blocks, refusals = blocks_in(program, self.tensor, must_divide=True)
        layers, taken = [block.data() for block in blocks], {name for block in blocks for name in block.layers}
        for found in vocabularies_in(program, self.tensor, taken, even=self._averages):
            if isinstance(found, Refusal):
                refusals.append(found)
            else:
                layers.append(found)
        ensembles, left = ensembles_in(program, self.tensor)
        if self.pipeline > 1:
            layers, more = _split_in_stages(layers, ensembles)
            ensembles, left = [], [*left, *more]
        refusals += left
        yield from refusals
        if must_find and not (layers or ensembles):
            reasons = "".join(f"; '{refusal.at}': {refusal.reason}" for refusal in [*whole, *refusals][:2])
            raise UsageError(
                f"pass 'parallel': tensor={self.tensor}, and no layers can be split; leave tensor out{reasons}"
            )
        return {"blocks": layers, "ensembles": ensembles}

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh

        (site,) = sites
        if not site.data:  # one process
            return model
        require_same_weights(model, self.name)
        kind, sizes = device_type(model, self.name), self.sizes
        mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if "blocks" in site.data:
            prepare(model, site.data["blocks"], mesh["tensor"])
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
        around = () if root is program.model else (root,)
        mixtures = data.get("mixtures", ())
        dealt = deal_experts(program, mixtures, self._layout(mesh), self._exchanging(mesh), around) if mixtures else []
        if data.get("ensembles"):
            split_ensembles(program, data["ensembles"], mesh["tensor"], _by_tensor(mesh))
        if "blocks" in data:
            TensorParallel().split(program, data["blocks"], mesh["tensor"], around)
        if "units" in data:
            self._sharding.shard(root, units, self._averaging(mesh), dealt if self.experts else ())

    def _averaging(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh["data", "shard"] if self.data > 1 else mesh["shard"]

    def _exchanging(self, mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        """Return the processes that send each other tokens, and those with the same ones, that experts are dealt to."""
        return mesh["shard"] if self.experts else None, mesh["tensor"] if self.tensor > 1 else None

    def _layout(self, mesh: DeviceMesh) -> Layout:
        """Return how experts are dealt: over `tensor` alone, and FSDP2 shards the parts, or over `shard`, too."""
        from torch.distributed.tensor import Replicate, Shard

        if not self.experts:
            return _by_tensor(mesh)
        split = {"shard": Shard(0), "tensor": Shard(0), "data": Replicate()}
        names = [name for name in ("data", "shard", "tensor") if name == "shard" or self.sizes[name] > 1]
        replicas = mesh["data"].get_group() if self.data > 1 else None

        def average(gradient: Tensor) -> Tensor:
            mean = gradient / (self.data * self.shard)  # of tokens of all senders, which each averages over its own
            if replicas is not None:
                distributed.all_reduce(mean, group=replicas)
            return mean

        return Layout(mesh[tuple(names)], tuple(split[name] for name in names), average)

    @property
    def _averages(self) -> bool:
        return self.data * self.shard > 1

    @property
    def _sharding(self) -> Fsdp:
        # Each microbatch would gather its units again.
        reshard = self.reshard_after_forward if self.pipeline == 1 else False
        same = ("param_dtype", "reduce_dtype", "offload_policy", "forward_prefetch", "backward_prefetch")
        options = {name: getattr(self, name) for name in (*same, "unit_size", "budget")}
        return Fsdp(reshard_after_forward=reshard, **options)

    @property
    def _stages(self) -> Pipeline:
        return Pipeline(self.pipeline, self.schedule, self.microbatches or 2 * self.pipeline)


def _split_in_stages(
    layers: Sequence[dict[str, Any]], ensembles: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """Return the layers that are split where each process has the tensors of its stages only, and what stays whole."""
    split, refusals = list[dict[str, Any]](), list[Refusal]()
    for each in layers:
        if "embeddings" in each:
            reason = "with stages, a vocabulary stays whole: its embedding and its head are in different ones"
            refusals.append(Refusal(reason, at=each["embeddings"][0]))
        elif "sections" in each:
            reason = "with stages, outputs stay in their order, and it computes several parts"
            refusals.append(Refusal(reason, at=each["columns"][0]))
        else:
            split.append(each)
    reason = "with stages, each process computes all members of an ensemble"
    return split, [*refusals, *(Refusal(reason, at=each["owner"] or "(root)") for each in ensembles)]


def _by_tensor(mesh: DeviceMesh) -> Layout:
    """Return how what is stacked is dealt to processes that have the same rows."""
    from torch.distributed.tensor import Shard

    return Layout(mesh["tensor"], (Shard(0),))


def _sites(found: Iterable[Site | Refusal]) -> Generator[Refusal, None, list[Site]]:
    """Return the sites among what a pass found, and yield the refusals."""
    sites = list[Site]()
    for each in found:
        if isinstance(each, Refusal):
            yield each
        else:
            sites.append(each)
    return sites
