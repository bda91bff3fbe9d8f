"""Time the whole model, and take back what does not pay after all: of what makes it slower, no more than that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ....compat import all_modules
from ....tracing.examples import Inputs
from ....tracing.program import deactivate
from ....tracing.recording import calls_by_kind
from ... import timing
from ...sites import Cause, Goal, Numerics, Reason
from ..history import Rewrite
from ..tuner import Tuner
from .races import Race, all_slower, as_timings, together
from .variants import Variants, around, is_unproven, kinds_of, stages_of

__all__ = ["WholeModel"]

_RACES = 2
"""So many races must say that the model is slower: one reading of a busy machine does not undo what was gained."""
_WORTH = 0.02
"""Where sites were shown to save more than this part of the model's time, one race more must speak against them."""
_MOST_VARIANTS = 5
"""So many variants race at once, at most."""
_CALLS_OF_A_VARIANT = 8
"""So many calls a race makes of a variant at least: six rounds, and two to get ready."""

_Models = Mapping[str, nn.Module]


@dataclass(frozen=True)
class _Variant:
    """The model without some rewrites: how it raced the one that was before, and how much faster it is than now."""

    left_out: Sequence[Rewrite]
    race: Race
    gain: float


class WholeModel:
    """Compare the rewritten model with a twin of what it was, which has the rewrites `in_baseline`, too."""

    def __init__(self, tuner: Tuner, baseline: nn.Module, in_baseline: Collection[Rewrite] = ()) -> None:
        self._tuner, self._context, self._baseline, self._in_baseline = tuner, tuner.context, baseline, in_baseline
        self._seconds_to_write = 0.0  # a variant of the model
        deactivate(all_modules(baseline))

    def timed(self) -> dict[str, Any]:
        """Return the model's timings as it stands."""
        return self.raced().figures()

    def raced(self) -> Race:
        """Return a race of the model as it stands with its twin."""
        deactivate(self._context.program.names.distinct)
        return self._raced(self._runs(self._now))

    @property
    def _judged(self) -> list[Rewrite]:
        """Return the rewrites that make the difference to the baseline."""
        return [rewrite for rewrite in self._context.history.rewrites if rewrite not in self._in_baseline]

    def never_slower(self) -> dict[str, Any] | None:
        """Return the model's timings; while it is slower, take back the rewrites without which it is fastest.

        Where it generates, neither a prompt nor a step may be slower.
        """
        rewrites = self._judged
        is_whole = len(rewrites) == 1 and not rewrites[0].owner and rewrites[0].decision.measured.speedup is not None
        if is_whole and len(self._kinds) == 1:
            return as_timings(rewrites[0].decision.figures)  # the group was the whole model
        while doubtful := self._doubtful():
            deactivate(self._context.program.names.distinct)
            races, runs = list[Race](), self._runs(self._now)
            while not races or (self._unwanted(races, doubtful) and len(races) < self._races_before(races[0])):
                races.append(self._raced(runs))
            unwanted = self._unwanted(races, doubtful)
            if not unwanted:
                return together(races).figures()
            is_surely, label = unwanted is doubtful, all_slower(races) or ""  # which calls; "" for all
            slower = partial(timing.no_faster, together(races).speed_of(label), Cause.MODEL_SLOWER, calls=label)
            # To write and race variants takes many forwards.
            better = self._better_variant(unwanted, is_surely=is_surely) if self._is_open else None
            self._take_back(unwanted if better is None else better.left_out, slower())
            if self._is_open:
                continue
            if better is not None and (timings := self._no_slower(better)) is not None:
                return timings
            speed = together(races).speed
            while left := self._doubtful() if is_surely else self._unproven(speed):  # no time to learn what is slow
                self._take_back(left, slower(**self._context.budget.values))
        return None

    @property
    def _is_open(self) -> bool:
        """Say whether less is spent than was asked for; what passes took beyond it gives this no more time."""
        return self._context.budget.spent < self._context.budget.seconds

    @property
    def _kinds(self) -> dict[str, list[Inputs]]:
        return calls_by_kind(self._context.program.whole_calls)

    def _unwanted(self, races: Sequence[Race], doubtful: Sequence[Rewrite]) -> Sequence[Rewrite]:
        """Return what every race says is to be taken back, or all together of what nothing else speaks for."""
        return self._unproven(together(races).speed) if all_slower(races) is None else doubtful

    def _races_before(self, first: Race) -> int:
        """Return how many races must agree before anything is taken back: one more where its sites say otherwise."""
        saved_us = sum(rewrite.decision.measured.saved_us or 0.0 for rewrite in self._judged)
        return _RACES + (saved_us > _WORTH * first.whole.microseconds("before"))

    def _unproven(self, speed: timing.Interval) -> list[Rewrite]:
        """Return the rewrites that only the whole model speaks for, where it does not: what makes errors has to gain,
        the others may be as fast.
        """
        if speed.gains():
            return []
        found = [each for each in self._judged if _is_optional(each) and is_unproven(each)]
        return [each for each in found if speed.mid < 1.0 or each.pass_.numerics is Numerics.APPROXIMATE]

    def _doubtful(self) -> list[Rewrite]:
        """Return the rewrites to take back next, together; equal blocks share one timing.

        First clean-ups that alone keep modules from their original forward, then the untimed, then the least certain.
        """
        fast = [each for each in self._judged if each.pass_.goal is Goal.SPEED]
        owners = {each.owner for each in fast}
        clean_ups = [each for each in self._judged if each.pass_.clean_up and each.owner not in owners]
        optional = [each for each in fast if _is_optional(each)]
        if clean_ups or not optional:
            return clean_ups
        untimed = [each for each in optional if each.decision.measured.untimed]
        if untimed:
            return untimed
        worst = min(optional, key=lambda each: each.decision.measured.speedup_low or 0.0)
        return [each for each in optional if each.evidence is worst.evidence]

    # -- variants ------------------------------------------------------------------------------------------------

    def _better_variant(self, unwanted: Sequence[Rewrite], *, is_surely: bool) -> _Variant | None:
        """Return the fastest variant of a slower model, without some rewrites; None where nothing can be divided.

        First each kind of rewrites is left out in turn; then parts of the kind that gained, or of the whole model.
        """
        if any(each.pass_.clean_up for each in unwanted):
            return None
        doubtful = [each for each in self._judged if _is_optional(each)] if is_surely else unwanted
        kinds = kinds_of(doubtful)
        both = [[*kinds[0], *kinds[1]]] if len(kinds) > 2 else []
        best = self._fastest([*kinds[:2], *both, *kinds[2:]]) if len(kinds) > 1 else None
        divided = doubtful if best is None or best.gain <= 1.0 else best.left_out
        stages = stages_of(divided)
        if len(stages) < 2 or (best is not None and not self._has_time(len(stages))):
            return best
        return self._fastest([*([] if best is None else [best.left_out]), *stages]) or best

    def _no_slower(self, variant: _Variant) -> dict[str, Any] | None:
        """Return the timings of a variant that stands now, if it is no slower; in doubt it races once more, alone."""
        races = [variant.race]
        if all_slower(races) is None and variant.race.speed.mid < 1.0:
            races.append(self.raced())
        found = together(races)
        return found.figures() if all_slower(races) is None and found.speed.mid >= 1.0 else None

    def _has_time(self, variants: int, written: int = 0) -> bool:
        """Say whether there is time to write so many variants, and to race them with others that are written."""
        calls = _CALLS_OF_A_VARIANT * (2 + written + variants)
        seconds = calls * self._context.budget.forward + (1 + variants) * self._seconds_to_write
        return seconds <= self._context.budget.for_the_whole

    def _fastest(self, parts: Sequence[Sequence[Rewrite]]) -> _Variant | None:
        """Race the model without each of some parts, as many as there is time for; return the fastest."""
        budget, variants = self._context.budget, Variants(self._tuner)
        models, left_out = dict(self._now), dict[str, Sequence[Rewrite]]()
        try:
            for number, part in enumerate(parts[:_MOST_VARIANTS]):
                if left_out and not self._has_time(1, len(left_out)):
                    break
                start, name = budget.spent, f"variant {number}"
                models[name], left_out[name] = variants.without(part), part
                self._seconds_to_write = max(self._seconds_to_write, budget.spent - start)
        finally:
            variants.put_back()
        deactivate(self._context.program.names.distinct)
        runs = self._runs(models)
        race = self._raced(runs)
        now = race.of("after").speed.mid
        able = {name: part for name, part in left_out.items() if all(name in each for each in runs.values())}
        raced = [_Variant(part, own := race.of(name), own.speed.mid / now) for name, part in able.items()]
        return max(raced, key=lambda each: (each.gain, -len(each.left_out)), default=None)

    # -- races -----------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> _Models:
        return {"before": self._baseline, "after": self._context.program.model}

    def _runs(self, models: _Models) -> dict[str, Mapping[str, timing.Runner]]:
        """Return what to race, by the label of a kind of calls; variants that do not run are left out."""
        able = dict[str, Mapping[str, timing.Runner]]()
        for name, model in models.items():
            try:
                able[name] = self._runners(model)
            except Exception:  # whatever is raised by a rewrite without what it was written on
                if name in self._now:
                    raise
        return {label: {name: runners[label] for name, runners in able.items()} for label in self._kinds}

    def _runners(self, model: nn.Module) -> Mapping[str, timing.Runner]:
        training = self._context.program.training
        return {label: timing.Runner(model, calls, training=training) for label, calls in self._kinds.items()}

    def _raced(self, runs: Mapping[str, Mapping[str, timing.Runner]]) -> Race:
        cold, limit = self._context.program.measuring.is_cold, self._context.budget.for_the_whole / len(runs)
        return Race(
            {label: timing.time_candidates(each, limit=limit, cold=cold, clear=1.0) for label, each in runs.items()}
        )

    def _take_back(self, unwanted: Sequence[Rewrite], reason: Reason) -> None:
        """Undo rewrites that others may stand on: unwind what came later around them, then apply that again.

        What is applied again is verified again while there is time; the model as handed over is compared in any case.
        """
        unwound = around(self._context.history.rewrites, unwanted)
        again = [rewrite for rewrite in unwound if rewrite not in unwanted]
        lost = self._tuner.stand_again(unwound, again, verified=self._context.budget.left > 0)
        for rewrite in unwanted:
            self._context.history.undo(rewrite, reason)
        self._context.history.lose(lost)


def _is_optional(rewrite: Rewrite) -> bool:
    return rewrite.pass_.goal is Goal.SPEED and not rewrite.group.required
