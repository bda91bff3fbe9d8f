"""Repeat what a plan says was applied: as it is or, where another rank has decided it, verified here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import CaptureError, MatchFailure, PassError, PlanError, one_line
from ...runtime.record import Decision
from ...tracing.program import Program
from ..contract import Pass
from ..sites import Cause, Reason, Refusal, Site, StaleSite
from .context import RunContext
from .groups import Group, grouped_in_order
from .site_filter import admitted, admitted_site
from .tuner import Tuner

__all__ = ["Replay"]

_GIVE_INPUTS = "; give example_inputs=, too"


@dataclass
class Replay:
    """Rewrite planned sites of a pass in the order in which they landed; those of one graph in a row are a group."""

    tuner: Tuner
    pass_: Pass
    decisions: Sequence[Decision]

    def __post_init__(self) -> None:
        self._wanted = {decision.key: decision for decision in self.decisions if decision.status == "applied"}

    @property
    def _context(self) -> RunContext:
        return self.tuner.context

    @property
    def _program(self) -> Program:
        return self._context.program

    def unverified(self) -> None:
        """Rewrite all of them, untimed, too; raise PlanError where a site is not there."""
        pass_, program, left = self.pass_, self._program, -1
        while self._wanted and len(self._wanted) != left:
            left = len(self._wanted)
            for group in grouped_in_order(pass_, self._planned()):
                try:
                    edit = self.tuner.apply(pass_, group)
                except StaleSite:
                    break  # it overlaps with one that has just been rewritten: look for it again
                except (MatchFailure, PassError) as failure:
                    place = f"the plan's site {group.key} of pass '{pass_.name}'"
                    why = f"{one_line(failure)}{'' if program.inputs else _GIVE_INPUTS}"
                    raise PlanError(f"{place} cannot be rewritten: {why}") from failure
                made = [self._wanted.pop(site.key) for site in group.sites]
                self._context.history.repeat(pass_, group, edit, made)
                self._context.note_change(pass_)
        if missing := next(iter(self._wanted.values()), None):
            lost = program.opaque.get(missing.key.partition(":")[0].replace("(root)", ""))
            why = f": no graph of its module: {lost.reason}" if lost else self._refused(missing)
            why += "" if program.inputs else _GIVE_INPUTS
            raise PlanError(f"the plan's site {missing.key} of pass '{pass_.name}' is not in this model{why}")

    def _refused(self, missing: Decision) -> str:
        """Return why the pass leaves the place of a decision here, such as an engine that is not installed, or ""."""
        refusals = (item for item in admitted(self.tuner, self.pass_) if isinstance(item, Refusal))
        here = (item.why for item in refusals if item.at in ("(root)", missing.label))
        return next((f": {why.text or why.cause}" for why in here), "")

    def verified(self) -> None:
        """Rewrite what is right here, too; note what is wrong or not there."""
        history = self._context.history
        while self._wanted:
            left, groups = len(self._wanted), grouped_in_order(self.pass_, self._planned())
            self._context.calls.expect(group.owner for group in groups)
            for group in groups:
                if history.overtaken(self.pass_, group):
                    break  # it overlaps with one that has just been rewritten: look for it again
                self._verify(group)
            if len(self._wanted) == left:
                missing = self._wanted.pop(next(iter(self._wanted)))
                history.note([missing], Reason.of(Cause.PLAN, "the site is not there"))
        history.decisions.extend(decision for decision in self.decisions if decision.status != "applied")

    def _verify(self, group: Group) -> None:
        """Rewrite a group as was decided elsewhere; where that is wrong here, those of its sites that are right."""
        made = [self._wanted[site.key] for site in group.sites]
        brief = all(decision.measured.follows for decision in made)
        candidate = self.tuner.repeat(self.pass_, group, brief=brief)
        if candidate.edit is None and not group.is_single:
            for site in group.sites:
                self._verify(Group((site,)))
            return
        if candidate.failure is not None:
            cause = candidate.failure.cause if candidate.was_written else Cause.PLAN
            self._context.history.note(made, dataclasses.replace(candidate.failure, cause=cause))
        elif candidate.edit is not None:
            self._context.history.repeat(self.pass_, group, candidate.edit, made, verified=True)
            self._context.note_change(self.pass_)
        for decision in made:
            del self._wanted[decision.key]

    def _planned(self) -> list[Site]:
        """Return the next of the planned sites that can be rewritten as the program is now."""
        items: list[Site | Refusal] | None = None
        known, planned = dict[str, Site](), list[Site]()
        for key, decision in self._wanted.items():
            if decision.site is not None:
                item = self._described(decision)
            else:
                if items is None:
                    items = admitted(self.tuner, self.pass_)
                    known = {item.key: item for item in items if isinstance(item, Site)}
                item = known.get(key) or next(filter(_is_for_evaluation, items), None)
            if item is not None and _is_for_evaluation(item):
                name = self.pass_.name
                raise PlanError(f"the plan's sites of pass '{name}' are for evaluation; call model.eval() first")
            if not isinstance(item, Site):
                break
            planned.append(dataclasses.replace(item, choice=decision.choice))
        return planned

    def _described(self, decision: Decision) -> Site | Refusal | None:
        """Return the site that a plan describes, as it is in this model, or None where it is not (any more, or yet).

        Raises PlanError if it is not the one that the decision is about.
        """
        site = Site.from_json(self._program, decision.site)
        if site.key != decision.key:
            place = f"the plan's site {decision.key} of pass '{decision.pass_name}'"
            raise PlanError(f"{place} is described as {site.key}")
        try:
            for place in site.places:
                self._program.module(place.owner)
            for label in (label for place in site.places for label in place.nodes):
                site[label]
        except CaptureError:
            return None
        return admitted_site(self._context, self.pass_, site)


def _is_for_evaluation(item: Site | Refusal) -> bool:
    return isinstance(item, Refusal) and item.why.cause is Cause.IN_TRAINING
