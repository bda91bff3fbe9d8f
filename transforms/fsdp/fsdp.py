"""Shard parameters, gradients and optimizer states over the processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from ...compat import modules_by_name
from ...errors import UsageError
from ...layers.distributed import BATCH_NORMS
from ...passes.contract import Pass, device_type, mesh_of_same_weights, require_process_group
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...tracing.program import Program
from .find import Units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Fsdp"]


@dataclass(frozen=True)
class Fsdp(Pass):
    """Shard parameters, gradients and optimizer states over the processes (FSDP2), gathered unit by unit as they run.

    Before: every process has all parameters        After: every process has its share of each
    Refuses: modules that are never called, whose tensors are tied or read elsewhere; a unit around them has those.

    Options:
        dtype: in which parameters are gathered and computed with; they are kept, and gradients added up, in their own.
        reshard: free the parameters of a unit after its forward, and gather them again for its backward.
        unit_size: parameters that a unit should have at the most; larger blocks are opened, smaller ones joined.
        budget: the error that `dtype` may make, relative to the scale.
    """

    dtype: torch.dtype | None = None
    reshard: bool = True
    unit_size: int | None = None
    budget: float = 0.05

    goal: ClassVar[Goal] = Goal.PARALLEL
    averages: ClassVar[bool] = True
    phase: ClassVar[Phase] = Phase.BOTH

    def __post_init__(self) -> None:
        # What is computed in another dtype is held to the budget.
        object.__setattr__(self, "numerics", Numerics.REASSOCIATED if self.dtype is None else Numerics.APPROXIMATE)

    def check(self, model: nn.Module) -> None:
        require_process_group(self.name)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise UsageError(f"pass 'fsdp': dtype={self.dtype}; give one with a floating point, such as bfloat16")
        if self.unit_size is not None and self.unit_size < 1:
            raise UsageError(f"pass 'fsdp': unit_size={self.unit_size}; give a number of parameters, such as 10000000")
        device_type(model, self.name)
        check_parameters(model)
        if self.dtype is not None:
            check_batch_norms(model, self.dtype)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        search = Units(program, self.unit_size)
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

    def shard(self, root: nn.Module, units: Sequence[list[nn.Module]], mesh: DeviceMesh) -> None:
        """Let FSDP2 gather each unit by itself; the root is the last. A mesh of two dimensions replicates, too."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        inside = MixedPrecisionPolicy(self.dtype, reduce_dtype=torch.float32 if self.dtype else None)
        own = next((parameter.dtype for parameter in root.parameters()), None)
        around = MixedPrecisionPolicy(
            self.dtype, reduce_dtype=inside.reduce_dtype, output_dtype=own if self.dtype else None
        )
        for modules in units:
            is_root = modules == [root]
            # What the root has left is needed again at once for the backward: FSDP2 keeps it, unless told otherwise.
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                mp_policy=around if is_root else inside,
                reshard_after_forward=None if is_root and self.reshard else self.reshard,
            )


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
                f"use autocast{{dtype={word}}} before fsdp instead of its dtype"
            )
