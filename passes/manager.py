"""Run passes over a program: find, rewrite, verify, measure, keep or undo, record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ..errors import PassError, PlanError, Unsuitable
from ..settings import Settings
from ..tracing.program import Program
from . import measure, verify
from .base import Goal, Numerics, Pass, Phase, Refusal, Site
from .copying import twin
from .edit import Edit
from .modes import modes_to_check
from .plan import Decision, Plan
from .state_map import StateMap
from .supervision import supervised

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
class Landed:
    """A rewrite that stands, with what is needed to take it back."""

    pass_: Pass
    site: Site
    edit: Edit
    decision: Decision

    @property
    def phase(self) -> Phase:
        return self.site.phase or self.pass_.phase


@dataclass
class Attempt:
    """One lowering of a site that passed verification, kept runnable beside the others."""

    verdict: verify.Verdict | None
    module: nn.Module | None


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
            self._never_slower(baseline)

    def replay(self, passes: Sequence[Pass], plan: Plan) -> None:
        """Repeat the rewrites that `plan` says were applied, without verifying or timing them.

        Raises:
            PlanError: if a planned site is not there.
        """
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
        self.traces.append(
            PassTrace(str(pass_), seconds, len(self.decisions) - decided, len(self.landed) - applied)
        )

    def _times_anything(self, passes: Sequence[Pass]) -> bool:
        return self.time and bool(self.program.inputs) and any(pass_.goal is Goal.SPEED for pass_ in passes)

    # -- one pass --------------------------------------------------------------------------------------------------

    def _run_pass(self, pass_: Pass) -> None:
        for item in self._found(pass_):
            if isinstance(item, Refusal):
                self._refuse(pass_, item)
            else:
                self._land(pass_, item)

    def _replay_pass(self, pass_: Pass, wanted: dict[str, Decision]) -> None:
        for item in self._found(pass_):
            decision = None if isinstance(item, Refusal) else wanted.pop(item.key, None)
            if decision is not None and isinstance(item, Site):
                site = dataclasses.replace(item, choice=decision.choice)
                self._keep(pass_, site, self._apply(pass_, site), decision)

    def _found(self, pass_: Pass) -> list[Site | Refusal]:
        """Return the pass's sites and refusals, checked for being that."""
        found = self._supervised(pass_, "find", lambda: list(pass_.find(self.program)))
        for item in found:
            if not isinstance(item, (Site, Refusal)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PassError(f"pass '{pass_.name}': find yielded {type(item).__name__}, expected a Site or a Refusal")
        return found

    def _supervised(self, pass_: Pass, step: str, action: Callable[[], Any]) -> Any:
        return supervised(action, what=f"pass '{pass_.name}' ({step})", seconds=self.settings.pass_timeout)

    # -- one site --------------------------------------------------------------------------------------------------

    def _land(self, pass_: Pass, site: Site) -> None:
        """Try every lowering of a site; keep the best that is right and pays, or leave the site as it was."""
        trial = _Trial(self, pass_, site)
        if not trial.questions:
            self._land_unquestioned(pass_, trial)
            return
        attempts, reasons = trial.run()
        if not attempts:
            self._decide(pass_, site, "undone", reason="; ".join(dict.fromkeys(reasons.values())))
            return
        choice, figures, reason = trial.choose(attempts)
        if reason is not None:
            self._decide(pass_, site, "undone", reason=reason, figures=figures)
            return
        chosen = dataclasses.replace(site, choice=choice)
        decision = self._decision(pass_, chosen, "applied", figures=figures)
        self._keep(pass_, chosen, self._apply(pass_, chosen), decision)

    def _land_unquestioned(self, pass_: Pass, trial: _Trial) -> None:
        """Apply the first lowering that can be written, where nothing is to be checked or timed."""
        reasons: list[str] = []
        for choice in trial.site.choices or (None,):
            site = dataclasses.replace(trial.site, choice=choice)
            try:
                edit = self._apply(pass_, site)
            except Unsuitable as refusal:
                reasons.append(str(refusal))
                continue
            decision = self._decision(pass_, site, "applied", figures={"checked": trial.unchecked()})
            self._keep(pass_, site, edit, decision)
            return
        self._decide(pass_, trial.site, "undone", reason="; ".join(reasons))

    def _apply(self, pass_: Pass, site: Site) -> Edit:
        """Rewrite a site; what fails is undone before the error goes on."""
        edit = Edit(self.program, site, pass_.name)
        try:
            self._supervised(pass_, f"site {site.key}", lambda: (pass_.rewrite(site, edit), edit.finish()))
        except BaseException:
            edit.undo()
            raise
        return edit

    def _keep(self, pass_: Pass, site: Site, edit: Edit, decision: Decision) -> None:
        self.decisions.append(decision)
        self.landed.append(Landed(pass_, site, edit, decision))

    def _refuse(self, pass_: Pass, refusal: Refusal) -> None:
        at = refusal.at.name if isinstance(refusal.at, fx.Node) else refusal.at
        self.decisions.append(
            Decision(step=len(self.traces), pass_name=pass_.name, key=at, label=at, status="refused", reason=refusal.reason)
        )

    def _decide(self, pass_: Pass, site: Site, status: str, *, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        self.decisions.append(self._decision(pass_, site, status, reason=reason, figures=figures))

    def _decision(
        self, pass_: Pass, site: Site, status: str, *, reason: str = "", figures: Mapping[str, Any] | None = None
    ) -> Decision:
        return Decision(
            step=len(self.traces), pass_name=pass_.name, key=site.key, label=site.label or site.home or "(root)",
            status=status, reason=reason, choice=site.choice, detail=site.detail, figures=dict(figures or {}),
        )  # fmt: skip

    # -- the whole model -------------------------------------------------------------------------------------------

    def _never_slower(self, baseline: nn.Module) -> None:
        """Time the whole model; while it is slower, take back the speed rewrite that is least certain."""
        while any(self._is_for_speed(landed) for landed in self.landed):
            timings = self.time_model(baseline)
            speed = timings.ratio("before", "after")
            if speed.high >= 1.0:
                self.timings = {
                    "before_ms": timings.microseconds("before") / 1e3, "after_ms": timings.microseconds("after") / 1e3,
                    "speedup": speed.mid, "speedup_low": speed.low, "speedup_high": speed.high,
                }  # fmt: skip
                return
            doubtful = [landed for landed in self.landed if self._is_for_speed(landed)]
            worst = min(doubtful, key=lambda landed: landed.decision.figures.get("speedup_low") or 0.0)
            self._take_back(worst, f"the whole model was slower with it ({speed.mid:.2f}x)")

    def time_model(self, baseline: nn.Module) -> measure.Timings:
        """Time the whole model against `baseline` on the example inputs."""
        calls = self.program.recording([self.program.model]).calls[self.program.model]
        training = self.program.training
        runs = {
            "before": measure.runner(baseline, calls, training=training),
            "after": measure.runner(self.program.model, calls, training=training),
        }
        return measure.time_candidates(runs)

    def _is_for_speed(self, landed: Landed) -> bool:
        return landed.pass_.goal is Goal.SPEED and not landed.site.required

    def _take_back(self, unwanted: Landed, reason: str) -> None:
        """Undo one rewrite that others may stand on: unwind to it, then apply those again."""
        position = self.landed.index(unwanted)
        above = self.landed[position + 1 :]
        for landed in reversed(self.landed[position:]):
            landed.edit.undo()
        del self.landed[position:]
        self._replace_decision(unwanted.decision, dataclasses.replace(unwanted.decision, status="undone", reason=reason))
        for landed in above:
            landed.edit = self._apply(landed.pass_, landed.site)
            self.landed.append(landed)

    def _replace_decision(self, old: Decision, new: Decision) -> None:
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


class _Trial:
    """Try the lowerings of one site."""

    def __init__(self, manager: Manager, pass_: Pass, site: Site) -> None:
        self.manager, self.pass_, self.site = manager, pass_, site
        self.program = manager.program
        self.home = manager.program.module(site.home)
        self.phase = site.phase or pass_.phase
        self.calls = self._calls()
        self.timed = manager.time and pass_.goal is Goal.SPEED and bool(self.calls)
        self.references = self._references()
        self.before = twin(self.home) if self.timed else None

    @property
    def questions(self) -> bool:
        """Say whether there is anything to check or to time."""
        return self.timed or bool(self.references)

    def _calls(self) -> Sequence[Any]:
        if not self.program.inputs or not (self.manager.check or self.manager.time):
            return ()
        return self.program.recording([self.home]).calls.get(self.home, ())

    def _references(self) -> list[verify.Reference]:
        if not self.manager.check or not self.calls or self.pass_.numerics is Numerics.SEMANTIC or _on_meta(self.home):
            return []
        return [
            verify.reference(
                self.home, self.calls, training=mode, gradients=self.phase.covers_training, seed=self.manager.seed
            )
            for mode in modes_to_check(self.home, self.phase, self.program.training)
        ]

    def run(self) -> tuple[dict[str | None, Attempt], dict[str | None, str]]:
        """Return the lowerings that verified, and why the others did not."""
        attempts: dict[str | None, Attempt] = {}
        reasons: dict[str | None, str] = {}
        for choice in self.site.choices or (None,):
            try:
                edit = self.manager._apply(self.pass_, dataclasses.replace(self.site, choice=choice))  # pyright: ignore[reportPrivateUsage]
            except Unsuitable as refusal:
                reasons[choice] = str(refusal)
                continue
            try:
                verdict = self.verdict(edit)
                if verdict is None or verdict.ok:
                    attempts[choice] = Attempt(verdict, twin(self.home) if self.timed else None)
                else:
                    reasons[choice] = verdict.reason
            finally:
                edit.undo()
            if attempts and not self.timed:
                break
        return attempts, reasons

    def verdict(self, edit: Edit) -> verify.Verdict | None:
        """Return the worst verdict over the phases, or None where nothing could be checked."""
        state_map = edit.state_map()
        verdicts = [
            verify.verify(reference, self.home, map_state=state_map.forward, numerics=self.pass_.numerics)
            for reference in self.references
        ]
        return min(verdicts, key=lambda verdict: (verdict.ok, -verdict.meaning_error), default=None)

    def choose(self, attempts: Mapping[str | None, Attempt]) -> tuple[str | None, dict[str, Any], str | None]:
        """Return the lowering to keep, its figures, and why none is kept."""
        first = next(iter(attempts))
        if not self.timed or self.before is None:
            return first, self.figures(attempts[first]), None
        timings = self.timings(attempts)
        names = {_label(choice): choice for choice in attempts}
        best = timings.fastest(prefer=tuple(names))
        speed = timings.ratio("before", best)
        figures = {
            **self.figures(attempts[names[best]]),
            "speedup": speed.mid, "speedup_low": speed.low, "speedup_high": speed.high,
            "before_us": timings.microseconds("before"), "after_us": timings.microseconds(best),
            "lowerings": {name: timings.microseconds(name) for name in names},
        }  # fmt: skip
        if speed.low <= 1.0 and not self.site.required:
            return None, figures, f"no faster: {speed.mid:.2f}x ({speed.low:.2f} to {speed.high:.2f}) as {best}"
        return names[best], figures, None

    def timings(self, attempts: Mapping[str | None, Attempt]) -> measure.Timings:
        training = self.program.training and self.phase.covers_training
        modules = {"before": self.before, **{_label(choice): attempt.module for choice, attempt in attempts.items()}}
        runs = {
            name: measure.runner(module, self.calls, training=training)
            for name, module in modules.items()
            if module is not None
        }
        return measure.time_candidates(runs)

    def figures(self, attempt: Attempt) -> dict[str, Any]:
        if attempt.verdict is None:
            return {"checked": self.unchecked()}
        verdict = attempt.verdict
        return {
            "checked": verdict.checked_in,
            "meaning_error": verdict.meaning_error,
            "precision_error": verdict.precision_error,
        }

    def unchecked(self) -> str:
        if _on_meta(self.home):
            return "unverified: meta"
        if not self.manager.check:
            return "unverified: verify=False"
        return "unverified: never called" if self.program.inputs else "unverified: no example inputs"


def _label(choice: str | None) -> str:
    return choice or "after"


def _on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
