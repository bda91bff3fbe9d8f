"""Try the lowerings of one site: verify each, time them side by side, and say which to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..compat import all_modules
from ..errors import MatchFailure
from ..tracing.inputs import Inputs
from ..tracing.program import Program
from ..tracing.resting import rest
from . import measure, verify
from .analyses import is_on_meta
from .base import Goal, Numerics, Pass, Site
from .copying import twin
from .edit import Edit
from .modes import modes_to_check

__all__ = ["Attempt", "Failed", "Race", "SiteTrial", "Written", "timing_figures"]

Apply = Callable[[Pass, Site], Edit]
"""Rewrites a site, or raises and leaves no trace."""


@dataclass
class Attempt:
    """One lowering of a site that can stand, kept runnable beside the others: the site with its choice made."""

    site: Site
    verdict: verify.Verdict | None
    module: nn.Module | None


@dataclass(frozen=True)
class Written:
    """A rewrite that is in the program, and what verification says of it."""

    edit: Edit
    verdict: verify.Verdict | None


@dataclass(frozen=True)
class Failed:
    """Why a lowering was not to be had: it cannot be written, or verification found it wrong."""

    reason: str
    unsuitable: bool


@dataclass(frozen=True)
class Race:
    """What was timed side by side, and which of it is best."""

    attempts: Mapping[str | None, Attempt]
    timings: measure.Timings
    best: str | None


class SiteTrial:
    """Try the lowerings of one site.

    Args:
        program: which the site is in.
        pass_: which found the site.
        site: with its choices.
        apply: rewrites the site with one choice.
        calls: how the module around it is called.
        check: verify each lowering.
        time: time the lowerings, if the pass is for speed.
        seed: of verification's random inputs.
        brief: compare on the recorded inputs only: an equal site was verified with noise.
    """

    def __init__(
        self,
        program: Program,
        pass_: Pass,
        site: Site,
        apply: Apply,
        calls: Sequence[Inputs],
        *,
        check: bool,
        time: bool,
        seed: int,
        brief: bool = False,
    ) -> None:
        self.program, self.pass_, self.site, self.apply, self.check, self.seed = (
            program,
            pass_,
            site,
            apply,
            check,
            seed,
        )
        self.home = program.module(site.home)
        self.phase = site.phase or pass_.phase
        self.calls = calls if check or time else ()
        self.timed = time and pass_.goal is Goal.SPEED and bool(self.calls) and not is_on_meta(self.home)
        self.references = self._references(brief)
        self.before = self.runnable()

    @property
    def questions(self) -> bool:
        """Say whether there is anything to check or to time."""
        return self.timed or bool(self.references)

    def _references(self, brief: bool) -> list[verify.Reference]:
        if not self.check or not self.calls or self.pass_.numerics is Numerics.SEMANTIC or is_on_meta(self.home):
            return []
        return [
            verify.reference(
                self.home, self.calls, training=mode, gradients=self.phase.covers_training, seed=self.seed, brief=brief
            )
            for mode in modes_to_check(self.home, self.phase, self.program.training)
        ]

    def run(self) -> tuple[dict[str | None, Attempt], dict[str | None, str], dict[str | None, str]]:
        """Return the lowerings that verified, why others are wrong, and why others could not be written."""
        attempts: dict[str | None, Attempt] = {}
        wrong: dict[str | None, str] = {}
        unsuitable: dict[str | None, str] = {}
        for choice in self.site.choices or (None,):
            attempt = self.attempt(choice)
            if isinstance(attempt, Attempt):
                attempts[choice] = attempt
            else:
                (unsuitable if attempt.unsuitable else wrong)[choice] = attempt.reason
            if attempts and not self.timed:
                break
        return attempts, wrong, unsuitable

    def attempt(self, choice: str | None) -> Attempt | Failed:
        """Write one lowering and verify it; the site is left as it was."""
        site = dataclasses.replace(self.site, choice=choice)
        written = self.written(site)
        if isinstance(written, Failed):
            return written
        try:
            return Attempt(site, written.verdict, self.runnable())
        finally:
            written.edit.undo()

    def applied(self, choice: str | None) -> tuple[Site, Edit] | Failed:
        """Write the site with one lowering, unverified; return it with its choice, and the rewrite, which stands."""
        site = dataclasses.replace(self.site, choice=choice)
        try:
            return site, self.apply(self.pass_, site)
        except MatchFailure as refusal:
            return Failed(str(refusal), unsuitable=True)

    def written(self, site: Site) -> Written | Failed:
        """Write a site with the choice it has, and verify that; what is wrong is undone."""
        try:
            edit = self.apply(self.pass_, site)
        except MatchFailure as refusal:
            return Failed(str(refusal), unsuitable=True)
        try:
            verdict = self.verdict(edit)
        except BaseException:
            edit.undo()
            raise
        if verdict is None or verdict.ok:
            return Written(edit, verdict)
        edit.undo()
        return Failed(verdict.reason, unsuitable=False)

    def verdict(self, edit: Edit) -> verify.Verdict | None:
        """Return the worst verdict over the phases, or None where nothing could be checked."""
        state_map = edit.state_map()
        verdicts = [
            verify.verify(reference, self.home, map_state=state_map.forward, numerics=self.pass_.numerics)
            for reference in self.references
        ]
        return min(verdicts, key=lambda verdict: (verdict.ok, -verdict.meaning_error), default=None)

    def choose(self, attempts: Mapping[str | None, Attempt]) -> tuple[Attempt, dict[str, Any], str | None]:
        """Return the lowering to keep, its figures, and why none is kept."""
        if not self.timed:
            first = next(iter(attempts.values()))
            return first, self.figures(first.verdict), None
        race = self.race(attempts)
        best, kept = label(race.best), race.attempts[race.best]
        times = {label(choice): race.timings.microseconds(label(choice)) for choice in race.attempts}
        speed = race.timings.ratio("before", best)
        figures = {
            **self.figures(kept.verdict),
            **timing_figures(race.timings, "before", best),
            "lowerings": times,
        }
        if speed.low <= 1.0 and not self.site.required:
            return kept, figures, f"no faster: {speed.mid:.2f}x ({speed.low:.2f} to {speed.high:.2f}) as {best}"
        return kept, figures, None

    def race(self, attempts: Mapping[str | None, Attempt]) -> Race:
        """Time lowerings side by side."""
        timings = self.timings(attempts)
        return Race(attempts, timings, self.fastest(attempts, timings))

    def fastest(self, attempts: Mapping[str | None, Attempt], timings: measure.Timings) -> str | None:
        """Return the fastest; of those that are not shown to be 2% slower, the first."""
        names = {label(choice): choice for choice in attempts}
        return names[timings.fastest(prefer=tuple(names))]

    def runnable(self) -> nn.Module | None:
        """Return the module around the site as it runs now, what no pass has changed at rest, to be timed."""
        if not self.timed:
            return None
        runnable = twin(self.home)
        rest(all_modules(runnable))
        return runnable

    def timings(self, attempts: Mapping[str | None, Attempt]) -> measure.Timings:
        """Time lowerings beside the module as it was."""
        modules = {"before": self.before, **{label(choice): attempt.module for choice, attempt in attempts.items()}}
        runs = {name: self.runner(module) for name, module in modules.items() if module is not None}
        return measure.time_candidates(runs)

    def runner(self, module: nn.Module) -> measure.Runner:
        """Return a function that makes the recorded calls of what `runnable` gave."""
        training = self.program.training and self.phase.covers_training
        # What comes before a module in the middle of a network needs its gradients too.
        inner = True if self.site.home else None
        return measure.runner(module, self.calls, training=training, input_gradients=inner)

    def figures(self, verdict: verify.Verdict | None) -> dict[str, Any]:
        if verdict is None:
            return {"checked": self.unchecked()}
        return {
            "checked": verdict.checked_in,
            "meaning_error": verdict.meaning_error,
            "precision_error": verdict.precision_error,
        }

    def unchecked(self) -> str:
        if not self.check:
            return "unverified: verify=False"
        if is_on_meta(self.home):
            return "unverified: meta"
        if self.pass_.numerics is Numerics.SEMANTIC:
            return "unverified: changes the function by design"
        return "unverified: never called" if self.program.inputs else "unverified: no example inputs"


def timing_figures(timings: measure.Timings, before: str, after: str) -> dict[str, float]:
    """Return the timings of two candidates as figures for a plan, their ratio with its interval."""
    speed = timings.ratio(before, after)
    return {
        "speedup": speed.mid, "speedup_low": speed.low, "speedup_high": speed.high,
        "before_us": timings.microseconds(before), "after_us": timings.microseconds(after),
    }  # fmt: skip


def label(choice: str | None) -> str:
    return choice or "after"
