"""The pass: its options, what it refuses before any work, and which method does the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, nn

from ...errors import UsageError
from ...passes.contract import Pass, check_named
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, OwnForward, Refusal, Site
from ...tracing.program import Program
from .checks import check_options, check_scores, check_weights
from .masks import find, reference, rewrite

__all__ = ["Prune"]


@dataclass(frozen=True)
class Prune(Pass):
    """Set the weights that matter least to zero, and keep them there while the model is trained.

    Before: y = x @ weight        After: y = x @ (weight * mask)
    Refuses: layers whose weights cannot be masked, each by name.

    Options:
        method: `magnitude` and `random` choose single weights; `nm` keeps N of M neighbours (`pattern`); `structured`
            removes channels, heads and hidden units.
        amount: the share that goes, from 0 to below 1.
        scope: `global` ranks the weights of all layers together, `layer` takes the share from each.
        norm: by which structured pruning measures a unit; single weights come in the same order by both.
        pattern: of `nm`: how many of how many neighbours along a row stay.
        permute: of `nm`: group inputs in an order in which less is lost, not as they lie; the plan has the order.
        keep: layers that are left out: names, which may hold `*`, or classes of modules.
        schedule: `one_shot` prunes now; with `linear` and `cubic` a `PruningSchedule` does, step by step.
        seed: of `random`.
        scores: name of a weight -> how much each of its elements matters, in the place of its magnitude.
    """

    method: Literal["magnitude", "random", "nm", "structured"] = "magnitude"
    amount: float = 0.5
    scope: Literal["global", "layer"] = "global"
    norm: Literal["l1", "l2"] = "l2"
    pattern: str = "2:4"
    permute: bool = False
    keep: tuple[str, ...] = ()
    schedule: Literal["one_shot", "linear", "cubic"] = "one_shot"
    seed: int = 0
    scores: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC
    goal: ClassVar[Goal] = Goal.SIZE
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT  # it reads what was put in the place of the weights
    before: ClassVar[tuple[str, ...]] = ("fold_batchnorm", "fuse_ensembles", "qat", "quantize")

    def __post_init__(self) -> None:
        check_options(self)

    def check(self, model: nn.Module) -> None:
        if self.method == "structured":
            raise UsageError("pass 'prune': method=structured is not there yet; use magnitude, random or nm")
        check_named(self.name, "keep", self.keep, model)
        check_weights(model)
        if self.scores is not None:
            check_scores(self.scores, model)

    def find(self, program: Program) -> Iterable[Site | Refusal]:
        return find(program, self)

    def rewrite(self, site: Site, edit: Edit) -> None:
        rewrite(site, edit)

    def reference(self, site: Site, original: nn.Module) -> nn.Module | None:
        return reference(site, original)
