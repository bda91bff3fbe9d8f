"""The pass: a replica of the model in each process, gradients averaged while they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ...compat import modules_by_name
from ...errors import UsageError
from ...layers.replica import REPLICA, Replica, replicate
from ...passes.contract import Pass, require_process_group
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...runtime.values import is_sharded
from ...tracing.program import Program
from .find import TrialStep, branching, run_trial_step

__all__ = ["Ddp"]


@dataclass(frozen=True)
class Ddp(Pass):
    """Train a replica of the model in each process: gradients are averaged over all of them, during the backward.

    Before: a model        After: the same, with hooks that average gradients and broadcast buffers
    Refuses: parameters that no gradient reaches in the example calls; these stay as they are.

    Options:
        find_unused_parameters: look at every forward which parameters it used. None: where the graphs say that another
            forward may use others.
        bucket_cap_mb: how many MiB of gradients are sent in one message; None: as torch has it.
    """

    find_unused_parameters: bool | None = None
    bucket_cap_mb: float | None = None

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.PARALLEL
    averages: ClassVar[bool] = True
    phase: ClassVar[Phase] = Phase.TRAIN

    def check(self, model: nn.Module) -> None:
        require_process_group(self.name)
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise UsageError(f"pass 'ddp': bucket_cap_mb={self.bucket_cap_mb!r}; give a number of MiB, such as 25")
        if REPLICA in vars(model):
            raise UsageError("pass 'ddp': the model is replicated already; give the one that ddp was not run on")
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise UsageError("pass 'ddp': the model has no parameter that requires a gradient; leave ddp out")
        for name, parameter in trained.items():
            if parameter.is_meta:
                raise UsageError(f"pass 'ddp': '{name}' is on the meta device; give it memory first (model.to_empty)")
        for name, module in modules_by_name(model).items():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise UsageError(f"pass 'ddp': '{name}' has sparse gradients; make it with sparse=False")

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        seen = run_trial_step(program)
        around = branching(program)
        search = around is not None if self.find_unused_parameters is None else self.find_unused_parameters
        yield from _unused(seen)
        what = f"parameters searched at every forward: '{around}' may use others" if search and around else ""
        yield Site(program, "", {}, data={"search": search, "buffers": seen.written}, detail=what)

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        sharded = next((name for name, parameter in named if is_sharded(parameter)), None)
        if sharded is not None:
            raise UsageError(f"pass 'ddp': '{sharded}' is sharded, and its gradients with it; leave ddp out")
        state = [*model.parameters(), *model.buffers()]
        (site,) = sites
        buffers = [model.get_buffer(name) for name in site.data["buffers"]]
        search = site.data["search"]
        replicate(model, Replica(named, state, buffers, search=search, bucket_cap_mb=self.bucket_cap_mb))
        return model


def _unused(seen: TrialStep) -> Iterator[Refusal]:
    """Yield one refusal for each module that has parameters without a gradient, and for each call that showed none."""
    for reason in seen.failed:
        yield Refusal(f"{reason}; so all parameters count as used, and all buffers are sent", "(root)")
    reason = "no gradient reaches its parameters in the example calls, so there is none to average"
    for owner in dict.fromkeys(name.rpartition(".")[0] or "(root)" for name in seen.unused):
        yield Refusal(reason, owner)
