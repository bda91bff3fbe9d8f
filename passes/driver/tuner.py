"""Choose how to rewrite a group of sites: write candidates, verify them, time them side by side, keep the best."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ...errors import MatchFailure, PassError
from ...runtime.record import Measured
from ...tracing.isolation import copied_module
from ..contract import Pass
from ..pipeline import supervised
from ..rewriting import Edit, ReadsOutOfOrder
from ..sites import Cause, Phase, Reason, Site
from ..timing import OutOfTimeError, Stage
from .comparison import UNNAMED, Comparison
from .context import Check, RunContext
from .groups import Candidate, Group, Race, changes, identity, is_like
from .halving import in_halves
from .history import Rewrite

__all__ = ["CLEAR", "Tuner"]

T = TypeVar("T")
CLEAR = 1.5
"""What a contested pass makes so many times as fast stays without a contest: other passes seldom gain as much."""
_MOST_VARIATIONS = 12  # so many changes to the best common lowering are timed beside it


class Tuner:
    """Rewrite groups of sites in the way that is right and pays. Verifying takes longer: only winners are verified."""

    def __init__(self, context: RunContext) -> None:
        self.context, self.sharing = context, 1

    def seconds_to_time(self, pass_: Pass, group: Group) -> float:
        """Return in how many seconds a group is to be timed; 0 where it is not."""
        if not self.context.is_timed(pass_):
            return 0.0
        has_choice = len(group.choices) > 1
        return self.context.budget.for_a_race(whole=not group.owner, among=self.sharing, has_choice=has_choice)

    def _comparison(
        self, pass_: Pass, group: Group, *, time: bool = True, brief: bool = False, ended: bool = False
    ) -> Comparison:
        asked = self.context.asks(pass_, group)
        return Comparison(
            self.context, pass_, group, timed=self.seconds_to_time(pass_, group) if asked and time else 0.0,
            brief=brief, check=self.context.check_of(pass_, group, ended=ended),
            simulated=self._simulated(pass_, group) if asked and self.context.request.verify else None,
        )  # fmt: skip

    def _in_time(self, comparison: Comparison, group: Group, check: Callable[[Comparison], T]) -> T:
        """Check a group; where time ends in the middle, briefly or not here. OutOfTimeError where it is left then."""
        try:
            return check(comparison)
        except OutOfTimeError:  # what stood has been undone
            if self.context.check_of(comparison.pass_, group, ended=True) is Check.NEVER:
                raise
            return check(self._comparison(comparison.pass_, group, time=False, ended=True))

    def out_of_time(self, group: Group) -> Candidate:
        """Return a group left as it is for want of time."""
        return Candidate(group, Reason(Cause.NOT_CHECKED, self.context.budget.values))

    def _simulated(self, pass_: Pass, group: Group) -> nn.Module | None:
        """Return what the rewritten module must be equal to, where the pass says so."""
        if type(pass_).reference is Pass.reference or not group.is_single:
            return None
        original = copied_module(self.context.program.module(group.owner))
        site = group.sites[0]
        return self.supervised(pass_, lambda: f"reference of {group.key}", lambda: pass_.reference(site, original))

    # -- writing ---------------------------------------------------------------------------------------------------

    def apply(self, pass_: Pass, group: Group) -> Edit:
        """Rewrite a group with the lowerings it has; what fails is undone before the error goes on.

        Raises MatchFailure, with the site if it is known, or PassError if the pass raises anything else or hangs.
        """
        begun = self.context.budget.spent
        edit = Edit(self.context.program, group.sites[0], pass_.name, self.context.snapshot)
        sites = [site.read_through(edit.own_graphs) for site in group.sites]

        def rewrite() -> None:
            with edit.watched():
                if group.is_single:
                    pass_.rewrite(sites[0], edit)
                else:
                    pass_.rewrite_group(sites, edit)
                if pass_.clean_up and group.phase is Phase.EVAL:  # it was narrowed: in training nothing was checked
                    edit.hold_in_evaluation([""])
                edit.finish()

        try:
            self.supervised(pass_, lambda: f"site {(edit.failed_at or group).key}", rewrite, times=len(group.sites))
        except BaseException as failure:
            if isinstance(failure, MatchFailure):
                failure.site = group.sites[0] if group.is_single else edit.failed_at
            edit.undo()
            raise
        self.context.budget.writing = self.context.budget.spent - begun
        return edit

    def supervised(self, pass_: Pass, step: Callable[[], str], action: Callable[[], Any], times: int = 1) -> Any:
        """Run a pass's own code within its time limit, and with its name on what it raises."""
        seconds = self.context.request.settings.pass_timeout * times
        return supervised(action, what=lambda: f"pass '{pass_.name}' ({step()})", seconds=seconds)

    def settle(self, pass_: Pass, group: Group) -> None:
        """Let a pass finish what it wrote at a group, and stands."""
        if type(pass_).settle is Pass.settle:
            return
        with self.context.budget.spending(Stage.TIMING):
            for site in group.sites:
                self.supervised(pass_, lambda: f"site {group.key}", partial(pass_.settle, site))

    def _written(self, comparison: Comparison, group: Group) -> Candidate:
        """Write a group, without the sites that cannot be; it stands in the program, unless that is none."""
        left, reasons, is_hopeless = group, dict[str, None](), False
        while left.sites:
            try:
                return Candidate(left, edit=self.apply(comparison.pass_, left))
            except MatchFailure as failure:
                reasons[str(failure)] = None
                is_hopeless = is_hopeless or isinstance(failure, ReadsOutOfOrder)
                remaining = Group(tuple(site for site in left.sites if not is_like(site, failure.site)))
                left = remaining if len(remaining.sites) < len(left.sites) else Group(())  # it may be known of none
        reason = Reason.of(Cause.NO_MATCH, "; ".join(reasons) or "no site is left to rewrite")
        return Candidate(group, reason, is_hopeless=is_hopeless)

    def _verified(self, comparison: Comparison, candidate: Candidate) -> Candidate:
        """Verify what stands in the program; what is wrong is undone."""
        if candidate.edit is None:
            return candidate
        try:
            verdict = comparison.verdict(candidate.edit)
        except BaseException:
            candidate.edit.undo()
            raise
        if verdict is None or verdict.ok:
            return dataclasses.replace(candidate, verdict=verdict, figures=comparison.figures(verdict))
        candidate.edit.undo()
        return Candidate.wrong(candidate.group, verdict)

    def repeat(
        self, pass_: Pass, group: Group, *, brief: bool = False, is_right: Callable[[Edit], bool] | None = None
    ) -> Candidate:
        """Write a group as was decided elsewhere, and verify it; what `is_right` says no to is undone first."""
        try:
            return self._whole(self._comparison(pass_, group, time=False, brief=brief), group, is_right)
        except OutOfTimeError:
            return self.out_of_time(group)

    def _whole(self, comparison: Comparison, group: Group, is_right: Callable[[Edit], bool] | None = None) -> Candidate:
        """Write and verify all sites of a group."""
        return self._in_time(comparison, group, lambda each: self._checked(each, group, is_right))

    def _checked(self, comparison: Comparison, group: Group, is_right: Callable[[Edit], bool] | None) -> Candidate:
        comparison.take_references()
        try:
            edit = self.apply(comparison.pass_, group)
        except MatchFailure as failure:
            return Candidate(group, Reason.of(Cause.NO_MATCH, str(failure)))
        if is_right is not None and not is_right(edit):
            edit.undo()
            return Candidate(group, Reason.of(Cause.DIFFERS, "it became something else"))
        return self._verified(comparison, Candidate(group, edit=edit))

    def stand_again(
        self, undone: Sequence[Rewrite], wanted: Iterable[Rewrite], *, verified: bool = False
    ) -> dict[Rewrite, str]:
        """Undo rewrites, last first, write those wanted after the others, and return why some cannot be.

        Those that are `verified` again may be wrong, too; without time for that, the last comparison tells.
        """
        history = self.context.history
        for rewrite in reversed(undone):
            rewrite.edit.undo()
        self.context.forget()
        history.rewrites = [rewrite for rewrite in history.rewrites if rewrite not in undone]
        lost = dict[Rewrite, str]()
        for rewrite in wanted:
            try:
                is_checked = verified and self.context.check_of(rewrite.pass_) is Check.NOW
                candidate = self.repeat(rewrite.pass_, rewrite.group) if is_checked else None
                if candidate is None or candidate.status == "skipped":
                    candidate = Candidate(rewrite.group, edit=self.apply(rewrite.pass_, rewrite.group))
            except (MatchFailure, PassError) as failure:
                candidate = Candidate(rewrite.group, Reason.of(Cause.NO_MATCH, str(failure)))
            if candidate.edit is None:
                lost[rewrite] = candidate.failure.text if candidate.failure else ""
                continue
            rewrite.edit = candidate.edit
            history.rewrites.append(rewrite)
        return lost

    # -- deciding --------------------------------------------------------------------------------------------------

    def tune(self, pass_: Pass, group: Group) -> tuple[Candidate | None, Sequence[Group]]:
        """Keep the best candidate for a group, or none; return it (None: all is open) and groups to decide later."""
        try:
            return self._in_time(self._comparison(pass_, group), group, self._tuned)
        except OutOfTimeError:
            return self.out_of_time(group), ()

    def _tuned(self, comparison: Comparison) -> tuple[Candidate | None, Sequence[Group]]:
        pass_, group = comparison.pass_, comparison.group
        was_untimed = not comparison.timed and self.context.is_timed(pass_) and self.context.asks(pass_, group)
        is_judged = self.context.leaves_to_the_whole(pass_)
        if was_untimed and len(group.choices) > 1 and not (group.required or is_judged) and pass_.skippable:
            return Candidate(group, Reason(Cause.NOT_TIMED, self.context.budget.values)), ()
        candidates = self._candidates(comparison)
        able = {name: candidate for name, candidate in candidates.items() if not candidate.failure}
        if not able:
            return self._failed(comparison, list(candidates.values()))
        if not comparison.timed:
            kept = next(iter(able.values()))
            if was_untimed:
                untimed = Measured(untimed=self.context.budget.too_short).figures()
                kept = dataclasses.replace(kept, figures={**kept.figures, **untimed})
            return kept, group.rest(kept.group)
        if pass_.contested:
            comparison.within(self.seconds_to_time(pass_, group))
        return self._chosen(comparison, self._race(comparison, able), ())

    def _chosen(
        self, comparison: Comparison, race: Race, wrong: Sequence[str]
    ) -> tuple[Candidate | None, Sequence[Group]]:
        """Keep what won a race, where it pays and is right; of a lone site the next best, if others were `wrong`."""
        group = comparison.group
        figures, reason = comparison.judged(race, wrong)
        if reason is not None:
            return Candidate(group, reason, figures=figures), ()
        kept = self._whole(comparison, race.candidates[race.best].group)
        if kept.failure is None:
            return dataclasses.replace(kept, figures={**figures, **kept.figures}), group.rest(kept.group)
        if not group.is_single:
            return self._apart(comparison, self._guilty(comparison, race.candidates[race.best].group.sites))
        reasons, others = tuple(dict.fromkeys((*wrong, kept.failure.text))), race.without_best()
        if others is None:
            return Candidate(group, dataclasses.replace(kept.failure, text="; ".join(reasons))), ()
        return self._chosen(comparison, others, reasons)

    def _candidates(self, comparison: Comparison) -> dict[str, Candidate]:
        """Return a candidate for each lowering; of those that are not timed the last one stands, where it is right."""
        candidates: dict[str, Candidate] = {}
        begun = self.context.budget.spent
        for choice in comparison.group.choices:
            if candidates and not comparison.group.required and not self._allows_another(comparison, candidates, begun):
                break
            if not comparison.timed:
                comparison.take_references()
            candidate = self._written(comparison, comparison.group.lowered(choice))
            decide = self._runnable if comparison.timed else self._verified
            candidate = decide(comparison, candidate)
            candidates[choice or UNNAMED] = candidate
            self._share_with_none(comparison, candidate)
            is_settled = not candidate.failure or (candidate.was_written and not comparison.group.is_single)
            if candidate.is_hopeless or (is_settled and not comparison.timed):
                break
        return candidates

    def _allows_another(self, comparison: Comparison, written: Mapping[str, Candidate], begun: float) -> bool:
        """Say whether one lowering more fits, if it takes as long to write as those before it: engines take seconds."""
        budget, able = self.context.budget, [each.runner for each in written.values() if not each.failure]
        if able and comparison.timed and not comparison.has_time_for_another(able):
            return False
        if not able and self.context.check_of(comparison.pass_, comparison.group) is not Check.NEVER:
            return True
        end = budget.end_of_writing(whole=not comparison.group.owner)
        return budget.spent + (budget.spent - begun) / len(written) <= end

    def _share_with_none(self, comparison: Comparison, candidate: Candidate) -> None:
        """Take the time for the comparison without a contested pass, where what it gains is so clear that there is
        none.
        """
        if not comparison.pass_.contested or candidate.runner is None:
            return
        if comparison.group.required or comparison.rough_gain(candidate.runner) >= CLEAR:
            self.context.budget.take_share_of_contest()

    def _runnable(self, comparison: Comparison, candidate: Candidate) -> Candidate:
        """Take a candidate that stands out of the program, and make it run beside the others."""
        if candidate.edit is None:
            return candidate
        try:
            runner = comparison.runner()
        except Exception as error:  # whatever a wrong rewrite raises: it is the reason not to keep it
            said = f"the rewritten module raises {type(error).__name__}: {error}"
            return dataclasses.replace(candidate, failure=Reason.of(Cause.DIFFERS, said), edit=None)
        finally:
            candidate.edit.undo()
        return dataclasses.replace(candidate, edit=None, runner=runner)

    # -- what is fastest -------------------------------------------------------------------------------------------

    def _race(self, comparison: Comparison, able: Mapping[str, Candidate]) -> Race:
        """Time common lowerings, then what becomes of the best one where a class of sites does otherwise."""
        first = _timed(comparison, able)
        best = first.candidates[first.best]
        classes = best.group.classes()
        if len(classes) < 2 or comparison.group.required:
            return first
        varied = self._varied(comparison, best, classes, list(able))
        beside = {first.best: best, **{name: candidate for name, (_, candidate) in varied.items()}}
        timings = _timed(comparison, beside).timings
        better: dict[int, Candidate] = {}
        for number in range(len(classes)):
            names = [name for name, (changed, _) in varied.items() if changed == number]
            fastest = timings.fastest(prefer=[first.best, *names])
            if fastest in varied:
                better[number] = varied[fastest][1]
        mixed = self._mixed(comparison, best, classes, better) if better else None
        if mixed is None or mixed.failure:
            return first
        return _timed(comparison, {first.best: best, "mixed": mixed})

    def _varied(
        self, comparison: Comparison, best: Candidate, classes: Sequence[Sequence[Site]], choices: Sequence[str]
    ) -> dict[str, tuple[int, Candidate]]:
        """Return candidates in which one class of sites is left out or has another lowering, with its number."""
        varied: dict[str, tuple[int, Candidate]] = {}
        for number, changed in itertools.islice(changes(classes, choices), _MOST_VARIATIONS):
            candidate = self._combined(comparison, best.group.replaced(classes[number], changed))
            if not candidate.failure:
                varied[f"change {len(varied)}"] = number, candidate
        return varied

    def _mixed(
        self,
        comparison: Comparison,
        best: Candidate,
        classes: Sequence[Sequence[Site]],
        better: Mapping[int, Candidate],
    ) -> Candidate:
        """Return the candidate in which several classes do what was better for each of them."""
        group = best.group
        for number, candidate in better.items():
            known = {identity(site): site for site in candidate.group.sites}
            changed = [known[identity(site)] for site in classes[number] if identity(site) in known]
            group = group.replaced(classes[number], changed)
        return self._combined(comparison, group)

    def _combined(self, comparison: Comparison, group: Group) -> Candidate:
        return self._runnable(comparison, self._written(comparison, group))

    # -- taking apart ----------------------------------------------------------------------------------------------

    def _failed(
        self, comparison: Comparison, candidates: Sequence[Candidate]
    ) -> tuple[Candidate | None, Sequence[Group]]:
        """Say why no candidate is left; of several sites tell those apart that make every one fail."""
        group, wrong = comparison.group, [candidate for candidate in candidates if candidate.was_written]
        if group.is_single or (wrong and not comparison.checks):
            failures = [each.failure for each in (*wrong, *candidates) if each.failure is not None]
            text = "; ".join(dict.fromkeys(failure.text for failure in failures))
            return Candidate(group, dataclasses.replace(failures[0], text=text)), ()
        if not wrong:
            return None, [Group((site,)) for site in group.sites]
        return self._apart(comparison, self._guilty(comparison, wrong[0].group.sites))

    def _guilty(self, comparison: Comparison, sites: Sequence[Site]) -> list[Site]:
        """Return those of several sites that are wrong by themselves; all, where they are wrong only together."""
        self.context.objected.update(site.key for site in sites)  # what is wrong is not left to the whole model

        def judge(some: Sequence[Site]) -> tuple[Sequence[Site], Sequence[Site]]:
            candidate = self._whole(comparison, Group(tuple(some)))
            if candidate.edit is not None:
                candidate.edit.undo()
            if not candidate.failure:
                return (), ()
            return (some, ()) if len(some) == 1 else ((), some)

        return in_halves(sites, judge, together=list)

    def _apart(self, comparison: Comparison, guilty: Sequence[Site]) -> tuple[None, Sequence[Group]]:
        """Decide anew without some sites, and each of these by itself: what was objected to is not checked briefly."""
        self.context.objected.update(site.key for site in comparison.group.sites)
        rest = comparison.group.without(guilty)
        alone = comparison.group.without(rest)
        return None, [*([Group(rest)] if rest else []), *(Group((site,)) for site in alone)]


def _timed(comparison: Comparison, candidates: Mapping[str, Candidate]) -> Race:
    return Race(candidates, comparison.timings({name: each.runner for name, each in candidates.items()}))
