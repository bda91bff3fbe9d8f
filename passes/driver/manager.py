"""Run passes over a program: for each, find sites, let the tuner decide them, record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ...errors import MatchFailure, PassError, PlanError
from ...settings import Settings
from ...tracing.program import Program
from ..contract import Pass
from ..pipeline import Decision, Plan
from ..sites import Goal, Refusal, Site
from ..state import twin
from ..timing import TimeBudget
from ..verification import is_on_meta
from .admission import IN_TRAINING, admitted
from .equal_blocks import Block, EqualBlocks, Precedent, kinds_to_time
from .groups import Group, grouped, grouped_in_order, keeps_function
from .history import History, Rewrite
from .record import PassTrace
from .tuner import Candidate, Tuner
from .whole_model import WholeModel

__all__ = ["Manager"]


@dataclass
class Manager:
    """Apply passes to a program, one group of sites after another.

    Attributes:
        program: what is rewritten, in place.
        check: verify every rewrite.
        time: time every rewrite made for speed.
        seed: of verification's random inputs.
        settings: limits from the environment.
        on_failure: called with the error when a pass fails; returns the reproducer's path.
        trained: the modules that the user gave in training mode; by default those that are in it now.
        budget: how long checks and timing may take.
        history: what was decided, and what stands.
        traces: what each pass took and did.
        timings: of the whole model, once a pass for speed has run.
    """

    program: Program
    check: bool = True
    time: bool = True
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    on_failure: Callable[[PassError], str | None] | None = None
    trained: Collection[nn.Module] | None = None
    budget: TimeBudget = field(default_factory=TimeBudget)
    history: History = field(default_factory=History)
    traces: list[PassTrace] = field(default_factory=list["PassTrace"])
    timings: Mapping[str, float] | None = None
    _equal: EqualBlocks = field(default_factory=EqualBlocks, init=False)
    _tuner: Tuner = field(init=False)

    def __post_init__(self) -> None:
        self._tuner = Tuner(
            self.program, check=self.check, time=self.time, seed=self.seed, settings=self.settings, budget=self.budget
        )

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
        """Run `passes` in order.

        Raises:
            PassError: if a pass raises, hangs or returns nonsense; the program is left as it was before that site.
        """
        baseline = twin(self.program.model) if self._times_anything(passes) else None
        for pass_ in passes:
            self._observe(pass_, lambda pass_=pass_: self._run_pass(pass_))
        if baseline is not None:
            self.timings = WholeModel(self._tuner, self.history, baseline).never_slower()

    def replay(self, passes: Sequence[Pass], plan: Plan) -> None:
        """Repeat the rewrites that `plan` says were applied, without verifying or timing them.

        Raises:
            PlanError: if a planned site is not there.
        """
        plan.check_passes([pass_.name for pass_ in passes])
        for number, pass_ in enumerate(passes):
            wanted = {d.key: d for d in plan.decisions if d.step == number and d.status == "applied"}
            self._observe(pass_, lambda pass_=pass_, wanted=wanted: self._replay_pass(pass_, wanted))
            if wanted:
                missing = next(iter(wanted.values()))
                raise PlanError(f"the plan's site {missing.key} of pass '{missing.pass_name}' is not in this model")

    def _observe(self, pass_: Pass, run: Callable[[], None]) -> None:
        start, applied, decided = time.perf_counter(), self.history.applied, len(self.decisions)
        self.history.step = len(self.traces)
        try:
            run()
        except PassError as error:
            if self.on_failure is not None:
                error.reproducer = self.on_failure(error)
            raise
        seconds = time.perf_counter() - start
        counts = len(self.decisions) - decided, self.history.applied - applied
        self.traces.append(PassTrace(str(pass_), seconds, *counts))

    def _times_anything(self, passes: Sequence[Pass]) -> bool:
        can_time = self.time and bool(self.program.inputs) and not is_on_meta(self.program.model)
        return can_time and any(pass_.goal is Goal.SPEED for pass_ in passes)

    # -- one pass --------------------------------------------------------------------------------------------------

    def _run_pass(self, pass_: Pass) -> None:
        found = grouped(pass_, self._found(pass_))
        self._tuner.calls.expect(item.owner for item in found if isinstance(item, Group))
        to_time = kinds_to_time(self.program, found)
        for item, self._tuner.sharing in zip(found, to_time, strict=True):
            if isinstance(item, Refusal):
                self.history.refuse(pass_, item)
            else:
                self._decide(pass_, item)

    def _replay_pass(self, pass_: Pass, wanted: dict[str, Decision]) -> None:
        """Rewrite planned sites in the order in which they landed; those of one graph in a row are written together."""
        found = list(self._found(pass_))
        sites = {item.key: item for item in found if isinstance(item, Site)}
        if any(isinstance(item, Refusal) and item.reason == IN_TRAINING for item in found) and wanted.keys() - sites:
            raise PlanError(f"the plan's sites of pass '{pass_.name}' are for evaluation; call model.eval() first")
        planned = [dataclasses.replace(sites[key], choice=d.choice) for key, d in wanted.items() if key in sites]
        for group in grouped_in_order(pass_, planned):
            try:
                edit = self._tuner.apply(pass_, group)
            except MatchFailure as failure:
                place = f"the plan's site {group.key} of pass '{pass_.name}'"
                raise PlanError(f"{place} cannot be rewritten: {failure}") from failure
            self.history.repeat(pass_, group, edit, [wanted.pop(site.key) for site in group.sites])
            self._note_change(pass_)

    def _found(self, pass_: Pass) -> list[Site | Refusal]:
        """Return the pass's sites and refusals, checked for being that."""
        found = self._tuner.supervised(pass_, lambda: "find", lambda: list(pass_.find(self.program)))
        for item in found:
            if not isinstance(item, (Site, Refusal)):
                raise PassError(
                    f"pass '{pass_.name}': find yielded {type(item).__name__}, expected a Site or a Refusal"
                )
        trained = [m for m in self.program.names.distinct if m.training] if self.trained is None else self.trained
        return [admitted(self.program, pass_, item, trained) for item in found]

    # -- one group -------------------------------------------------------------------------------------------------

    def _decide(self, pass_: Pass, group: Group) -> None:
        """Do at a group what was done at an equal one, or what the tuner finds best; then decide what that left."""
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

    def _block(self, pass_: Pass, group: Group) -> Block | None:
        """Describe the block around a group, where its decision may serve others or be served by another's."""
        if not self._tuner.asks(pass_, group):
            return None
        module, calls = self.program.module(group.owner), self._tuner.calls.of(group.owner)
        return self._equal.block(pass_, self.history.step, group, module, calls)

    def _follow(self, pass_: Pass, group: Group, block: Block) -> bool:
        """Do what was done at an equal group, or at one that takes as long; say whether that has settled it."""
        equal = self._equal.precedent(block)
        precedent = equal or self._equal.timed(block)
        if precedent is None:
            return False
        first, chosen = precedent.decision, precedent.chosen
        like = {**first.figures, "as": first.label}
        if chosen is None:
            self.history.leave(pass_, Candidate(group, first.reason, figures=like))
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
        if not keeps_function(pass_):
            self._tuner.calls.forget()

    # -- what came of it -------------------------------------------------------------------------------------------

    def plan(self, passes: Sequence[Pass]) -> Plan:
        """Return the decisions as a value that `replay` repeats."""
        phase = "train" if self.program.training else "eval"
        return Plan(tuple(str(pass_) for pass_ in passes), phase, tuple(self.decisions))
