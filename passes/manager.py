"""Run passes over a program: find, rewrite, verify, measure, keep or undo, record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..errors import PassError, PlanError, Unsuitable
from ..settings import Settings
from ..tracing.program import Program
from .base import Goal, Numerics, Pass, Refusal, Site
from .copying import twin
from .edit import Edit
from .equal_blocks import Block, EqualBlocks, Precedent
from .facts import is_on_meta
from .plan import Decision, Plan
from .site_calls import SiteCalls
from .site_trial import SiteTrial
from .state_map import StateMap
from .supervision import supervised
from .volatile import without_volatile
from .whole_model import Landed, WholeModel

__all__ = ["Landed", "Manager", "PassTrace"]


@dataclass(frozen=True)
class PassTrace:
    """What one pass took and did.

    Attributes:
        name: the pass as text, options included.
        seconds: verification and measurement included.
        decided: how many sites and refusals it had.
        applied: how many rewrites of it stand.
    """

    name: str
    seconds: float
    decided: int
    applied: int


@dataclass
class Manager:
    """Apply passes to a program, site by site.

    Attributes:
        program: what is rewritten, in place.
        check: verify every rewrite.
        time: time every rewrite made for speed.
        seed: of verification's random inputs.
        settings: limits from the environment.
        on_failure: called with the error when a pass fails; returns the reproducer's path.
    """

    program: Program
    check: bool = True
    time: bool = True
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    on_failure: Callable[[PassError], str | None] | None = None
    decisions: list[Decision] = field(default_factory=list["Decision"])
    landed: list[Landed] = field(default_factory=list["Landed"])
    traces: list[PassTrace] = field(default_factory=list["PassTrace"])
    timings: Mapping[str, float] | None = None
    _equal: EqualBlocks = field(default_factory=EqualBlocks, init=False)
    _calls: SiteCalls = field(init=False)

    def __post_init__(self) -> None:
        self._calls = SiteCalls(self.program, ())

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
            self.timings = WholeModel(self, baseline).never_slower()

    def replay(self, passes: Sequence[Pass], plan: Plan) -> None:
        """Repeat the rewrites that `plan` says were applied, without verifying or timing them.

        Raises:
            PlanError: if a planned site is not there.
        """
        _check_plan(passes, plan)
        for number, pass_ in enumerate(passes):
            wanted = {d.key: d for d in plan.decisions if d.step == number and d.status == "applied"}
            self._observe(pass_, lambda pass_=pass_, wanted=wanted: self._replay_pass(pass_, wanted))
            if wanted:
                missing = next(iter(wanted.values()))
                raise PlanError(f"the plan's site {missing.key} of pass '{missing.pass_name}' is not in this model")

    def _observe(self, pass_: Pass, run: Callable[[], None]) -> None:
        start, applied, decided = time.perf_counter(), len(self.landed), len(self.decisions)
        try:
            run()
        except PassError as error:
            if self.on_failure is not None:
                error.reproducer = self.on_failure(error)
            raise
        seconds = time.perf_counter() - start
        self.traces.append(PassTrace(str(pass_), seconds, len(self.decisions) - decided, len(self.landed) - applied))

    def _times_anything(self, passes: Sequence[Pass]) -> bool:
        can_time = self.time and bool(self.program.inputs) and not is_on_meta(self.program.model)
        return can_time and any(pass_.goal is Goal.SPEED for pass_ in passes)

    # -- one pass --------------------------------------------------------------------------------------------------

    def _run_pass(self, pass_: Pass) -> None:
        found = self._found(pass_)
        self._calls = SiteCalls(self.program, (item.home for item in found if isinstance(item, Site)))
        for item in found:
            if isinstance(item, Refusal):
                self._refuse(pass_, item)
            else:
                self._land(pass_, item)

    def _replay_pass(self, pass_: Pass, wanted: dict[str, Decision]) -> None:
        for item in self._found(pass_):
            decision = None if isinstance(item, Refusal) else wanted.pop(item.key, None)
            if decision is not None and isinstance(item, Site):
                site = dataclasses.replace(item, choice=decision.choice)
                self._keep(pass_, site, self._reapply(pass_, site), decision)

    def _reapply(self, pass_: Pass, site: Site) -> Edit:
        try:
            return self.apply(pass_, site)
        except Unsuitable as refusal:
            raise PlanError(
                f"the plan's site {site.key} of pass '{pass_.name}' cannot be rewritten: {refusal}"
            ) from refusal

    def _found(self, pass_: Pass) -> list[Site | Refusal]:
        """Return the pass's sites and refusals, checked for being that."""
        found = self._supervised(pass_, "find", lambda: list(pass_.find(self.program)))
        for item in found:
            if not isinstance(item, (Site, Refusal)):
                raise PassError(
                    f"pass '{pass_.name}': find yielded {type(item).__name__}, expected a Site or a Refusal"
                )
        return [without_volatile(self.program, item) for item in found]

    def _supervised(self, pass_: Pass, step: str, action: Callable[[], Any]) -> Any:
        return supervised(action, what=f"pass '{pass_.name}' ({step})", seconds=self.settings.pass_timeout)

    # -- one site --------------------------------------------------------------------------------------------------

    def _land(self, pass_: Pass, site: Site) -> None:
        """Try every lowering of a site; keep the best that is right and pays, or leave the site as it was."""
        block = self._block(pass_, site)
        precedent = self._equal.precedent(block)
        if block is not None and precedent is not None and self._follow(pass_, site, block, precedent):
            return
        trial = self.trial(pass_, site)
        if not trial.questions:
            self._land_unquestioned(pass_, trial)
            return
        edit = self._land_tried(pass_, trial)
        self._equal.remember(block, self.decisions[-1], edit)

    def _land_tried(self, pass_: Pass, trial: SiteTrial) -> Edit | None:
        """Let a trial decide; return the rewrite where it lands."""
        site = trial.site
        attempts, wrong, unsuitable = trial.run()
        if not attempts:
            reasons = dict.fromkeys((*wrong.values(), *unsuitable.values()))
            self._decide(pass_, site, "undone" if wrong else "refused", reason="; ".join(reasons))
            return None
        choice, figures, reason = trial.choose(attempts)
        if reason is not None:
            self._decide(pass_, site, "undone", reason=reason, figures=figures)
            return None
        chosen = dataclasses.replace(site, choice=choice)
        decision = self._decision(pass_, chosen, "applied", figures=figures)
        edit = self.apply(pass_, chosen)
        self._keep(pass_, chosen, edit, decision)
        return edit

    def _block(self, pass_: Pass, site: Site) -> Block | None:
        """Describe the block around a site, where its decision may serve others or be served by another's."""
        calls = self._calls.of(site.home) if self.check or self.time else ()
        if not calls:
            return None
        return self._equal.block(pass_, len(self.traces), site, self.program.module(site.home), calls)

    def _follow(self, pass_: Pass, site: Site, block: Block, precedent: Precedent) -> bool:
        """Do at a site what was done at an equal one; say whether that has settled it."""
        first = precedent.decision
        like = {**first.figures, "as": first.label}
        if first.status != "applied":
            self._decide(pass_, site, first.status, reason=first.reason, figures=like)
            return True
        chosen = dataclasses.replace(site, choice=first.choice)
        trial = self.trial(pass_, chosen, time=False, brief=True)
        try:
            edit = self.apply(pass_, chosen)
        except Unsuitable:
            return False
        is_alike = block.result_of(edit) == (precedent.result, precedent.state_map)
        verdict = trial.verdict(edit) if is_alike else None
        if not is_alike or (verdict is not None and not verdict.ok):
            edit.undo()
            return False
        figures = like if verdict is None else {**like, **trial.figures(verdict)}
        self._keep(pass_, chosen, edit, self._decision(pass_, chosen, "applied", figures=figures), first)
        return True

    def trial(self, pass_: Pass, site: Site, *, time: bool = True, brief: bool = False) -> SiteTrial:
        """Prepare to try the lowerings of a site, now that the program is as it is."""
        return SiteTrial(
            self.program, pass_, site, self.apply, self._calls.of(site.home) if self.check or self.time else (),
            check=self.check, time=self.time and time, seed=self.seed, brief=brief,
        )  # fmt: skip

    def _land_unquestioned(self, pass_: Pass, trial: SiteTrial) -> None:
        """Apply the first lowering that can be written, where nothing is to be checked or timed."""
        reasons: list[str] = []
        for choice in trial.site.choices or (None,):
            site = dataclasses.replace(trial.site, choice=choice)
            try:
                edit = self.apply(pass_, site)
            except Unsuitable as refusal:
                reasons.append(str(refusal))
                continue
            decision = self._decision(pass_, site, "applied", figures={"checked": trial.unchecked()})
            self._keep(pass_, site, edit, decision)
            return
        self._decide(pass_, trial.site, "refused", reason="; ".join(dict.fromkeys(reasons)))

    def apply(self, pass_: Pass, site: Site) -> Edit:
        """Rewrite a site; what fails is undone before the error goes on."""
        edit = Edit(self.program, site, pass_.name)
        try:
            self._supervised(pass_, f"site {site.key}", lambda: (pass_.rewrite(site, edit), edit.finish()))
        except BaseException:
            edit.undo()
            raise
        return edit

    def _keep(self, pass_: Pass, site: Site, edit: Edit, decision: Decision, evidence: Decision | None = None) -> None:
        self.decisions.append(decision)
        self.landed.append(Landed(pass_, site, edit, decision, evidence or decision))
        if pass_.numerics in (Numerics.APPROXIMATE, Numerics.SEMANTIC):
            self.forget_calls()

    def _refuse(self, pass_: Pass, refusal: Refusal) -> None:
        at = refusal.at.name if isinstance(refusal.at, fx.Node) else refusal.at
        self.decisions.append(
            Decision(
                step=len(self.traces), pass_name=pass_.name, key=at, label=at, status="refused", reason=refusal.reason
            )
        )

    def _decide(
        self, pass_: Pass, site: Site, status: str, *, reason: str, figures: Mapping[str, Any] | None = None
    ) -> None:
        self.decisions.append(self._decision(pass_, site, status, reason=reason, figures=figures))

    def _decision(
        self, pass_: Pass, site: Site, status: str, *, reason: str = "", figures: Mapping[str, Any] | None = None
    ) -> Decision:
        return Decision(
            step=len(self.traces), pass_name=pass_.name, key=site.key, label=site.label or site.home or "(root)",
            status=status, reason=reason, choice=site.choice, detail=site.detail, figures=dict(figures or {}),
        )  # fmt: skip

    def forget_calls(self) -> None:
        """Record anew how modules are called: the function has changed."""
        self._calls.forget()

    # -- what came of it -------------------------------------------------------------------------------------------

    def replace_decision(self, old: Decision, new: Decision) -> None:
        """Put another decision in the place of one that was changed afterwards."""
        self.decisions[next(i for i, decision in enumerate(self.decisions) if decision is old)] = new

    def changed_graphs(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the text of each rewritten graph, before the first rewrite that stands and now."""
        before: dict[str, str] = {}
        for landed in self.landed:
            for name, text in landed.edit.graphs_before().items():
                before.setdefault(name, text)
        now = self.program.graphs
        return before, {name: str(now[name]) for name in before if name in now}

    def state_map(self) -> StateMap:
        """Return the effect of all rewrites on names and tensors, from the root's point of view."""
        total = StateMap()
        for landed in self.landed:
            total = total.compose(landed.edit.state_map().below(landed.site.home))
        return total

    def plan(self, passes: Sequence[Pass]) -> Plan:
        """Return the decisions as a value that `replay` repeats."""
        phase = "train" if self.program.training else "eval"
        return Plan(tuple(str(pass_) for pass_ in passes), phase, tuple(self.decisions))

    def checked(self) -> str:
        """Say how the rewrites that stand were checked."""
        ways = dict.fromkeys(str(landed.decision.figures.get("checked", "replayed")) for landed in self.landed)
        return ", ".join(ways) or "nothing was rewritten"


def _check_plan(passes: Sequence[Pass], plan: Plan) -> None:
    """Make sure that what a plan applied belongs to these passes.

    Raises:
        PlanError: if it was made for others.
    """
    names = [pass_.name for pass_ in passes]
    for decision in plan.decisions:
        if decision.status == "applied" and names[decision.step : decision.step + 1] != [decision.pass_name]:
            raise PlanError(
                f"the plan is for other passes: '{decision.pass_name}' is number {decision.step + 1} in it, "
                f"and here they are {', '.join(names) or 'none'}"
            )
