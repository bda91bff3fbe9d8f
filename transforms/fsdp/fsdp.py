"""Shard parameters, gradients and optimizer states over the processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from torch import distributed, nn

from ...compat import modules_by_name
from ...errors import UsageError
from ...layers.distributed import BATCH_NORMS
from ...passes.contract import Pass, device_type, mesh_of_same_weights, require_process_group
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...tracing.program import Program
from .find import Units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

__all__ = ["Fsdp"]


@dataclass(frozen=True)
class Fsdp(Pass):
    """Shard parameters, gradients and optimizer states over the processes (FSDP2), gathered unit by unit as they run.

    Before: every process has all parameters        After: every process has its share of each
    Refuses: modules that are never called, whose tensors are tied or read elsewhere; a unit around them has those.

    Options:
        param_dtype: in which parameters are gathered and computed with; they are kept in their own.
        reduce_dtype: in which gradients are averaged; None: float32 where `param_dtype` is given, else their own.
        reshard_after_forward: free the parameters of a unit after its forward, and gather them again for its backward;
            a number: keep them in parts, among so many processes.
        offload_policy: `cpu` keeps parameters, gradients and what the optimizer has on the CPU.
        forward_prefetch: how many units ahead are gathered in the forward; 0 leaves it to FSDP2.
        backward_prefetch: the same in the backward; FSDP2 gathers one ahead.
        unit_size: parameters that a unit should have at the most; larger blocks are opened, smaller ones joined.
        budget: the error that narrower dtypes may make, relative to the scale.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool | int = True
    offload_policy: Literal["cpu"] | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    unit_size: int | None = None
    budget: float = 0.05

    goal: ClassVar[Goal] = Goal.PARALLEL
    averages: ClassVar[bool] = True
    phase: ClassVar[Phase] = Phase.BOTH

    def __post_init__(self) -> None:
        # What is computed in another dtype is held to the budget.
        object.__setattr__(self, "numerics", Numerics.APPROXIMATE if self._narrows else Numerics.REASSOCIATED)

    @property
    def _narrows(self) -> bool:
        return self.param_dtype is not None or self.reduce_dtype is not None

    def check(self, model: nn.Module) -> None:
        require_process_group(self.name)
        self.check_for(model, distributed.get_world_size())

    def check_for(self, model: nn.Module, shards: int) -> None:
        """Raise UsageError for options that are out of range, and for a model that so many processes cannot share."""
        self._check_options(shards)
        kind = device_type(model, self.name)
        if self.offload_policy is not None and kind == "cpu":
            raise UsageError(
                "pass 'fsdp': offload_policy=cpu is for models on GPUs, and this one is on the CPU; leave it out"
            )
        check_parameters(model)
        if self.param_dtype is not None:
            check_batch_norms(model, self.param_dtype)

    def _check_options(self, shards: int) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype: torch.dtype | None = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise UsageError(f"pass 'fsdp': {name}={dtype}; give one with a floating point, such as bfloat16")
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise UsageError(f"pass 'fsdp': {name}={getattr(self, name)}; give a number of units, such as 1")
        if self.unit_size is not None and self.unit_size < 1:
            raise UsageError(f"pass 'fsdp': unit_size={self.unit_size}; give a number of parameters, such as 10000000")
        parts = self.reshard_after_forward
        if not isinstance(parts, bool) and not (1 < parts < shards and shards % parts == 0):
            raise UsageError(
                f"pass 'fsdp': reshard_after_forward={parts}; give true, false, or a number of processes that divides "
                f"the {shards} that share a parameter"
            )

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield from self.find_beside(program, ())

    def find_beside(self, program: Program, kept: Iterable[str]) -> Iterator[Site | Refusal]:
        """Find the units of a model of which some parameters, by name, are not sharded."""
        search = Units(program, self.unit_size, frozenset(kept))
        for unit in search.find():
            names = list(unit.modules)
            modules = f"{len(names)} modules, " if len(names) > 1 else ""
            detail = f"{modules}{unit.size} parameters"
            yield Site(program, names[0], {}, detail=detail, data={"modules": names})
        yield from search.refusals

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        units = [[model.get_submodule(name) for name in site.data["modules"]] for site in sites]
        self.shard(model, units, mesh_of_same_weights(model, self.name))
        return model

    def shard(
        self, root: nn.Module, units: Sequence[list[nn.Module]], mesh: DeviceMesh, kept: Iterable[nn.Parameter] = ()
    ) -> None:
        """Let FSDP2 gather each unit by itself, but for what is `kept` as it is; the root is the last. A mesh of two
        dimensions replicates, too.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        wide = torch.float32 if self.param_dtype is not None else None
        inside = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype or wide)
        own = next((parameter.dtype for parameter in root.parameters()), None)
        around = replace(inside, output_dtype=own if self.param_dtype is not None else None)
        for modules in units:
            is_root = modules == [root]
            # What the root has left is needed again at once for the backward: FSDP2 keeps it, unless told otherwise.
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                mp_policy=around if is_root else inside,
                offload_policy=OffloadPolicy() if self.offload_policy is None else CPUOffloadPolicy(),
                reshard_after_forward=None
                if is_root and self.reshard_after_forward is True
                else self.reshard_after_forward,
                ignored_params=set(kept),
            )
        self._prefetch([cast("FSDPModule", modules[0]) for modules in units if modules != [root]])

    def _prefetch(self, units: Sequence[FSDPModule]) -> None:
        """Say which units are gathered while another runs; `units`: one module of each, in the order of their runs."""
        for number, unit in enumerate(units):
            if self.forward_prefetch:
                unit.set_modules_to_forward_prefetch(list(units[number + 1 : number + 1 + self.forward_prefetch]))
            if self.backward_prefetch:
                earlier = units[max(0, number - self.backward_prefetch) : number]
                unit.set_modules_to_backward_prefetch(list(reversed(earlier)))


def check_parameters(model: nn.Module) -> None:
    """Raise UsageError for parameters that FSDP2 does not take: scalars, not contiguous, of several dtypes."""
    first: tuple[str, torch.dtype] | None = None
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise UsageError(f"pass 'fsdp': '{name}' is a scalar; make it a tensor of one element to shard it")
        if not parameter.is_contiguous():
            step = "call model.to(memory_format=torch.contiguous_format) before"
            raise UsageError(f"pass 'fsdp': '{name}' is not contiguous, and FSDP2 shards only what is; {step}")
        if not parameter.requires_grad:
            continue
        first = first or (name, parameter.dtype)
        if parameter.dtype != first[1]:
            differ = f"'{first[0]}' is {first[1]} and '{name}' {parameter.dtype}"
            raise UsageError(f"pass 'fsdp': {differ}; bring all that is trained to one dtype")


def check_batch_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise UsageError for a batch norm, computed in a dtype that is not its statistics'."""
    for name, module in modules_by_name(model).items():
        if isinstance(module, BATCH_NORMS):
            word = str(dtype).removeprefix("torch.")
            raise UsageError(
                f"pass 'fsdp': '{name}' keeps its statistics in float32, and takes no others; "
                f"use autocast{{dtype={word}}} before fsdp instead of param_dtype"
            )
