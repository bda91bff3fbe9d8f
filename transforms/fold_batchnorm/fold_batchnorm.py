"""The pass: batch norms folded into the convolutions and linears before them, or else behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ...layers.masked import gone_of
from ...passes.contract import Pass
from ...passes.rewriting import Edit
from ...passes.sites import Cause, Goal, Numerics, Phase, Refusal, Site
from ...tracing.program import Program
from .checking import reason_against_fold
from .find import Pair, pairs_in, unfolded
from .parts import fold_of, tensor_at
from .reasons import reasons_against
from .write import paths_in, write

__all__ = ["FoldBatchnorm"]


@dataclass(frozen=True)
class FoldBatchnorm(Pass):
    """Fold evaluation-mode batch norms into the convolutions or linears before them, or else behind them.

    Before: self.bn(self.conv(x))        After: conv2d(x, *fold(conv.weight, ..., bn.running_var))
    Calls of `F.batch_norm` and of the layers' functions on tensors of the model are the same.
    What a batch norm of a subclass computes behind the norm, dropout and an activation, is computed behind the layer.
    A layer that `prune` has masked is folded with its zeros, and follows its masks.
    Refuses: a convolution or batch norm that is called, tied or read elsewhere too, or has hooks or parametrizations;
        a batch norm in training mode or without running statistics; a linear on more than two dimensions;
        norms before a convolution that pads with zeros or is transposed.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.EVAL
    profiles_itself: ClassVar[bool] = True  # one of many norms gains less than can be measured: the whole model tells

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        pairs = pairs_in(program)
        reasons = reasons_against(pairs, program, tails=True)
        for pair in pairs if not program.replaying else ():
            if pair not in reasons and (reason := _fault(pair, program.module(pair.owner))):
                reasons[pair] = reason
        yield from unfolded(program)
        sound = _taken(pairs, reasons)
        for pair in _named(pairs, sound):
            yield Refusal(reasons[pair], pair.place, Cause.IN_TRAINING if program.training else Cause.NOT_APPLICABLE)
        # One site for all of a module: by itself, one of many norms gains less than can be measured.
        owners: dict[str, list[Pair]] = {}
        for pair in sound:
            owners.setdefault(pair.owner, []).append(pair)
        yield from (_site(program, owner, group) for owner, group in owners.items())

    def rewrite(self, site: Site, edit: Edit) -> None:
        write(site, edit)


def _taken(pairs: Sequence[Pair], reasons: Mapping[Pair, str]) -> list[Pair]:
    """Return the pairs to fold: each norm goes into the layer before it or, where that will not do, the one behind."""
    sound = [pair for pair in pairs if pair not in reasons]
    gone = {call.norm for pair in sound if not pair.before for call in pair.calls}
    return [pair for pair in sound if not (pair.before and any(call.norm in gone for call in pair.calls))]


def _named(pairs: Sequence[Pair], sound: Sequence[Pair]) -> Iterator[Pair]:
    """Yield one refused pair for each norm that is in no pair to fold."""
    seen = {call.norm for pair in sound for call in pair.calls}
    for pair in pairs:
        nodes = {call.norm for call in pair.calls}
        if not nodes & seen:
            yield pair
        seen |= nodes


def _site(program: Program, owner: str, group: Sequence[Pair]) -> Site:
    nodes = {
        f"{what}.{number}.{call.specialization}": node.name
        for number, pair in enumerate(group)
        for call in pair.calls
        for what, node in (("layer", call.layer), ("norm", call.norm))
    }
    first = group[0]
    detail = f"{first.norm.name} into {first.layer.name}" if len(group) == 1 else f"{len(group)} batch norms"
    return Site(program, owner, nodes, min(call.specialization for pair in group for call in pair.calls), detail=detail)


def _fault(pair: Pair, owner: nn.Module) -> str:
    """Return how far off a fold is that is wrong in float64, or ""."""
    fold = fold_of(pair.layer, pair.norm, before=pair.before)
    gone = [] if pair.layer.module is None else [gone_of(pair.layer.module)[name] for name in fold.masked]
    tensors = [tensor_at(owner, path) for path in paths_in(pair.layer, pair.norm, fold)]
    return reason_against_fold(pair.layer, pair.norm, fold, [*(each for each in tensors if each is not None), *gone])
