"""What one run has decided: a record for every site, and the rewrites that stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ...runtime.record import REPEATED, Decision, GraphView, Record, view_of
from ...runtime.state import StateMap
from ..contract import Pass
from ..rewriting import Edit
from ..sites import Cause, Phase, Reason, Refusal, Site, StaleSite
from .groups import WITH_THE_WHOLE, Candidate, Group

__all__ = ["History", "Rewrite", "composed"]


@dataclass(eq=False)
class Rewrite:
    """A rewrite that stands, with what is needed to take it back."""

    pass_: Pass
    group: Group
    edit: Edit
    decision: Decision
    evidence: Decision  # at the first of several equal groups, whose timing counts for all
    recorded: list[Decision]  # what reports say: the decision, or of several sites one for each
    replayed: bool = False  # a plan said so; it was neither checked nor timed now

    @property
    def owner(self) -> str:
        return self.group.owner

    @property
    def is_unchecked(self) -> bool:
        """Say whether neither its pass nor a check by itself tells that it is right, but only the whole model."""
        is_judged = all(map(self.pass_.judges, self.group.sites))
        return self.decision.figures.get("checked") == WITH_THE_WHOLE and not is_judged

    @property
    def phase(self) -> Phase:
        return self.group.phase or self.pass_.phase


@dataclass
class History:
    """The decisions of a run in their order, and the rewrites that stand."""

    words: Callable[[Reason], str]
    decisions: list[Decision] = field(default_factory=list["Decision"])
    rewrites: list[Rewrite] = field(default_factory=list["Rewrite"])
    step: int = 0  # the number of the pass that is running
    landed_at: dict[int, set[str]] = field(default_factory=dict[int, set[str]])  # owners of graphs, by step

    @property
    def applied(self) -> int:
        """Return how many sites are rewritten, or planned for the finished model."""
        return sum(decision.status == "applied" for decision in self.decisions)

    def refuse(self, pass_: Pass, refusal: Refusal) -> None:
        """Note why a pass leaves a place as it is."""
        at = refusal.at.name if isinstance(refusal.at, fx.Node) else refusal.at
        self.decisions.append(self._of(pass_, key=at, status="refused", label=at, **self._told(refusal.why)))

    def skip(self, pass_: Pass, reason: Reason) -> None:
        """Note why a pass was not run."""
        self.decisions.append(self._of(pass_, key="(root)", status="skipped", label="(root)", **self._told(reason)))

    def leave(self, pass_: Pass, candidate: Candidate) -> Decision:
        """Note why a group is left as it was."""
        decision = self._decision(pass_, candidate)
        self.decisions.extend(_by_site(decision, candidate.group))
        return decision

    def keep(self, pass_: Pass, candidate: Candidate, edit: Edit, evidence: Decision | None = None) -> Decision:
        """Note a rewrite that stands; `evidence` is the decision at an equal group that it follows."""
        decision = self._decision(pass_, candidate)
        recorded = _by_site(decision, candidate.group)
        self._stand(Rewrite(pass_, candidate.group, edit, decision, evidence or decision, recorded))
        return decision

    def repeat(
        self, pass_: Pass, group: Group, edit: Edit, decisions: Sequence[Decision], *, verified: bool = False
    ) -> None:
        """Note a rewrite that a plan has decided on."""
        self._stand(Rewrite(pass_, group, edit, decisions[0], decisions[0], list(decisions), replayed=not verified))

    def note(self, planned: Iterable[Decision], reason: Reason) -> None:
        """Note planned rewrites that cannot stand here."""
        told = self._told(reason)
        self.decisions += [dataclasses.replace(decision, status="undone", **told) for decision in planned]

    def overtaken(self, pass_: Pass, group: Group) -> list[Site]:
        """Return those of the sites that a rewrite of the same pass, which is running, has overtaken."""
        landed = self.landed_at.get(self.step, ())
        touched = any(place.owner in landed for site in group.sites for place in site.places)
        if not touched or type(pass_).rewrite_group is not Pass.rewrite_group:
            return []
        return [site for site in group.sites if _is_stale(site)]

    def intend(self, pass_: Pass, site: Site) -> None:
        """Note a site of a pass that acts on the finished model."""
        label, described = site.label or site.owner or "(root)", site.to_json()
        decision = self._of(pass_, key=site.key, status="applied", label=label, detail=site.detail, site=described)
        self.decisions.append(decision)

    def _stand(self, rewrite: Rewrite) -> None:
        self.decisions.extend(rewrite.recorded)
        self.rewrites.append(rewrite)
        self.landed_at.setdefault(rewrite.decision.step, set()).update(rewrite.edit.changed_owners)

    def _of(self, pass_: Pass, **fields: Any) -> Decision:
        """Return a decision of a pass as it is now: its options say what it promises and what it is for."""
        kind = {"numerics": pass_.numerics.value, "goal": pass_.goal.value}
        return Decision(step=self.step, pass_name=pass_.name, **kind, **fields)

    def _told(self, reason: Reason | None) -> dict[str, Any]:
        """Return what a decision keeps of a reason; nothing where there is none."""
        return {"reason": self.words(reason), "cause": reason.cause, "values": dict(reason.values)} if reason else {}

    def _decision(self, pass_: Pass, candidate: Candidate) -> Decision:
        group, (first, *others) = candidate.group, candidate.group.sites
        return self._of(
            pass_, key=group.key, label=group.label, status=candidate.status,
            **self._told(candidate.failure), choice=None if others else first.choice,
            detail=f"{len(group.sites)} sites" if others else first.detail, figures=dict(candidate.figures),
            site=None if others else _described(first),
        )  # fmt: skip

    def undo(self, rewrite: Rewrite, reason: Reason) -> None:
        """Note that a rewrite was taken back."""
        for old in rewrite.recorded:
            place = next(number for number, decision in enumerate(self.decisions) if decision is old)
            self.decisions[place] = dataclasses.replace(old, status="undone", **self._told(reason))

    def lose(self, lost: Mapping[Rewrite, str]) -> None:
        """Note rewrites that cannot stand any more without others, each with the reason."""
        for rewrite, why in lost.items():
            self.undo(rewrite, Reason.of(Cause.DEPENDENT, problem=why))

    # -- what came of it -------------------------------------------------------------------------------------------

    def graph_versions(self, first: int) -> dict[str, list[tuple[int, GraphView]]]:
        """Return what each rewritten graph was before each pass that changed it, with the position of the pass in the
        plan, in which the first pass of this run has the position `first`.
        """
        versions: dict[str, list[tuple[int, GraphView]]] = {}
        for rewrite in self.rewrites:
            step = first + rewrite.decision.step
            for name, graph in rewrite.edit.graphs_before().items():
                known = versions.setdefault(name, [])
                if not known or known[-1][0] != step:
                    known.append((step, view_of(graph)))
        return versions

    def state_map(self) -> StateMap:
        """Return the effect of all rewrites on names and tensors, from the root's point of view."""
        return composed(rewrite.edit for rewrite in self.rewrites)

    def checked(self, earlier: Record | None = None) -> str:
        """Say how the rewrites that stand were checked, those of an earlier call too; what was not comes last."""
        ways = dict.fromkeys(
            REPEATED if rewrite.replayed else str(rewrite.decision.figures.get("checked")) for rewrite in self.rewrites
        )
        if earlier is not None and any(decision.status == "applied" for decision in earlier.plan.decisions):
            ways.setdefault(earlier.checked)
        return ", ".join(sorted(ways, key=lambda way: "unverified: " in way)) or "nothing was rewritten"


def composed(edits: Iterable[Edit]) -> StateMap:
    """Return what edits, one after another, do to names and tensors, from the root's point of view."""
    total = StateMap()
    for edit in edits:
        total = total.compose(edit.state_map_of_model())
    return total


def _is_stale(site: Site) -> bool:
    try:
        site.check_there()
    except StaleSite:
        return True
    return False


def _by_site(decision: Decision, group: Group) -> list[Decision]:
    """Return a decision on several sites as one for each; the figures of all together stand in all of them."""
    if group.is_single:
        return [decision]
    figures = {**decision.figures, "group_size": len(group.sites)}
    return [
        dataclasses.replace(
            decision, key=site.key, label=site.label or site.owner or "(root)", choice=site.choice, detail=site.detail,
            figures=figures, site=_described(site),
        )
        for site in group.sites
    ]  # fmt: skip


def _described(site: Site) -> dict[str, Any] | None:
    """Return what a plan keeps of a site that is not to be found anew: its data, and where it is."""
    return site.to_json() if site.data or site.parts else None
