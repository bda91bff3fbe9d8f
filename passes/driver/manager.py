"""Run passes over a program: for each, find sites, let the tuner decide them, record."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from ...errors import PassError
from ...runtime.record import Decision, Measured, PassTrace, Plan
from ...tracing.isolation import shallow_clone
from ...tracing.program import Program, is_on_meta
from ..contract import Pass
from ..rewriting import Snapshot
from ..sites import Cause, Goal, Reason, Refusal, Site
from ..timing import Interval, Stage
from .context import Check, Progress, RunContext
from .equal_blocks import Block, EqualBlocks, Precedent, kinds_to_time
from .groups import Candidate, Group, grouped, narrowed, rewriting, sharing
from .history import History, Rewrite
from .replay import Replay
from .site_filter import admitted, found, key_of
from .tuner import Tuner
from .whole_model import BatchVerifier, Contest, FinalCheck, WholeModel, with_other_sizes

__all__ = ["Manager"]

_LOG = logging.getLogger("fxopt")
_MOST_ROUNDS = 16
"""So often a pass is asked for sites again because what it rewrote overlaps with others that it had found."""


@dataclass
class Manager:
    """Apply passes to a program, one group of sites after another; note what each took, and what the model gains."""

    context: RunContext
    traces: list[PassTrace] = field(default_factory=list["PassTrace"])
    timings: Mapping[str, Any] | None = None
    memory: Mapping[str, int] | None = None
    rounding: float = 0.0  # what it did to the results of the whole model, of their scale, where that was looked at
    _stale: list[Site] = field(default_factory=list["Site"], init=False)
    _equal: EqualBlocks = field(default_factory=EqualBlocks, init=False)
    _original: nn.Module | None = field(default=None, init=False)
    _baseline: nn.Module | None = field(default=None, init=False)
    _in_baseline: Sequence[Rewrite] = field(default=(), init=False)
    _tuner: Tuner = field(init=False)

    def __post_init__(self) -> None:
        self._tuner = Tuner(self.context)

    @property
    def program(self) -> Program:
        return self.context.program

    @property
    def history(self) -> History:
        return self.context.history

    @property
    def decisions(self) -> list[Decision]:
        """Return what was decided at each site, in order."""
        return self.history.decisions

    @property
    def rewrites(self) -> list[Rewrite]:
        """Return the rewrites that stand."""
        return self.history.rewrites

    # -- whole runs ------------------------------------------------------------------------------------------------

    def run(self, passes: Sequence[Pass]) -> None:
        """Run `passes` in order, but those that act on the finished model; at a PassError its site is undone."""
        self._baseline = self._original = shallow_clone(self.program.model) if self._times_anything(passes) else None
        contest = Contest(self._tuner, rewriting(passes))
        self._run_all(contest, range(len(contest.passes)))
        self.context.snapshot.put_back()  # what the last pass did beside its sites; of others it has gone back before
        traces = list(self.traces)
        if self._baseline is not None and not contest.decide(partial(self._run_all, contest)):
            self.traces = traces
        self.context.snapshot.put_back()
        self._time_and_run_without(contest)
        with self.context.budget.spending(Stage.WHOLE):
            self.timings = with_other_sizes(self.context, self._original, self.timings)

    def _run_all(self, contest: Contest, steps: Sequence[int]) -> None:
        """Run the passes of these numbers, each within its share of the time."""
        among = sharing(contest.passes)
        for step in steps:
            pass_ = contest.passes[step]
            costs_time = pass_.goal is Goal.MEMORY and self.program.training
            if costs_time:  # what it costs is not to speak against what others gain
                self._time_whole()
            count, is_contested = among[step] + contest.is_due, pass_.contested and step + 1 < len(contest.passes)
            self.context.budget.begin_pass(count, owed=not pass_.only_speeds_up, contested=is_contested)
            self._observe(step, pass_, partial(self._run_pass, pass_))
            if costs_time and self._baseline is not None:
                self._in_baseline, self._baseline = tuple(self.rewrites), shallow_clone(self.program.model)
        self.context.budget.begin_pass()  # what follows is of no pass

    def _time_and_run_without(self, contest: Contest) -> None:
        """Time the whole model; where what a pass took goes, or gains little, let those behind it run without that."""
        before = tuple(self.rewrites)
        self._time_whole()
        if self._baseline is None:
            return
        timings, traces, gain = self.timings, list(self.traces), self._speed.mid
        earlier = contest.run_without(before, gain, partial(self._run_all, contest))
        if earlier is not None:
            self.context.snapshot.put_back()
            self._time_whole()  # where something goes of what was found now, nothing runs a third time
        if earlier is None or not contest.choose(earlier, gain, self._speed):
            self.timings, self.traces = timings, traces

    @property
    def _speed(self) -> Interval:
        """Return how many times as fast the whole model is as it stands: 1 where nothing stands that was timed."""
        return Interval.of(self.timings) if self.timings else Interval(1.0, 1.0, 1.0)

    def _time_whole(self) -> bool:
        """Time the model as it stands, where passes for speed have run; return whether rewrites were taken back."""
        count = len(self.rewrites)
        if self._baseline is not None:
            self.context.request.on_progress(Progress("timing the whole model"))
            with self.context.budget.spending(Stage.WHOLE):
                self.timings = WholeModel(self._tuner, self._baseline, self._in_baseline).never_slower()
                if self._in_baseline and self._original is not None:
                    self.timings = WholeModel(self._tuner, self._original).timed()
        return len(self.rewrites) < count

    def repeat(self, passes: Sequence[Pass], plan: Plan, *, verified: bool) -> None:
        """Rewrite what `plan` says was applied, `verified` here or as it is; see `Replay`."""
        plan.check_passes([pass_.name for pass_ in passes])
        for number, pass_ in enumerate(rewriting(passes)):
            decisions = [decision for decision in plan.decisions if decision.step == number]
            replay = Replay(self._tuner, pass_, decisions)
            self._observe(number, pass_, replay.verified if verified else replay.unverified)

    def compare(self, original: nn.Module) -> None:
        """Compare the model, as it stands and in the modes that it has, with the original; undo what is wrong there."""
        if not self.context.checks or not self.program.inputs or not self.rewrites:
            return
        self.context.request.on_progress(Progress("checking the whole model"))
        with self.context.budget.spending(Stage.COMPARING):
            check = FinalCheck(self._tuner, original)
            while check.undo_what_is_wrong():
                self.timings = None  # of another model
                if not self._time_whole():
                    break
            self.rounding = check.seen_rounding

    def settle(self) -> None:
        """Let passes finish what stands, while there is time."""
        for rewrite in self.rewrites:
            if self.context.budget.left > 0.0:
                self._tuner.settle(rewrite.pass_, rewrite.group)

    def is_right(self, original: nn.Module, *, brief: bool, rounding: float) -> bool:
        """Compare and undo nothing; `brief`: on the example calls alone, for an equal model was compared on others, and
        `rounding` was seen there.
        """
        if not self.context.checks or not self.rewrites:
            return True
        self.context.request.on_progress(Progress("checking the whole model"))
        check = FinalCheck(self._tuner, original, brief=brief, rounding=rounding)
        is_right, self.rounding = check.is_right(), check.seen_rounding
        return is_right

    def finish(self, passes: Sequence[Pass], plan: Plan | None) -> None:
        """Note where the last passes will act on the finished model: as a plan says, or where they find it now."""
        for number, pass_ in enumerate(passes):
            if pass_.finishes:
                self._observe(number, pass_, partial(self._note_units, number, pass_, plan))

    def _note_units(self, step: int, pass_: Pass, plan: Plan | None) -> None:
        if plan is not None:
            self.decisions.extend(decision for decision in plan.decisions if decision.step == step)
            return
        for item in found(self._tuner, pass_, Snapshot()):
            if isinstance(item, Refusal):
                self.history.refuse(pass_, item)
            else:
                self.history.intend(pass_, item)

    def _observe(self, step: int, pass_: Pass, run: Callable[[], None]) -> None:
        """Run a pass, perhaps once more, and note what it took and did."""
        clock = self.context.budget.clock  # reports lay what passes took beside the time that was spent
        start, applied, decided = clock(), self.history.applied, len(self.decisions)
        self.history.step = step
        try:
            run()
        except PassError as error:
            ends_all = step == len(self.traces)  # where it runs once more, the first model stays
            if ends_all and self.context.request.on_failure is not None:
                error.reproducer = self.context.request.on_failure(error)
            raise
        seconds = clock() - start
        counts = len(self.decisions) - decided, self.history.applied - applied
        earlier = sum(trace.seconds for trace in self.traces[step : step + 1])
        self.traces[step : step + 1] = [PassTrace(str(pass_), earlier + seconds, *counts)]
        _LOG.info("%s: %d decided, %d applied, %.2f s", pass_, *counts, seconds)
        for each in self.decisions[decided:]:
            _LOG.debug("%s at %s: %s %s", each.pass_name, each.label, each.status, each.choice or each.reason)

    def _times_anything(self, passes: Sequence[Pass]) -> bool:
        if not self.context.request.measure or not self.program.inputs or is_on_meta(self.program.model):
            return False
        return any(pass_.goal is Goal.SPEED for pass_ in passes)

    # -- one pass --------------------------------------------------------------------------------------------------

    def _run_pass(self, pass_: Pass) -> None:
        """Decide what a pass finds; where what landed overlaps with other sites, look again."""
        if self.context.check_of(pass_) is Check.NEVER:
            if not self._is_done_with(pass_):
                self.history.skip(pass_, Reason(Cause.NOT_CHECKED, self.context.budget.values))
            return
        known: set[str] = set()
        overtaken: list[Site] = []
        for _ in range(_MOST_ROUNDS):
            new = [item for item in admitted(self._tuner, pass_) if key_of(item) not in known]
            known.update(map(key_of, new))
            overtaken = [site for site in overtaken if not any(site.overlaps(item) for item in new)]
            self._decide_all(pass_, new)
            if not self._stale:
                break
            overtaken += self._stale
            self._stale.clear()
            if self.context.check_of(pass_) is Check.NEVER:
                break
        for site in overtaken:
            self.history.refuse(pass_, Refusal(Reason.of(Cause.OVERTAKEN), site.label or site.owner or "(root)"))

    def _is_done_with(self, pass_: Pass) -> bool:
        """Say whether another pass, whose rewrites stand, has done the work of this one and left it no place."""
        if not any(pass_.name in rewrite.pass_.includes for rewrite in self.rewrites):
            return False
        return not any(isinstance(item, Site) for item in admitted(self._tuner, pass_))

    def _decide_all(self, pass_: Pass, items: Sequence[Site | Refusal]) -> None:
        groups = narrowed(self.program, pass_, grouped(pass_, items), self.context.budget)
        self.context.calls.expect(item.owner for item in groups if isinstance(item, Group))
        groups = BatchVerifier(self._tuner).undecided(pass_, groups)
        to_time = kinds_to_time(self.program, groups) if self.context.request.measure else [1] * len(groups)
        told = _announced(groups, pass_.name, self.context.request.on_progress)
        for item, self._tuner.sharing in zip(told, to_time, strict=True):
            if isinstance(item, Refusal):
                self.history.refuse(pass_, item)
            else:
                self._decide(pass_, item)

    # -- one group -------------------------------------------------------------------------------------------------

    def _decide(self, pass_: Pass, group: Group) -> None:
        """Do at a group what was done at an equal one, or what the tuner finds best; then decide what that left."""
        overtaken = self.history.overtaken(pass_, group)
        self._stale += overtaken  # they are looked for again
        group = Group(tuple(site for site in group.sites if site not in overtaken)) if overtaken else group
        if not group.sites:
            return
        if self.context.check_of(pass_, group) is Check.NEVER:
            self.history.leave(pass_, self._tuner.out_of_time(group))
            return
        block = self._block(pass_, group)
        if block is not None and self._follow(pass_, group, block):
            return
        candidate, apart = self._tuner.tune(pass_, group)
        if candidate is not None and candidate.edit is not None:
            decision = self.history.keep(pass_, candidate, candidate.edit)
            self._equal.remember(block, decision, candidate.group, candidate.edit)
            self.context.note_change(pass_)
        elif candidate is not None:
            self._equal.remember(block, self.history.leave(pass_, candidate), group, None)
        for each in apart:
            self._decide(pass_, each)

    def _block(self, pass_: Pass, group: Group) -> Block | None:
        """Describe the block around a group, where its decision may serve others or be served by another's."""
        if not self.context.asks(pass_, group):
            return None
        module, calls = self.program.module(group.owner), self.context.calls.of(group.owner)
        return self._equal.block(pass_, self.history.step, group, module, calls)

    def _follow(self, pass_: Pass, group: Group, block: Block) -> bool:
        """Do what was done at an equal group, or at one that takes as long; say whether that has settled it."""
        equal = self._equal.precedent(block)
        precedent = equal or self._equal.timed(block)
        if precedent is None:
            return False
        first, chosen = precedent.decision, precedent.chosen
        like = {**first.figures, **Measured(follows=first.label).figures()}
        if chosen is None:
            reason = Reason(Cause(first.cause), first.values, first.reason)
            self.history.leave(pass_, Candidate(group, reason, figures=like))
            return True
        candidate = self._repeated(pass_, group.chosen_as(chosen), block, equal)
        if candidate.edit is None:
            return False
        figures = {**like, **candidate.figures}
        self.history.keep(pass_, dataclasses.replace(candidate, figures=figures), candidate.edit, first)
        self.context.note_change(pass_)
        for apart in group.rest(candidate.group):
            self._decide(pass_, apart)
        return True

    def _repeated(self, pass_: Pass, group: Group, block: Block, equal: Precedent | None) -> Candidate:
        """Write a group as was decided elsewhere; what is not equal to that is verified in full."""
        if equal is not None:
            known = equal.result
            candidate = self._tuner.repeat(
                pass_, group, brief=True, is_right=lambda edit: block.result_of(edit) == known
            )
            if candidate.edit is not None:
                return candidate
        return self._tuner.repeat(pass_, group)

    # -- what came of it -------------------------------------------------------------------------------------------

    def plan(self, passes: Sequence[Pass]) -> Plan:
        """Return the decisions as a value that `replay` repeats."""
        return Plan(tuple(map(str, passes)), "train" if self.program.training else "eval", tuple(self.decisions))


def _announced(
    found: Sequence[Group | Refusal], pass_name: str, tell: Callable[[Progress], None]
) -> Iterator[Group | Refusal]:
    """Yield what a pass found, and tell before each group how many sites are decided."""
    total, done = sum(len(item.sites) for item in found if isinstance(item, Group)), 0
    for item in found:
        if isinstance(item, Group):
            tell(Progress(pass_name, done, total))
            done += len(item.sites)
        yield item
