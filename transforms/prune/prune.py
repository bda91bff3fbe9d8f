"""The pass: its options, and what it refuses before any work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ...layers.quantized import check_in_floats
from ...passes.contract import check_named
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Refusal, Site
from ...runtime.record import Decision
from ...tracing.program import Program
from .amounts import check_target
from .find import find
from .options import Options, check_scores, check_weights
from .write import reference, rewrite

__all__ = ["Prune"]


@dataclass(frozen=True)
class Prune(Options):
    """Set the weights that matter least to zero, and keep them there while the model is trained.

    Before: y = x @ weight        After: y = x @ (weight * mask)
    Refuses: layers whose weights cannot be masked, each by name.

    Options:
        method: `magnitude` and `random` choose single weights; `nm` keeps N of M neighbours (`pattern`); `structured`
            removes channels, heads, hidden units and experts.
        amount: the share that goes, from 0 to below 1.
        scope: `global` ranks the weights of all layers together, `layer` takes the share from each.
        norm: by which structured pruning measures a unit; single weights come in the same order by both.
        pattern: of `nm`: how many of how many neighbours along a row stay; 2:4 by default.
        permute: of `nm`: group inputs in an order in which less is lost, not as they lie; the plan has the order.
        keep: layers that are left out: names, which may hold `*`, or classes of modules.
        schedule: `one_shot` prunes now; with `linear` and `cubic` a `PruningSchedule` does, step by step.
        seed: of `random`.
        scores: name of a weight -> how much each of its elements matters, in the place of its magnitude; of structured
            pruning also a function of a weight's name and values that gives that.
        criterion: what structured pruning judges a unit by: the `magnitude` of its weights, the scale of its
            `batchnorm`, how the loss changes without it (`taylor`, to first order), how often tokens go to an expert
            (`routing`, of whole experts alone), or `random`.
        kinds: which units structured pruning removes: `channels`, `heads`, `hidden` units, whole `experts`; all by
            default.
        target: what `amount` is a share of, for structured pruning: the `units`, or the model's `parameters`, `flops`
            or measured `latency`. A share of the parameters or flops is met within 0.02, or `optimize` raises
            BudgetError and says what was reached.
        round_to: keep a multiple of so many channels or hidden units; heads and experts are few, and not rounded.
        loss: of `taylor`: a function of the model's output or, with `data`, of the model and a batch; by default sums
            of the outputs on the example inputs, with random signs.
        data: of `taylor` and `routing`: batches, any iterable; `loss` runs the model on each.
    """

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC
    goal: ClassVar[Goal] = Goal.SIZE
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT  # it reads what was put in the place of the weights

    def check(self, model: nn.Module) -> None:
        check_named(self.name, "keep", self.keep, model)
        check_in_floats(self.name, model)
        check_weights(model)
        if self.scores is not None and not (self.method == "structured" and callable(self.scores)):
            check_scores(self.scores, model)

    def find(self, program: Program) -> Iterable[Site | Refusal]:
        return find(program, self)

    def rewrite(self, site: Site, edit: Edit) -> None:
        rewrite(site, edit)

    def reference(self, site: Site, original: nn.Module) -> nn.Module | None:
        return reference(site, original)

    def check_decisions(self, decisions: Sequence[Decision]) -> None:
        check_target(self, decisions)

    def own_forward_of(self, sites: Sequence[Site], module: str) -> OwnForward | None:
        is_hard_coded = any(module in site.data.get("hard_coded", ()) for site in sites)
        return OwnForward.WRONG if is_hard_coded else self.own_forward
