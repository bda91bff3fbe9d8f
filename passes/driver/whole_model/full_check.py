"""Check the whole model as single rewrites are: in float64, with noise, on derived calls and calls in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import nn

from ....tracing.examples import Inputs
from ...sites import Numerics, Phase
from ...timing import OutOfTimeError
from ...verification import References, Sizes, modes_to_check, shows_modes
from ..context import RunContext
from ..history import Rewrite

__all__ = ["FullCheck", "phase_of"]

_IN_FULL = 250.0  # with gradients it takes about as long as so many forwards of a small model

_Part = tuple[bool | None, bool, Sizes]
"""A mode, whether gradients count, and the sizes of calls."""
_Where = tuple[Phase, tuple[bool | None, ...]]
"""A phase, and the modes of it."""


@dataclass
class FullCheck:
    """Compare with the user's own model, of which only copies run; `in_time` ends that where time is over."""

    context: RunContext
    model: nn.Module
    calls: Sequence[Inputs]
    in_time: Callable[[], None]
    _parts: dict[_Where, Sequence[_Part]] = field(default_factory=dict[_Where, Sequence[_Part]], init=False)
    _runs: dict[_Part, References] = field(default_factory=dict[_Part, References], init=False)
    _right: dict[Rewrite, set[_Part]] = field(default_factory=dict[Rewrite, set[_Part]], init=False)

    def objection(self, rewrites: Sequence[Rewrite]) -> str:
        """Return what is wrong with the model with these rewrites, or "", as far as there is time: see `unseen`."""
        if not all(rewrite.pass_.numerics.keeps_function for rewrite in rewrites):
            return ""
        exact = all(rewrite.pass_.numerics is Numerics.EXACT for rewrite in rewrites)
        with suppress(OutOfTimeError):
            for part, references in self._references(phase_of(rewrites)):
                found = references.verdicts(
                    self.context.program.model, map_state=self.context.history.state_map().forward,
                    numerics=Numerics.EXACT if exact else Numerics.REASSOCIATED,
                )  # fmt: skip
                if wrong := next((verdict.reason for verdict in found if not verdict.ok), ""):
                    return wrong
                for rewrite in rewrites:
                    self._right.setdefault(rewrite, set()).add(part)
        return ""

    def unseen(self, rewrites: Sequence[Rewrite], standing: Sequence[Rewrite]) -> list[Rewrite]:
        """Return the rewrites with which the model was not found right in each mode in which they and all that are
        `standing` hold, with gradients where these count: those of the given mode are compared with the whole model as
        it is handed over.
        """
        together = phase_of(standing)
        phases = {each: Phase.EVAL if together is Phase.EVAL else each.phase for each in rewrites}
        wanted = {phase: self._shown_modes(phase) for phase in set(phases.values())}
        return [each for each, phase in phases.items() if not self._seen(each, phase).issuperset(wanted[phase])]

    def _seen(self, rewrite: Rewrite, phase: Phase) -> set[bool | None]:
        right, given = self._right.get(rewrite, ()), (None, self.model.training)
        return {mode for mode, gradients, _ in right if gradients or mode in given or not phase.covers_training}

    def _shown_modes(self, phase: Phase) -> Sequence[bool | None]:
        modes = self._modes(phase)
        return modes if shows_modes(self.model, self.context.program.model) else modes[:1]

    def _modes(self, phase: Phase) -> Sequence[bool | None]:
        """Return the modes to compare in: both where either model depends on the mode."""
        return modes_to_check(self.model, phase, self.model.training, self.context.program.model)

    def _references(self, phase: Phase) -> Iterator[tuple[_Part, References]]:
        """Yield the run of the original in each mode, on a smaller call where the recorded one takes too long; then
        first in the given mode without gradients, which tells soonest what is wrong.
        """
        budget, covers, modes = self.context.budget, phase.covers_training, tuple(self._modes(phase))
        if (phase, modes) not in self._parts:
            is_short = budget.spent + _IN_FULL * budget.forward > budget.end_of_check
            first = [(modes[0], False, Sizes.SMALLER)] if is_short else []
            sizes = Sizes.SMALLER if is_short else Sizes.RECORDED
            self._parts[phase, modes] = list(dict.fromkeys([*first, *((mode, covers, sizes) for mode in modes)]))
        for part in self._parts[phase, modes]:
            if part not in self._runs:
                mode, gradients, sizes = part
                self._runs[part] = References.taken(
                    self.model, self.calls, [mode], steady=True, gradients=gradients,
                    seed=self.context.request.seed, sizes=sizes, in_time=self.in_time,
                )  # fmt: skip
            yield part, self._runs[part]


def phase_of(rewrites: Sequence[Rewrite]) -> Phase:
    """Return when all rewrites together hold."""
    limited = any(rewrite.phase is Phase.EVAL and not rewrite.edit.trainable for rewrite in rewrites)
    if limited or not any(rewrite.phase.covers_training for rewrite in rewrites):
        return Phase.EVAL
    return Phase.BOTH if any(rewrite.phase.covers_evaluation for rewrite in rewrites) else Phase.TRAIN
