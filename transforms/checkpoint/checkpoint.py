"""The pass: regions of a model whose activations are computed again for the backward, as a budget of memory asks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...compat import all_modules
from ...errors import BudgetError, UsageError
from ...passes.contract import Pass
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...runtime.graphs import WrappedRegion
from ...storage import allowed_bytes, byte_text
from ...tracing.program import Program
from .find import Choice, Choices, Stretch, choices
from .recomputation import Recomputation, counts

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class Checkpoint(Pass):
    """Compute activations again in the backward pass instead of keeping them, as far as a budget of memory asks.

    Before: h = block(x)        After: h = checkpoint(block, x)
    Refuses: a model in evaluation; what cannot run twice: modules with hooks, modules without a graph, nodes that write
    into memory that is read elsewhere or draw random numbers from outside of torch.

    Gradients are the same bit by bit, dropout included, and running statistics are updated once.

    Options:
        budget: bytes of activations that a training step may hold at once: a share of what the plain model saves (0 is
            as little as possible), or with a unit, such as 2GiB or 512MiB.
    """

    budget: float | str = 0.5

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.MEMORY
    phase: ClassVar[Phase] = Phase.TRAIN
    own_forward: ClassVar[OwnForward | None] = OwnForward.ACCEPTABLE
    profiles_itself: ClassVar[bool] = True  # a region runs the same operations: the whole model, run once, tells

    @classmethod
    def searched(cls, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]] | None:
        return {"budget": (0.75, 0.5, 0.25)} if phase is Phase.TRAIN and Goal.MEMORY in goals else None

    def __post_init__(self) -> None:
        limit_of(self.budget, 0)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        reason = _reason_against(program)
        if reason:
            yield Refusal(reason, at="(root)")
            return
        found = choices(program, lambda saved: limit_of(self.budget, saved))
        choice = self._chosen(found)
        if not choice.stretches:
            says = f"the model saves {byte_text(found.saved)} of activations"
            allowed = found.most >= found.saved
            why = f"which budget={self.budget} allows: nothing has to be computed again"
            yield Refusal(f"{says}, {why if allowed else 'and no region would lower the peak of a step'}", at="(root)")
        for stretch in choice.stretches:
            yield _site(program, stretch)
        if choice.stretches:
            for name, why in found.left_out.items():
                yield Refusal(why, at=name)

    def _chosen(self, found: Choices) -> Choice:
        """Return what the budget asks for; BudgetError says what the least is."""
        least, limit, saved = found.frontier[-1], found.most, found.saved
        choice = least if self.budget == 0 else next((c for c in found.frontier if c.schedule.peak <= limit), None)
        if choice is None:
            peak = least.schedule.peak
            raise BudgetError(
                f"pass 'checkpoint': budget={self.budget} allows {byte_text(limit)} of activations, and the least "
                f"possible is {byte_text(peak)}, {peak / saved:.3f} of the {byte_text(saved)} that the model saves; "
                "give at least that, or 0 for the least"
            )
        return choice

    def check_memory(self, before: int, after: int) -> None:
        limit = limit_of(self.budget, before)
        if self.budget != 0 and after > limit:
            raise BudgetError(
                f"pass 'checkpoint': budget={self.budget} allows {byte_text(limit)} of activations, and the least "
                f"reached is {byte_text(after)}, {after / before:.3f} of the {byte_text(before)} that the model saves; "
                "give at least that"
            )

    def rewrite(self, site: Site, edit: Edit) -> None:
        nodes = [site[label] for label in site.nodes]
        called = [edit.owner.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
        counting = any(counts(inner) for module in called for inner in all_modules(module))
        context = Recomputation(selective=bool(site.data["selective"]), counting=counting)
        edit.outline(nodes, name="checkpointed", context=context)


def _reason_against(program: Program) -> str:
    if not program.training:
        return "it is for training, and the model is in evaluation; call model.train() first, or give phase='train'"
    if not program.inputs:
        return "what the model saves is learned from a run; give example_inputs"
    regions = (module for module in program.names.distinct if isinstance(module, WrappedRegion))
    if any(isinstance(region.context, Recomputation) for region in regions):
        return "it is checkpointed already; for another budget begin with the original (fxopt.restore)"
    return ""


def _site(program: Program, stretch: Stretch) -> Site:
    units, region = stretch.units, stretch.region
    detail = f"{byte_text(stretch.kept)} kept of {byte_text(stretch.saved)}"
    data: dict[str, Any] = {"selective": region.selective}
    nodes = {f"node_{number}": unit.node.name for number, unit in enumerate(units)}
    count = "1 node" if len(units) == 1 else f"{len(units)} nodes"
    how = ", with its matrix products" if region.selective else ""
    return Site(program, units[0].owner, nodes, units[0].specialization, detail=f"{count}: {detail}{how}", data=data)


def limit_of(budget: float | str, saved: int) -> float:
    """Return how many bytes a budget allows: a share of `saved`, or text with a unit; UsageError if it is neither."""
    if (allowed := allowed_bytes(budget, saved)) is not None:
        return allowed
    raise UsageError(
        f"pass 'checkpoint': budget={budget!r}; give a share of what the model saves, from 0 to 1, or bytes with a "
        "unit, such as 2GiB or 512MiB"
    )
