"""Let batch norms use the statistics of the batches of all processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..layers.distributed import SYNCHRONIZED, SyncBatchNorm
from ..passes.contract import Pass, missing_process_group
from ..passes.rewriting import Edit
from ..passes.sites import Goal, Numerics, Phase, Refusal, Site
from ..runtime.values import in_class, user_class
from ..tracing.program import Program

__all__ = ["SyncBatchnorm"]

_COMPUTING = ("forward", "_check_input_dim", "__call__", "__getattr__")


@dataclass(frozen=True)
class SyncBatchnorm(Pass):
    """Let batch norms use the statistics of the batches of all processes, in training.

    Before: self.bn = BatchNorm2d(64)        After: self.bn = SyncBatchNorm2d(64)
    Refuses: a batch norm that is frozen (in evaluation mode while the model trains), has hooks, or has a forward of its
        own; everything where there is no process group.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.PARALLEL
    phase: ClassVar[Phase] = Phase.TRAIN

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for module in program.names.distinct:
            if isinstance(module, tuple(SYNCHRONIZED)) and not isinstance(module, SyncBatchNorm):
                name, reason = program.names.name(module), _reason_against(module, program)
                yield Site(program, name, {}) if reason is None else Refusal(reason, name or "(root)")

    def rewrite(self, site: Site, edit: Edit) -> None:
        old = site.program.module(site.owner)
        edit.replace_module("", in_class(old, SYNCHRONIZED[_kind(old)]))


def _reason_against(module: nn.Module, program: Program) -> str | None:
    missing = missing_process_group("sync_batchnorm")
    if missing:
        return missing  # not an error: in one process the model is right as it is
    cls = user_class(type(module))
    if not all(getattr(cls, name, None) is getattr(_kind(module), name, None) for name in _COMPUTING):
        return f"it is a {cls.__name__}, which has a forward of its own"
    if type(module) is not cls:
        return "it is part of something fused; list sync_batchnorm before the pass that fused it"
    if program.training and not module.training:
        return "it is frozen: in evaluation mode, while the model trains"
    return None


def _kind(module: nn.Module) -> type[nn.Module]:
    return next(kind for kind in SYNCHRONIZED if isinstance(module, kind))
