"""Run passes over a program: find, rewrite, verify, measure, keep or undo, record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..errors import MatchFailure, PassError, PlanError
from ..settings import Settings
from ..tracing.program import Program
from .admission import admitted
from .analyses import is_on_meta
from .base import Goal, Numerics, Pass, Refusal, Site
from .copying import twin
from .edit import Edit
from .equal_blocks import Block, EqualBlocks, Precedent
from .joint_trial import JointTrial
from .plan import Decision, Plan
from .site_calls import SiteCalls
from .site_trial import Failed, SiteTrial
from .state_map import StateMap
from .supervision import supervised
from .together import grouped, left_of, rows, together
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
        plan.check_passes([pass_.name for pass_ in passes])
        for number, pass_ in enumerate(passes):
            wanted = {d.key: d for d in plan.decisions if d.step == number and d.status == "applied"}
            self._observe(pass_, lambda pass_=pass_, wanted=wanted: self._replay_pass(pass_, wanted))
            if wanted:
                missing = next(iter(wanted.values()))
                raise PlanError(f"the plan's site {missing.key} of pass '{missing.pass_name}' is not in this model")

    def _observe(self, pass_: Pass, run: Callable[[], None]) -> None:
        start, applied, decided = time.perf_counter(), self._standing(), len(self.decisions)
        try:
            run()
        except PassError as error:
            if self.on_failure is not None:
                error.reproducer = self.on_failure(error)
            raise
        seconds = time.perf_counter() - start
        self.traces.append(PassTrace(str(pass_), seconds, len(self.decisions) - decided, self._standing() - applied))

    def _standing(self) -> int:
        return sum(len(landed.recorded) for landed in self.landed)

    def _times_anything(self, passes: Sequence[Pass]) -> bool:
        can_time = self.time and bool(self.program.inputs) and not is_on_meta(self.program.model)
        return can_time and any(pass_.goal is Goal.SPEED for pass_ in passes)

    # -- one pass --------------------------------------------------------------------------------------------------

    def _run_pass(self, pass_: Pass) -> None:
        found = grouped(pass_, self.found(pass_))
        self._calls = SiteCalls(self.program, (item.home for item in found if isinstance(item, Site)))
        for item in found:
            if isinstance(item, Refusal):
                self._refuse(pass_, item)
            else:
                self._land(pass_, item)

    def _replay_pass(self, pass_: Pass, wanted: dict[str, Decision]) -> None:
        """Rewrite planned sites in the order in which they landed; those of one graph in a row are written together."""
        sites = {item.key: item for item in self.found(pass_) if isinstance(item, Site)}
        planned = [
            (decision, dataclasses.replace(sites[key], choice=decision.choice))
            for key, decision in wanted.items()
            if key in sites
        ]
        for row in rows(pass_, planned):
            site = together([site for _, site in row])
            decisions = [wanted.pop(decision.key) for decision, _ in row]
            self._keep(pass_, site, self._reapply(pass_, site), decisions[0], recorded=decisions)

    def _reapply(self, pass_: Pass, site: Site) -> Edit:
        try:
            return self.apply(pass_, site)
        except MatchFailure as refusal:
            raise PlanError(
                f"the plan's site {site.key} of pass '{pass_.name}' cannot be rewritten: {refusal}"
            ) from refusal

    def found(self, pass_: Pass) -> list[Site | Refusal]:
        """Return the pass's sites and refusals, checked for being that."""
        found = self._supervised(pass_, "find", lambda: list(pass_.find(self.program)))
        for item in found:
            if not isinstance(item, (Site, Refusal)):
                raise PassError(
                    f"pass '{pass_.name}': find yielded {type(item).__name__}, expected a Site or a Refusal"
                )
        return [admitted(self.program, item) for item in found]

    def _supervised(self, pass_: Pass, step: str | Callable[[], str], action: Callable[[], Any], times: int = 1) -> Any:
        def what() -> str:
            return f"pass '{pass_.name}' ({step if isinstance(step, str) else step()})"

        return supervised(action, what=what, seconds=self.settings.pass_timeout * times)

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
        elif isinstance(trial, JointTrial):
            self._land_together(pass_, trial, block)
        else:
            self._equal.remember(block, *self._land_tried(pass_, trial))

    def _land_tried(self, pass_: Pass, trial: SiteTrial) -> tuple[Decision, Site | None, Edit | None]:
        """Let a trial decide; return the decision, and the rewrite where it lands."""
        site = trial.site
        attempts, wrong, unsuitable = trial.run()
        if not attempts:
            reasons = dict.fromkeys((*wrong.values(), *unsuitable.values()))
            return self._decide(pass_, site, "undone" if wrong else "refused", reason="; ".join(reasons)), None, None
        kept, figures, reason = trial.choose(attempts)
        if reason is not None:
            return self._decide(pass_, site, "undone", reason=reason, figures=figures), None, None
        edit = self.apply(pass_, kept.site)
        return (
            self._keep(pass_, kept.site, edit, self._decision(pass_, kept.site, "applied", figures=figures)),
            kept.site,
            edit,
        )

    def _land_together(self, pass_: Pass, trial: JointTrial, block: Block | None) -> None:
        """Let several sites of one graph be decided as one, and what does not go with the others by itself."""
        outcome = trial.decide()
        if outcome.reason:
            decision = self._decide(pass_, trial.site, "undone", reason=outcome.reason, figures=outcome.figures)
            self._equal.remember(block, decision)
        elif outcome.site is not None and outcome.edit is not None:
            decision = self._decision(pass_, outcome.site, "applied", figures=outcome.figures)
            self._keep(pass_, outcome.site, outcome.edit, decision)
            self._equal.remember(block, decision, outcome.site, outcome.edit)
        for site in outcome.apart:
            self._land(pass_, site)

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
        chosen = precedent.at(site)
        if chosen is None:
            return False
        trial = self.trial(pass_, chosen, time=False, brief=True)
        try:
            edit = self.apply(pass_, chosen)
        except MatchFailure:
            return False
        is_alike = block.result_of(edit) == (precedent.result, precedent.state_map)
        verdict = trial.verdict(edit) if is_alike else None
        if not is_alike or (verdict is not None and not verdict.ok):
            edit.undo()
            return False
        figures = like if verdict is None else {**like, **trial.figures(verdict)}
        self._keep(pass_, chosen, edit, self._decision(pass_, chosen, "applied", figures=figures), first)
        for apart in left_of(site, chosen):
            self._land(pass_, apart)
        return True

    def trial(self, pass_: Pass, site: Site, *, time: bool = True, brief: bool = False) -> SiteTrial:
        """Prepare to try the lowerings of a site, now that the program is as it is."""
        kind = JointTrial if site.parts else SiteTrial
        return kind(
            self.program, pass_, site, self.apply, self._calls.of(site.home) if self.check or self.time else (),
            check=self.check, time=self.time and time, seed=self.seed, brief=brief,
        )  # fmt: skip

    def _land_unquestioned(self, pass_: Pass, trial: SiteTrial) -> None:
        """Apply the first lowering that can be written, where nothing is to be checked or timed."""
        reasons: list[str] = []
        for choice in trial.site.choices or (None,):
            found = trial.applied(choice)
            if isinstance(found, Failed):
                reasons.append(found.reason)
                continue
            site, edit = found
            decision = self._decision(pass_, site, "applied", figures={"checked": trial.unchecked()})
            self._keep(pass_, site, edit, decision)
            for apart in left_of(trial.site, site):
                self._land(pass_, apart)
            return
        for part in trial.site.parts:
            self._land(pass_, part)
        if not trial.site.parts:
            self._decide(pass_, trial.site, "refused", reason="; ".join(dict.fromkeys(reasons)))

    def apply(self, pass_: Pass, site: Site) -> Edit:
        """Rewrite a site, or several of one graph together; what fails is undone before the error goes on."""
        edit = Edit(self.program, site, pass_.name)

        def rewrite() -> None:
            if site.parts:
                pass_.rewrite_together(site.parts, edit)
            else:
                pass_.rewrite(site, edit)
            edit.finish()

        try:
            self._supervised(pass_, lambda: f"site {edit.site.key}", rewrite, times=len(site.parts) or 1)
        except MatchFailure as refusal:
            refusal.site = edit.site if edit.site.parts == () else None
            edit.undo()
            raise
        except BaseException:
            edit.undo()
            raise
        return edit

    def _keep(
        self,
        pass_: Pass,
        site: Site,
        edit: Edit,
        decision: Decision,
        evidence: Decision | None = None,
        recorded: Sequence[Decision] = (),
    ) -> Decision:
        """Let a rewrite stand, and record the decision: at several sites, one for each of them."""
        recorded = recorded or self._parted(decision, site)
        self.decisions.extend(recorded)
        self.landed.append(Landed(pass_, site, edit, decision, evidence or decision, list(recorded)))
        if pass_.numerics in (Numerics.APPROXIMATE, Numerics.SEMANTIC):
            self.forget_calls()
        return decision

    def _refuse(self, pass_: Pass, refusal: Refusal) -> None:
        at = refusal.at.name if isinstance(refusal.at, fx.Node) else refusal.at
        self.decisions.append(
            Decision(
                step=len(self.traces), pass_name=pass_.name, key=at, label=at, status="refused", reason=refusal.reason
            )
        )

    def _decide(
        self, pass_: Pass, site: Site, status: str, *, reason: str, figures: Mapping[str, Any] | None = None
    ) -> Decision:
        decision = self._decision(pass_, site, status, reason=reason, figures=figures)
        self.decisions.extend(self._parted(decision, site))
        return decision

    def _decision(
        self, pass_: Pass, site: Site, status: str, *, reason: str = "", figures: Mapping[str, Any] | None = None
    ) -> Decision:
        return Decision(
            step=len(self.traces), pass_name=pass_.name, key=site.key, label=site.label or site.home or "(root)",
            status=status, reason=reason, choice=site.choice, detail=site.detail, figures=dict(figures or {}),
        )  # fmt: skip

    def _parted(self, decision: Decision, site: Site) -> list[Decision]:
        """Return a decision on several sites as one for each; the figures of all together stand in all of them."""
        if not site.parts:
            return [decision]
        return [
            dataclasses.replace(
                decision,
                key=part.key,
                label=part.label or part.home or "(root)",
                choice=part.choice,
                detail=part.detail,
                figures={**decision.figures, "together": len(site.parts)},
            )
            for part in site.parts
        ]

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
            total = total.compose(landed.edit.state_map_of_model())
        return total

    def plan(self, passes: Sequence[Pass]) -> Plan:
        """Return the decisions as a value that `replay` repeats."""
        phase = "train" if self.program.training else "eval"
        return Plan(tuple(str(pass_) for pass_ in passes), phase, tuple(self.decisions))

    def checked(self) -> str:
        """Say how the rewrites that stand were checked."""
        ways = dict.fromkeys(str(landed.decision.figures.get("checked", "replayed")) for landed in self.landed)
        return ", ".join(ways) or "nothing was rewritten"
