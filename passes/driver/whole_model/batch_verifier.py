"""Verify many rewrites of one pass at once, on the whole model: by halves where they are wrong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ....errors import CaptureError, MatchFailure, PassError
from ....runtime.graphs import capture_of
from ....runtime.state import StateMap
from ... import verification
from ...contract import Pass
from ...pipeline import Decision
from ...rewriting import Edit
from ...sites import Goal, Numerics, Phase, Refusal
from ..equal_blocks import kinds_to_time
from ..groups import Candidate, Group, keeps_function
from ..history import History
from ..tuner import Tuner
from .reference_check import ReferenceCheck

__all__ = ["BatchVerifier"]

_FEWEST = 4
"""Fewer kinds of blocks are decided one by one: what is wrong is then known at once, and equal blocks follow."""

_FORWARDS = 10.0
"""A check of the whole model takes about as long as so many forwards; with less time left it is not begun."""


_VERIFYING = 0.8
"""Verifying takes this part of the time that the runs before took: nothing is tried that the model may not take."""


@dataclass
class BatchVerifier:
    """Write the groups of a pass that leave nothing to choose, and verify them in one go.

    In float64 a fault inside shows at the outputs of the whole model as it does around its site. What holds in training
    too is verified site by site: gradients of all parameters of a model, many times, take longer than those of a site.

    Attributes:
        tuner: writes the groups.
        history: what stands.
        seed: of verification's random inputs.
    """

    tuner: Tuner
    history: History
    seed: int = 0
    _pass: Pass = field(init=False)
    _references: list[verification.Reference] = field(init=False)
    _standing: list[Edit] = field(init=False)
    _seconds: float = field(default=0.0, init=False)

    def undecided(self, pass_: Pass, found: Sequence[Group | Refusal]) -> list[Group | Refusal]:
        """Return what is left to be decided one by one, after what stands now, verified together."""
        found = ReferenceCheck(self.tuner, self.history, self.seed).undecided(pass_, found)
        groups = [item for item in found if isinstance(item, Group)]
        if not self.tuner.checks:
            return list(found)
        judged = [group for group in groups if _is_judged(pass_, group)] if self.tuner.program.whole_calls else []
        if judged:
            return self._left_to_the_whole(pass_, judged, found)
        if len(groups) < _FEWEST and not pass_.profiles_itself:
            return list(found)
        self.tuner.sharing = max(kinds_to_time(self.tuner.program, groups), default=1)
        decided = self._decided(pass_, groups) if self.tuner.sharing >= _FEWEST else []
        known = set(map(id, decided))
        return [item for item in found if id(item) not in known]

    def _left_to_the_whole(
        self, pass_: Pass, groups: Sequence[Group], found: Sequence[Group | Refusal]
    ) -> list[Group | Refusal]:
        """Write groups that are verified with the model as it is handed over; return the rest."""
        self._pass = pass_
        written, firsts = self._written(groups), dict[Hashable, Decision]()
        for group, edit in written:
            figures = {"checked": "with the whole model", **pass_.judgement(group.sites[0])}
            if self._is_for_speed and "speedup" not in figures:
                figures["untimed"] = "judged with the whole model"
            kind = group.sites[0].kind
            evidence = firsts.get(kind) if "speedup" in figures and kind is not None else None
            decision = self.history.keep(pass_, Candidate(group, edit=edit, figures=figures), edit, evidence)
            firsts.setdefault(kind, decision)
        known = {id(group) for group, _ in written}
        return [item for item in found if id(item) not in known]

    @property
    def _is_for_speed(self) -> bool:
        """Say whether the whole model is timed with what the pass writes."""
        return self._pass.goal is Goal.SPEED and bool(self.tuner.program.measuring)

    def _decided(self, pass_: Pass, groups: Sequence[Group]) -> list[Group]:
        suitable = self._suitable(pass_, groups)
        if len(suitable) < _FEWEST or not self._has_time(_FORWARDS * self.tuner.budget.forward):
            return []
        self._pass, self._standing = pass_, []
        start = self.tuner.budget.spent
        with self.tuner.budget.spending():
            self._references = self._taken(suitable)
        self._seconds = self.tuner.budget.spent - start
        return self._right([group for group in suitable if self._is_called(group)]) if self._references else []

    def _suitable(self, pass_: Pass, groups: Sequence[Group]) -> list[Group]:
        """Return the groups of a pass that can be verified together."""
        if not keeps_function(pass_) or not self.tuner.program.whole_calls or not self.tuner.checks:
            return []
        owners = Counter(group.owner for group in groups)
        return [
            group
            for group in groups
            if group.owner and owners[group.owner] == 1 and group.choices == (None,) and group.is_single
            and not group.sites[0].parts and (group.phase or pass_.phase) is Phase.EVAL
            and self._has_one_graph(group) and not self.tuner.seconds_to_time(pass_, group)
        ]  # fmt: skip

    def _has_one_graph(self, group: Group) -> bool:
        capture = capture_of(self.tuner.program.module(group.owner))
        return capture is not None and len(capture.specializations) == 1

    def _is_called(self, group: Group) -> bool:
        return all(group.owner in reference.called for reference in self._references)

    def _has_time(self, seconds: float) -> bool:
        budget = self.tuner.budget
        return budget.spent + seconds <= budget.for_sites

    def _taken(self, groups: Sequence[Group]) -> list[verification.Reference]:
        """Return the runs of the whole model as it is; none where random draws hang on the order of its nodes."""
        program, inner = self.tuner.program, [group.owner for group in groups]
        modes, calls = verification.modes_to_check(program.model, Phase.EVAL, program.training), program.whole_calls
        references = [
            verification.reference(
                program.model, calls, training=mode, gradients=False, seed=self.seed, inner=inner,
                sizes=verification.Sizes.SMALLER,
            )
            for mode in modes
        ]  # fmt: skip
        return [] if any(each.conditions.random or each.conditions.wide is None for each in references) else references

    def _right(self, groups: Sequence[Group]) -> list[Group]:
        """Write groups beside those that stand, and keep those of them that are right."""
        written = self._written(groups)
        if not written:
            return []
        if self._has_time(_VERIFYING * self._seconds):
            verdict = self._verdict([edit for _, edit in written])
            if verdict.ok and not verdict.is_rounded:
                return self._kept(written, verdict)
        for _, edit in reversed(written):
            edit.undo()
        if len(written) < _FEWEST or not self._has_time(self._seconds):
            return []
        rest, half = [group for group, _ in written], len(written) // 2
        return [*self._right(rest[:half]), *self._right(rest[half:])]

    def _written(self, groups: Sequence[Group]) -> list[tuple[Group, Edit]]:
        """Write groups; those that cannot be are left for later."""
        written: list[tuple[Group, Edit]] = []
        try:
            for group in groups:
                try:
                    written.append((group, self.tuner.apply(self._pass, group)))
                except (MatchFailure, CaptureError):
                    continue
        except PassError:
            for _, edit in reversed(written):
                edit.undo()
            raise
        return written

    def _verdict(self, edits: Sequence[Edit]) -> verification.Verdict:
        """Return the worst verdict on the whole model with some more edits."""
        total = StateMap()
        for edit in (*self._standing, *edits):
            total = total.compose(edit.state_map_of_model())
        start, model = self.tuner.budget.spent, self.tuner.program.model
        with self.tuner.budget.spending():
            verdicts = [
                verification.verify(each, model, map_state=total.forward, numerics=self._pass.numerics)
                for each in self._references
            ]
        self._seconds = self.tuner.budget.spent - start
        return min(verdicts, key=lambda verdict: (verdict.ok and not verdict.is_rounded, -verdict.meaning_error))

    def _kept(self, written: Sequence[tuple[Group, Edit]], verdict: verification.Verdict) -> list[Group]:
        figures = {
            "checked": verdict.checked_in, "meaning_error": verdict.meaning_error,
            "precision_error": verdict.precision_error, "checked_together": len(written),
        }  # fmt: skip
        if self._is_for_speed:
            figures["untimed"] = "judged with the whole model"
        for group, edit in written:
            self.history.keep(self._pass, Candidate(group, verdict=verdict, edit=edit, figures=figures), edit)
            self._standing.append(edit)
        return [group for group, _ in written]


def _is_judged(pass_: Pass, group: Group) -> bool:
    """Say whether a pass has judged all sites of a group, and a fault would show in the whole model."""
    return all(map(pass_.judges, group.sites)) and (keeps_function(pass_) or _errs_little(pass_, group))


def _errs_little(pass_: Pass, group: Group) -> bool:
    """Say whether an approximate pass has compared what it found with what was there."""
    return (
        group.is_single
        and pass_.numerics is Numerics.APPROXIMATE
        and "precision_error" in pass_.judgement(group.sites[0])
    )
