"""Check the whole model as single rewrites are: in float64, with noise, on derived calls and calls in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from ....tracing.examples import Inputs
from ...sites import Numerics, Phase
from ...timing import OutOfTimeError
from ...verification import References, Sizes, modes_to_check
from ..context import RunContext
from ..history import Rewrite

__all__ = ["FullCheck", "phase_of"]

_IN_FULL = 250.0  # with gradients it takes about as long as so many forwards of a small model

_Part = tuple[tuple[bool | None, ...], bool, Sizes]
"""Modes, whether gradients count, and the sizes of calls."""


@dataclass
class FullCheck:
    """Compare with the user's own model, of which only copies run; `in_time` ends that where time is over."""

    context: RunContext
    model: nn.Module
    calls: Sequence[Inputs]
    in_time: Callable[[], None]
    _parts: dict[Phase, Sequence[_Part]] = field(default_factory=dict[Phase, Sequence[_Part]], init=False)
    _runs: dict[_Part, References] = field(default_factory=dict[_Part, References], init=False)

    def objection(self, rewrites: Sequence[Rewrite]) -> str | None:
        """Return what is wrong with the model with these rewrites, or ""; None where that could not be checked."""
        if not all(rewrite.pass_.numerics.keeps_function for rewrite in rewrites):
            return None
        exact, is_checked = all(rewrite.pass_.numerics is Numerics.EXACT for rewrite in rewrites), False
        try:
            for references in self._references(phase_of(rewrites)):
                found = references.verdicts(
                    self.context.program.model, map_state=self.context.history.state_map().forward,
                    numerics=Numerics.EXACT if exact else Numerics.REASSOCIATED,
                )  # fmt: skip
                if wrong := next((verdict.reason for verdict in found if not verdict.ok), ""):
                    return wrong
                is_checked = True
        except OutOfTimeError:
            return "" if is_checked else None
        return ""

    def _references(self, phase: Phase) -> Iterator[References]:
        """Yield the runs of the original: all of them or, where these take too long, smaller ones in the given mode
        without gradients, which have to fit, and what else fits: each mode with gradients.
        """
        budget, covers = self.context.budget, phase.covers_training
        if phase not in self._parts:
            modes = tuple(modes_to_check(self.model, phase, self.model.training))
            is_short = budget.spent + _IN_FULL * budget.forward > budget.end_of_check
            some = [((None,), False, Sizes.SMALLER), *(((mode,), covers, Sizes.SMALLER) for mode in modes)]
            self._parts[phase] = list(dict.fromkeys(some)) if is_short else [(modes, covers, Sizes.RECORDED)]
        for part in self._parts[phase]:
            if part not in self._runs:
                modes, gradients, sizes = part
                self._runs[part] = References.taken(
                    self.model, self.calls, modes, steady=True, gradients=gradients,
                    seed=self.context.request.seed, sizes=sizes, in_time=self.in_time,
                )  # fmt: skip
            yield self._runs[part]


def phase_of(rewrites: Sequence[Rewrite]) -> Phase:
    """Return when all rewrites together hold."""
    limited = any(rewrite.phase is Phase.EVAL and not rewrite.edit.trainable for rewrite in rewrites)
    if limited or not any(rewrite.phase.covers_training for rewrite in rewrites):
        return Phase.EVAL
    return Phase.BOTH if any(rewrite.phase.covers_evaluation for rewrite in rewrites) else Phase.TRAIN
