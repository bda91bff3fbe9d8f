"""Run passes over a program: for each, find sites, let the tuner decide them, record."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...errors import MatchFailure, PassError, PlanError, one_line
from ...runtime.record import Measured, PassTrace
from ...tracing.isolation import shallow_clone
from ...tracing.program import Program, is_on_meta
from ..contract import Pass
from ..pipeline import Decision, Plan
from ..rewriting import Snapshot
from ..sites import Cause, Goal, Numerics, Reason, Refusal, Site, StaleSite
from .context import Progress, RunContext
from .equal_blocks import Block, EqualBlocks, Precedent, kinds_to_time
from .groups import Candidate, Group, grouped, grouped_in_order, narrowed, rewriting, sharing
from .history import History, Rewrite
from .site_filter import admitted, described, found, is_for_evaluation, is_missing, key_of
from .tuner import Tuner
from .whole_model import BatchVerifier, FinalCheck, WholeModel, with_other_sizes

__all__ = ["Manager"]

_LOG = logging.getLogger("fxopt")
_MOST_ROUNDS = 16
"""So often a pass is asked for sites again because what it rewrote overlaps with others that it had found."""
_GIVE_INPUTS = "; give example_inputs=, too"


@dataclass
class Manager:
    """Apply passes to a program, one group of sites after another; note what each took, and what the model gains."""

    context: RunContext
    traces: list[PassTrace] = field(default_factory=list["PassTrace"])
    timings: Mapping[str, Any] | None = None
    memory: Mapping[str, int] | None = None
    _stale: list[Site] = field(default_factory=list["Site"], init=False)
    _equal: EqualBlocks = field(default_factory=EqualBlocks, init=False)
    _original: nn.Module | None = field(default=None, init=False)
    _baseline: nn.Module | None = field(default=None, init=False)
    _settled: Sequence[Rewrite] = field(default=(), init=False)
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
        acting = rewriting(passes)
        for pass_, among in zip(acting, sharing(acting), strict=True):
            costs_time = pass_.goal is Goal.MEMORY and self.program.training
            if costs_time:  # what it costs is not to speak against what others gain
                self._time_whole()
            self.context.budget.begin(among)
            self._observe(pass_, lambda pass_=pass_: self._run_pass(pass_))
            if costs_time and self._baseline is not None:
                self._settled, self._baseline = tuple(self.rewrites), shallow_clone(self.program.model)
        self.context.snapshot.put_back()  # what the last pass did beside its sites; of others it has gone back before
        self._time_whole()
        self.timings = with_other_sizes(self.context, self._original, self.timings)

    def _time_whole(self) -> bool:
        """Time the model as it stands, where passes for speed have run; return whether rewrites were taken back."""
        count = len(self.rewrites)
        if self._baseline is not None:
            self.context.request.on_progress(Progress("timing the whole model"))
            self.timings = WholeModel(self._tuner, self._baseline, self._settled).never_slower()
            if self._settled and self._original is not None:
                self.timings = WholeModel(self._tuner, self._original).timed()
        return len(self.rewrites) < count

    def replay(self, passes: Sequence[Pass], plan: Plan) -> None:
        """Repeat what `plan` says was applied, unverified and untimed, or raise PlanError where a site is not there."""
        plan.check_passes([pass_.name for pass_ in passes])
        for number, pass_ in enumerate(rewriting(passes)):
            wanted = {d.key: d for d in plan.decisions if d.step == number and d.status == "applied"}
            self._observe(pass_, lambda pass_=pass_, wanted=wanted: self._replay_pass(pass_, wanted))
            if missing := next(iter(wanted.values()), None):
                lost = self.program.opaque.get(missing.key.partition(":")[0].replace("(root)", ""))
                why = f": no graph of its module: {lost.reason}" if lost else ""
                why += _GIVE_INPUTS if lost or not self.program.inputs else ""
                place = f"the plan's site {missing.key} of pass '{missing.pass_name}'"
                raise PlanError(f"{place} is not in this model{why}")

    def follow(self, passes: Sequence[Pass], plan: Plan) -> None:
        """Repeat the rewrites that another rank has decided on, verifying each here; what is wrong is left out."""
        plan.check_passes([pass_.name for pass_ in passes])
        for number, pass_ in enumerate(rewriting(passes)):
            decisions = [decision for decision in plan.decisions if decision.step == number]
            self._observe(pass_, lambda pass_=pass_, decisions=decisions: self._follow_pass(pass_, decisions))

    def compare(self, original: nn.Module) -> None:
        """Compare the model, as it stands and in the modes that it has, with the original; undo what is wrong there."""
        if not self.context.checks or not self.program.inputs or not self.rewrites:
            return
        self.context.request.on_progress(Progress("checking the whole model"))
        with self.context.budget.spending():
            while FinalCheck(self._tuner, original).undo_what_is_wrong():
                self.timings = None  # of another model
                if not self._time_whole():
                    return

    def finish(self, passes: Sequence[Pass], plan: Plan | None) -> None:
        """Note where the last passes will act on the finished model: as a plan says, or where they find it now."""
        for number, pass_ in enumerate(passes):
            if pass_.finishes:
                self._observe(pass_, lambda number=number, pass_=pass_: self._note_units(number, pass_, plan))

    def _note_units(self, step: int, pass_: Pass, plan: Plan | None) -> None:
        if plan is not None:
            self.decisions.extend(decision for decision in plan.decisions if decision.step == step)
            return
        for item in found(self.program, pass_, self._tuner.supervised, Snapshot()):
            if isinstance(item, Refusal):
                self.history.refuse(pass_, item)
            else:
                self.history.intend(pass_, item)

    def _observe(self, pass_: Pass, run: Callable[[], None]) -> None:
        start, applied, decided = time.perf_counter(), self.history.applied, len(self.decisions)
        self.history.step = len(self.traces)
        try:
            run()
        except PassError as error:
            if self.context.request.on_failure is not None:
                error.reproducer = self.context.request.on_failure(error)
            raise
        seconds = time.perf_counter() - start
        counts = len(self.decisions) - decided, self.history.applied - applied
        self.traces.append(PassTrace(str(pass_), seconds, *counts))
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
        known: set[str] = set()
        overtaken: list[Site] = []
        for _ in range(_MOST_ROUNDS):
            new = [item for item in self._found(pass_) if key_of(item) not in known]
            known.update(map(key_of, new))
            overtaken = [site for site in overtaken if not any(site.overlaps(item) for item in new)]
            self._decide_all(pass_, new)
            if not self._stale:
                break
            overtaken += self._stale
            self._stale.clear()
        for site in overtaken:
            self.history.refuse(pass_, Refusal(Reason.of(Cause.OVERTAKEN), site.label or site.owner or "(root)"))

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

    def _replay_pass(self, pass_: Pass, wanted: dict[str, Decision]) -> None:
        """Rewrite planned sites in the order in which they landed; those of one graph in a row are written together."""
        while wanted:
            planned = self._planned(pass_, wanted)
            left = len(wanted)
            for group in grouped_in_order(pass_, planned):
                try:
                    edit = self._tuner.apply(pass_, group)
                except StaleSite:
                    break  # it overlaps with one that has just been rewritten: look for it again
                except (MatchFailure, PassError) as failure:
                    place = f"the plan's site {group.key} of pass '{pass_.name}'"
                    why = f"{one_line(failure)}{'' if self.program.inputs else _GIVE_INPUTS}"
                    raise PlanError(f"{place} cannot be rewritten: {why}") from failure
                self.history.repeat(pass_, group, edit, [wanted.pop(site.key) for site in group.sites])
                self._note_change(pass_)
            if len(wanted) == left:
                return

    def _follow_pass(self, pass_: Pass, decisions: Sequence[Decision]) -> None:
        """Rewrite the sites that a pass rewrote elsewhere, where that is right here, too."""
        wanted = {decision.key: decision for decision in decisions if decision.status == "applied"}
        while wanted:
            left, groups = len(wanted), grouped_in_order(pass_, self._planned(pass_, wanted))
            self.context.calls.expect(group.owner for group in groups)
            for group in groups:
                if self._without_stale(pass_, group) is not group:
                    break  # it overlaps with one that has just been rewritten: look for it again
                self._follow_group(pass_, group, wanted)
            self._stale.clear()
            if len(wanted) == left:
                self.history.note([wanted.pop(next(iter(wanted)))], Reason.of(Cause.PLAN, "the site is not there"))
        self.history.decisions.extend(decision for decision in decisions if decision.status != "applied")

    def _follow_group(self, pass_: Pass, group: Group, wanted: dict[str, Decision]) -> None:
        """Rewrite a group as was decided elsewhere; where that is wrong here, those of its sites that are right."""
        made = [wanted[site.key] for site in group.sites]
        candidate = self._tuner.repeat(pass_, group, brief=all(decision.measured.follows for decision in made))
        if candidate.edit is None and not group.is_single:
            for site in group.sites:
                self._follow_group(pass_, Group((site,)), wanted)
            return
        if candidate.failure is not None:
            cause = candidate.failure.cause if candidate.was_written else Cause.PLAN
            self.history.note(made, dataclasses.replace(candidate.failure, cause=cause))
        elif candidate.edit is not None:
            self.history.repeat(pass_, group, candidate.edit, made, verified=True)
            self._note_change(pass_)
        for decision in made:
            del wanted[decision.key]

    def _planned(self, pass_: Pass, wanted: Mapping[str, Decision]) -> list[Site]:
        """Return the next of the planned sites that can be rewritten as the program is now."""
        sites: dict[str, Site] | None = None
        items, planned = list[Site | Refusal](), list[Site]()
        for key, decision in wanted.items():
            if decision.site is not None:
                site = described(self.program, decision)
                item = None if is_missing(site) else self._admitted(pass_, site)
            else:
                if sites is None:
                    items = self._found(pass_)
                    sites = {item.key: item for item in items if isinstance(item, Site)}
                item = sites.get(key) or next(filter(is_for_evaluation, items), None)
            if item is not None and is_for_evaluation(item):
                raise PlanError(f"the plan's sites of pass '{pass_.name}' are for evaluation; call model.eval() first")
            if not isinstance(item, Site):
                break
            planned.append(dataclasses.replace(item, choice=decision.choice))
        return planned

    def _found(self, pass_: Pass) -> list[Site | Refusal]:
        """Return the pass's sites and refusals; those that nothing may be done at are refusals."""
        with self.context.budget.finding_sites():
            items = found(self.program, pass_, self._tuner.supervised, self.context.snapshot)
            return [self._admitted(pass_, item) for item in items]

    def _admitted(self, pass_: Pass, item: Site | Refusal) -> Site | Refusal:
        return admitted(self.program, pass_, item, self.context.trained)

    # -- one group -------------------------------------------------------------------------------------------------

    def _decide(self, pass_: Pass, group: Group) -> None:
        """Do at a group what was done at an equal one, or what the tuner finds best; then decide what that left."""
        group = self._without_stale(pass_, group)
        if not group.sites:
            return
        unchecked = self._tuner.unchecked(pass_, group)
        if unchecked is not None:
            self.history.leave(pass_, unchecked)
            return
        block = self._block(pass_, group)
        if block is not None and self._follow(pass_, group, block):
            return
        candidate, apart = self._tuner.tune(pass_, group)
        if candidate is not None and candidate.edit is not None:
            decision = self.history.keep(pass_, candidate, candidate.edit)
            self._equal.remember(block, decision, candidate.group, candidate.edit)
            self._note_change(pass_)
        elif candidate is not None:
            self._equal.remember(block, self.history.leave(pass_, candidate), group, None)
        for each in apart:
            self._decide(pass_, each)

    def _without_stale(self, pass_: Pass, group: Group) -> Group:
        """Return those of the sites that no rewrite of the same pass has overtaken; the others are looked for again."""
        if type(pass_).rewrite_group is not Pass.rewrite_group or not self._has_landed_at(group):
            return group
        fresh: list[Site] = []
        for site in group.sites:
            try:
                site.check_there()
                fresh.append(site)
            except StaleSite:
                self._stale.append(site)
        return group if len(fresh) == len(group.sites) else Group(tuple(fresh))

    def _has_landed_at(self, group: Group) -> bool:
        """Say whether the pass that is running has rewritten a graph of the group."""
        landed = self.history.landed_at.get(self.history.step, ())
        return any(place.owner in landed for site in group.sites for place in site.places)

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
        figures = like if candidate.verdict is None else {**like, **candidate.figures}
        self.history.keep(pass_, dataclasses.replace(candidate, figures=figures), candidate.edit, first)
        self._note_change(pass_)
        for apart in group.rest(candidate.group):
            self._decide(pass_, apart)
        return True

    def _repeated(self, pass_: Pass, group: Group, block: Block, equal: Precedent | None) -> Candidate:
        """Write a group as was decided elsewhere; what is not equal to that is verified in full."""
        if equal is None:
            return self._tuner.repeat(pass_, group)
        return self._tuner.repeat(pass_, group, brief=True, is_right=lambda edit: block.result_of(edit) == equal.result)

    def _note_change(self, pass_: Pass) -> None:
        if pass_.numerics is Numerics.SEMANTIC:  # within a budget, calls stay good inputs to compare on
            self.context.calls.forget()

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
