"""Time the whole model, and take back what does not pay after all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..compat import all_modules
from ..errors import PassError
from ..tracing.inputs import Inputs
from ..tracing.resting import rest
from . import measure
from .base import Goal, Pass, Phase, Site
from .edit import Edit
from .plan import Decision
from .site_trial import Failed, timing_figures

if TYPE_CHECKING:
    from .manager import Manager

__all__ = ["Landed", "WholeModel"]

_AS_FAST = 0.98
"""The least median speed at which a model whose interval reaches 1 counts as no slower: noise excuses no more."""


@dataclass(eq=False)
class Landed:
    """A rewrite that stands, with what is needed to take it back.

    Attributes:
        pass_, site, edit: which it is.
        decision: the site's own.
        evidence: the decision at the first of several equal sites, whose timing counts for all of them.
        recorded: what reports and plans say of it: the decision, or where several sites were decided as one, one each.
    """

    pass_: Pass
    site: Site
    edit: Edit
    decision: Decision
    evidence: Decision
    recorded: list[Decision]

    @property
    def phase(self) -> Phase:
        return self.site.phase or self.pass_.phase


class WholeModel:
    """Compare the rewritten model with what it was.

    Args:
        manager: has rewritten it.
        baseline: a twin of the model as it was; it is put to rest, to run as the user's model does.
    """

    def __init__(self, manager: Manager, baseline: nn.Module) -> None:
        self.manager, self.baseline = manager, baseline
        rest(all_modules(baseline))

    def never_slower(self) -> dict[str, float] | None:
        """Return the model's timings; while it is slower, take back the rewrites that are least certain to pay."""
        landed = self.manager.landed
        if len(landed) == 1 and not landed[0].site.home and "speedup" in landed[0].decision.figures:
            return _as_timings(landed[0].decision.figures)  # the site was the whole model
        while doubtful := self._doubtful():
            rest(self.manager.program.names.distinct)
            timings = self._timings()
            speed = timings.ratio("before", "after")
            if speed.high >= 1.0 and speed.mid >= _AS_FAST:
                return _as_timings(timing_figures(timings, "before", "after"))
            self._take_back(doubtful, f"the whole model was slower with it ({speed.mid:.2f}x)")
        return None

    def _doubtful(self) -> list[Landed]:
        """Return the rewrites to take back next, together.

        First come clean-ups, which nobody timed, in modules that they alone keep from running their own forward; then
        the least certain of the speed rewrites. Equal blocks have one timing between them.
        """
        landed = self.manager.landed
        fast = [each for each in landed if each.pass_.goal is Goal.SPEED]
        homes = {each.site.home for each in fast}
        clean_ups = [each for each in landed if each.pass_.clean_up and each.site.home not in homes]
        optional = [each for each in fast if not each.site.required]
        if clean_ups or not optional:
            return clean_ups
        worst = min(optional, key=lambda each: each.decision.figures.get("speedup_low") or 0.0)
        return [each for each in optional if each.evidence is worst.evidence]

    def _timings(self) -> measure.Timings:
        program = self.manager.program
        calls = [Inputs(*call.args, **call.kwargs) for call in program.recording([program.model]).calls[program.model]]
        runs = {
            "before": measure.runner(self.baseline, calls, training=program.training),
            "after": measure.runner(program.model, calls, training=program.training),
        }
        return measure.time_candidates(runs)

    def _take_back(self, unwanted: Sequence[Landed], reason: str) -> None:
        """Undo rewrites that others may stand on: unwind what came later around them, then apply that again."""
        unwound = self._around(unwanted)
        for landed in reversed(unwound):
            landed.edit.undo()
        self.manager.forget_calls()
        self.manager.landed = [landed for landed in self.manager.landed if landed not in unwound]
        for landed in unwound:
            if landed in unwanted:
                self._undone(landed, reason)
            else:
                self._land_again(landed)

    def _around(self, unwanted: Sequence[Landed]) -> list[Landed]:
        """Return rewrites, and those after them that changed some of the same modules, in order."""
        touched: set[nn.Module] = set()
        around: list[Landed] = []
        for landed in self.manager.landed:
            modules = all_modules(landed.edit.home)
            if landed in unwanted or not touched.isdisjoint(modules):
                around.append(landed)
                touched.update(modules)
        return around

    def _undone(self, landed: Landed, reason: str) -> None:
        for decision in landed.recorded:
            undone = dataclasses.replace(decision, status="undone", reason=reason)
            self.manager.replace_decision(decision, undone)

    def _land_again(self, landed: Landed) -> None:
        """Apply a rewrite again after another one below it is gone, unless it stood on that one."""
        try:
            written = self.manager.trial(landed.pass_, landed.site, time=False).written(landed.site)
        except PassError as error:
            written = Failed(str(error), unsuitable=False)
        if isinstance(written, Failed):
            self._undone(landed, f"it stood on a rewrite that was taken back: {written.reason}")
            return
        landed.edit = written.edit
        self.manager.landed.append(landed)


def _as_timings(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return what the report says of the whole model."""
    speeds = {name: figures[name] for name in ("speedup", "speedup_low", "speedup_high")}
    return {"before_ms": figures["before_us"] / 1e3, "after_ms": figures["after_us"] / 1e3, **speeds}
