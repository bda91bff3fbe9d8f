"""The pass: a replica of the model in each process, gradients averaged while they are computed."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, fx, nn

from ...compat import modules_by_name
from ...errors import UsageError, one_line
from ...layers.distributed import REPLICA, Replica, SyncBatchNorm, replicate
from ...operators import operator_info, reached
from ...passes.contract import Pass, require_process_group
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...runtime.graphs import Specialization
from ...runtime.guards import require
from ...runtime.values import is_sharded, tensors_in
from ...tracing.examples import Inputs
from ...tracing.isolation import in_phase, preserved
from ...tracing.program import Program, is_on_meta
from ...tracing.recording import copy_inputs

__all__ = ["Ddp", "TrialStep", "branching", "run_trial_step"]


@dataclass(frozen=True)
class TrialStep:
    """What was seen in the example calls."""

    unused: tuple[str, ...]  # the names of trained parameters that no gradient reaches
    written: tuple[str, ...]  # the names of buffers that differ between processes after a forward in training
    failed: tuple[str, ...] = ()  # why calls said nothing: all counts as used and written then


def run_trial_step(program: Program) -> TrialStep:
    """Run the example calls forward and backward; without any, all buffers count as written, and nothing as unused."""
    model = program.model
    # Synchronized batch norms have the same buffers in all processes.
    shared = {id(b) for module in model.modules() if isinstance(module, SyncBatchNorm) for b in module.buffers()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in shared}
    if not program.whole_calls or is_on_meta(model):
        return TrialStep((), tuple(buffers))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    used, written, failed = set[str](), set[str](), list[str]()
    for number, inputs in enumerate(program.whole_calls):
        try:
            reached, changed = _step(model, inputs, trained)
        except Exception as error:  # an example for evaluation need not do for training: one row and a batch norm, say
            reached, changed = set(trained), set(buffers)
            failed.append(f"example call {number} raised {type(error).__name__} in training: {one_line(error)}")
        used |= reached
        written |= changed
    unused = tuple(name for name in trained if name not in used)
    return TrialStep(unused, tuple(name for name in buffers if name in written), tuple(failed))


def _step(model: nn.Module, inputs: Inputs, trained: Mapping[str, nn.Parameter]) -> tuple[set[str], set[str]]:
    """Return the names of the parameters that one call sends gradients to, and of the buffers that it writes."""
    given = copy_inputs(inputs)
    with preserved(model), in_phase(model, training=True), torch.enable_grad():
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        sums = [t.abs().sum().double() for t in tensors_in(model(*given.args, **given.kwargs)) if t.requires_grad]
        now = dict(model.named_buffers())
        written = {name for name, old in before.items() if name not in now or not torch.equal(now[name], old)}
        if not sums or not trained:
            return set(), written
        found = torch.autograd.grad(torch.stack(sums).sum(), list(trained.values()), allow_unused=True)
    gradients = zip(trained, cast("tuple[Tensor | None, ...]", found), strict=True)
    return {name for name, gradient in gradients if gradient is not None}, written


def branching(program: Program) -> str | None:
    """Return a module that may use other parameters in another step: its graphs for training differ, or draw."""
    for name in program.opaque:  # of which nothing is known, save that they use their own parameters
        children = program.module(name).children()
        if any(parameter.requires_grad for child in children for parameter in child.parameters()):
            return name or "(root)"
    for name, capture in program.captures.items():
        module = program.module(name)
        training = [s for s in capture.specializations if not s.runs_in_mode(module, flipped=module.training)]
        nodes = [[node for node in s.graph.nodes if node.op in ("call_module", "get_attr")] for s in training]
        used = {frozenset(str(node.target) for node in each) for each in nodes}
        if len(used) > 1 or any(map(_decides_at_random, training)):
            return name or "(root)"
    return None


def _decides_at_random(specialization: Specialization) -> bool:
    decided = (node.args[0] for node in specialization.graph.nodes if node.target is require)
    return any(isinstance(value, fx.Node) and _is_drawn(value) for value in decided)


def _is_drawn(decided: fx.Node) -> bool:
    """Say whether a decision hangs on a number that is drawn; none is less than 0, the share of layers to drop."""

    def computed_from(node: fx.Node) -> Sequence[fx.Node]:
        return () if node.target is operator.lt and node.args[1] == 0 else node.all_input_nodes

    starts = (node for node in reached([decided], computed_from) if not node.all_input_nodes)
    return any(operator_info(getattr(node.target, "__name__", None)).random for node in starts)


@dataclass(frozen=True)
class Ddp(Pass):
    """Train a replica of the model in each process: gradients are averaged over all of them, during the backward.

    Before: a model        After: the same, with hooks that average gradients and broadcast buffers
    Refuses: parameters that no gradient reaches in the example calls; these stay as they are.

    Options:
        find_unused_parameters: look at every forward which parameters it used. None: where the graphs say that another
            forward may use others.
        bucket_cap_mb: how many MiB of gradients are sent in one message; None: as torch has it.
        local_after: after so many synchronized steps each process trains alone; something else averages parameters.
        delayed: each step takes the averages of the step before, which are sent while the next batch is computed.
    """

    find_unused_parameters: bool | None = None
    bucket_cap_mb: float | None = None
    local_after: int | None = None
    delayed: bool = False

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.PARALLEL
    averages: ClassVar[bool] = True
    phase: ClassVar[Phase] = Phase.TRAIN

    def check(self, model: nn.Module) -> None:
        require_process_group(self.name)
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise UsageError(f"pass 'ddp': bucket_cap_mb={self.bucket_cap_mb!r}; give a number of MiB, such as 25")
        if self.local_after is not None and self.local_after < 1:
            raise UsageError(f"pass 'ddp': local_after={self.local_after}; give a number of steps, 1 at the least")
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
        if search and self.delayed:
            raise UsageError(
                f"pass 'ddp': delayed=true needs the same parameters in each step, and '{around or '(root)'}' may use "
                "others; leave delayed out"
            )
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
        replica = Replica(
            named, state, buffers, search=site.data["search"], bucket_cap_mb=self.bucket_cap_mb,
            local_after=self.local_after, delayed=self.delayed,
        )  # fmt: skip
        replicate(model, replica)
        return model


def _unused(seen: TrialStep) -> Iterator[Refusal]:
    """Yield one refusal for each module that has parameters without a gradient, and for each call that showed none."""
    for reason in seen.failed:
        yield Refusal(f"{reason}; so all parameters count as used, and all buffers are sent", "(root)")
    reason = "no gradient reaches its parameters in the example calls, so there is none to average"
    for owner in dict.fromkeys(name.rpartition(".")[0] or "(root)" for name in seen.unused):
        yield Refusal(reason, owner)
