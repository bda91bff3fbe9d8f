"""Shard parameters, gradients and optimizer states over the processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ...errors import UsageError
from ...passes.contract import Pass, device_type, mesh_of_same_weights, require_process_group
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...tracing.program import Program
from .checks import check_batch_norms, check_parameters
from .units import Units

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
        """Refuse a process without a group, and parameters that FSDP2 cannot shard."""
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
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = mesh_of_same_weights(model, self.name)
        inside = MixedPrecisionPolicy(self.dtype, reduce_dtype=torch.float32 if self.dtype else None)
        own = next((parameter.dtype for parameter in model.parameters()), None)
        around = MixedPrecisionPolicy(
            self.dtype, reduce_dtype=inside.reduce_dtype, output_dtype=own if self.dtype else None
        )
        for site in sites:
            modules = [model.get_submodule(name) for name in site.data["modules"]]
            is_root = modules == [model]
            # What the root has left is needed again at once for the backward: FSDP2 keeps it, unless told otherwise.
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                mp_policy=around if is_root else inside,
                reshard_after_forward=None if is_root and self.reshard else self.reshard,
            )
        return model
