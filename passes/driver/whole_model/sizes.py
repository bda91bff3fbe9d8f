"""Time the rewritten model on other sizes and layouts than the example's: what is faster there may be slower here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ....tracing.program import deactivate
from ... import timing
from ...verification import Neighbour, neighbours
from ..context import RunContext

__all__ = ["with_other_sizes"]

_SECONDS = 0.02  # a race of other sizes samples for so long: it is to show clear losses, not to choose
_FEWEST_ROUNDS, _SURE_ROUNDS = 3, 6
_READY_CALLS = 2  # so many calls make a model ready for timing
_LONGEST_CALL = 1.0
"""No call of another size is made that may take more seconds: what takes long takes much memory, too."""


def with_other_sizes(
    context: RunContext, original: nn.Module | None, timings: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the timings with those on other sizes and layouts, as far as there is time; `original` is a twin."""
    if original is None or timings is None:
        return timings
    deactivate(context.program.names.distinct)
    races = _Races(context, original, (timings["before_ms"] + timings["after_ms"]) / 1e3)
    for alternatives in neighbours(context.program.whole_calls):
        races.run(alternatives)
    figures = {"sizes": races.timed, "untimed_sizes": races.untimed}
    return {**timings, **{name: found for name, found in figures.items() if found}}


@dataclass
class _Races:
    """Race the model as it was and as it is; tell the ratio, or why there is none, by what is other."""

    context: RunContext
    original: nn.Module
    pair_seconds: float
    timed: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    untimed: dict[str, str] = field(default_factory=dict[str, str])

    def run(self, alternatives: Sequence[Neighbour]) -> None:
        """Time the first of some sizes that the original takes and that there is time for."""
        reasons: dict[str, str] = {}
        for each in alternatives:
            reason = self._too_long(each)
            before = None if reason else self._original_on(each)
            if before is not None:
                self._race(each, before)
                return
            if reason:
                reasons = {each.label: reason}
        self.untimed.update(reasons)

    def _too_long(self, each: Neighbour) -> str:
        seconds, budget = each.scale * self.pair_seconds, self.context.budget
        if seconds > 2 * _LONGEST_CALL:
            return f"a call may take more than {_LONGEST_CALL:g} s"
        # What is left where checks were left out is for checking the whole model.
        is_over = any(rewrite.is_unchecked for rewrite in self.context.history.rewrites)
        return f"too little was left of {budget}" if is_over or not self._allows(_FEWEST_ROUNDS, seconds) else ""

    def _allows(self, rounds: int, seconds: float) -> bool:
        return (rounds + _READY_CALLS) * seconds <= self.context.budget.for_the_whole

    def _original_on(self, each: Neighbour) -> timing.Runner | None:
        try:
            return timing.Runner(self.original, each.calls, training=self.context.program.training)
        except Exception:  # whatever the user's code raises on a size that it was not made for
            return None

    def _race(self, each: Neighbour, before: timing.Runner) -> None:
        program = self.context.program
        try:
            after = timing.Runner(program.model, each.calls, training=program.training)
            speed = self._timings(each, {"before": before, "after": after}).ratio("before", "after")
        except Exception as error:  # a guard, or memory: what is not timed is no reason to give up the model
            said = (str(error).splitlines() or [""])[0]
            self.untimed[each.label] = f"{type(error).__name__}: {said}"
            return
        self.timed[each.label] = speed.figures

    def _timings(self, each: Neighbour, runs: Mapping[str, timing.Runner]) -> timing.Timings:
        is_affordable = self._allows(_SURE_ROUNDS, each.scale * self.pair_seconds)
        return timing.time_candidates(
            runs,
            seconds=_SECONDS,
            least_rounds=_SURE_ROUNDS,
            limit=2 * _SECONDS,
            fewest=_SURE_ROUNDS if is_affordable else _FEWEST_ROUNDS,
            cold=self.context.program.measuring.is_cold,
            clear=1.0,
        )
