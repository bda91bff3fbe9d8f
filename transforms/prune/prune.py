"""The pass: its options, and what it refuses before any work."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ...layers.quantized import check_in_floats
from ...passes.contract import check_named
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...runtime.record import Decision
from ...tracing.program import Program
from .amounts import check_target
from .find import find
from .options import Options, check_scores, check_weights
from .scores import check_criterion
from .write import reference, rewrite

__all__ = ["Prune"]


@dataclass(frozen=True)
class Prune(Options):
    """Set the weights that matter least to zero, and keep them there while the model is trained.

    Before: y = x @ weight        After: y = x @ (weight * mask)
    Refuses: layers whose weights cannot be masked, each by name.

    Options:
        method: `magnitude` and `random` choose single weights; `nm` keeps N of M neighbours (`pattern`); `structured`
            removes channels, heads, hidden units, experts and whole residual blocks.
        amount: the share that goes, from 0 to below 1.
        scope: `global` ranks the weights of all layers together, `layer` takes the share from each, `row` from what
            each output is computed from.
        ratios: shares of single layers, in the place of `amount`: names, which may hold `*`, of layers or of groups of
            units, and shares; the first that fits counts.
        norm: by which structured pruning measures a unit; single weights come in the same order by both.
        pattern: of `nm`: how many of how many neighbours along a row stay; 2:4 by default.
        permute: of `nm`: group inputs in an order in which less is lost, not as they lie; the plan has the order.
        keep: layers that are left out: names, which may hold `*`, or classes of modules.
        schedule: `one_shot` prunes now; with `linear` and `cubic` a `PruningSchedule` does, step by step.
        seed: of `random`.
        scores: name of a weight -> how much each of its elements matters, in the place of its magnitude; of structured
            pruning also a function of a weight's name and values that gives that.
        criterion: what weights or units are judged by: `magnitude`; `lamp`, their share in all that are as large or
            larger; `taylor` and `hessian`, how the loss changes without them to first and to second order; `wanda`,
            magnitude times the norm of the inputs (single weights). Units also by `fpgm`, the distance to all others of
            their group; the scale of their `batchnorm`; how often tokens go to an expert (`routing`, of whole experts
            alone); how much a block changes what it is given (`influence`, of whole blocks alone); and `random`.
        kinds: which units structured pruning removes: `channels`, `heads`, `hidden` units, whole `experts`, all of
            these by default; or whole residual `blocks`, in a call of their own.
        target: what `amount` is a share of, for structured pruning: the `units`, or the model's `parameters`, `flops`
            or measured `latency`. A share of the parameters or flops is met within 0.02, or `optimize` raises
            BudgetError and says what was reached.
        round_to: keep a multiple of so many channels or hidden units; the others are few, and not rounded.
        loss: of `taylor` and `hessian`: a function of the model's output or, with `data`, of the model and a batch; it
            gives one number, or results, of which counts how much they change. By default the outputs on the examples.
        data: of `taylor`, `hessian`, `wanda`, `routing` and `influence`: batches, any iterable; `loss` runs the model
            on each.
    """

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC
    goal: ClassVar[Goal] = Goal.SIZE
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT  # it reads what was put in the place of the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        check_criterion(self)

    @classmethod
    def searched(cls, phase: Phase, goals: Collection[Goal]) -> Mapping[str, Sequence[Any]] | None:
        structured = {"method": ("structured",), "amount": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}
        return structured if phase is Phase.EVAL else None

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
