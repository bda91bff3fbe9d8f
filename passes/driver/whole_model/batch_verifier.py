"""Verify many rewrites of one pass at once, on the whole model: by halves where they are wrong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ....runtime.graphs import capture_of
from ....runtime.record import Decision, Measured
from ... import verification
from ...contract import Pass
from ...rewriting import Edit
from ...sites import Goal, Numerics, Phase, Refusal
from ...timing import OutOfTimeError, Stage
from ..batch import Batch
from ..context import RunContext
from ..equal_blocks import kinds_to_time
from ..groups import WITH_THE_WHOLE, Candidate, Group
from ..halving import in_halves
from ..history import composed
from ..tuner import Tuner
from .reference_check import ReferenceCheck

__all__ = ["BatchVerifier"]

_FEWEST = 4
"""Fewer kinds of blocks are decided one by one: what is wrong is then known at once, and equal blocks follow."""
_FORWARDS = 10.0
"""A check of the whole model takes about as long as so many forwards; with less time left it is not begun."""
_BY_THE_WHOLE = Measured(untimed="judged with the whole model").figures()
_VERIFYING = 0.8
"""Verifying takes this part of the time that the runs before took: nothing is tried that the model may not take."""


@dataclass
class BatchVerifier:
    """Write the groups of a pass that leave nothing to choose, and verify them in one go, in float64.

    What holds in training too is verified site by site: gradients of the whole model, many times, take longer.
    """

    tuner: Tuner
    _pass: Pass = field(init=False)
    _references: verification.References = field(init=False)
    _standing: list[Edit] = field(init=False)
    _seconds: float = field(default=0.0, init=False)

    @property
    def _context(self) -> RunContext:
        return self.tuner.context

    def undecided(self, pass_: Pass, found: Sequence[Group | Refusal]) -> list[Group | Refusal]:
        """Return what is left to be decided one by one, after what stands now, verified together."""
        found = ReferenceCheck(self.tuner).undecided(pass_, found)
        groups = [item for item in found if isinstance(item, Group)]
        if not self._context.checks:
            return list(found)
        judged = [group for group in groups if _is_judged(pass_, group)] if self._context.program.whole_calls else []
        if judged:
            return self._left_to_the_whole(pass_, judged, found)
        if len(groups) < _FEWEST and not pass_.profiles_itself:
            return list(found)
        self.tuner.sharing = max(kinds_to_time(self._context.program, groups), default=1)
        decided = self._decided(pass_, groups) if self.tuner.sharing >= _FEWEST else []
        known = set(map(id, decided))
        return [item for item in found if id(item) not in known]

    def _left_to_the_whole(
        self, pass_: Pass, groups: Sequence[Group], found: Sequence[Group | Refusal]
    ) -> list[Group | Refusal]:
        """Write groups that are verified with the model as it is handed over; return the rest."""
        self._pass = pass_
        batch, firsts = Batch.of(self.tuner, pass_, groups), dict[Hashable, Decision]()
        for group, edit in batch.written:
            figures = {"checked": WITH_THE_WHOLE, **pass_.judgement(group.sites[0])}
            is_timed, kind = Measured.of(figures).speedup is not None, group.sites[0].kind
            if self._is_for_speed and not is_timed:
                figures |= _BY_THE_WHOLE
            evidence = firsts.get(kind) if is_timed and kind is not None else None
            decision = self._context.history.keep(pass_, Candidate(group, edit=edit, figures=figures), edit, evidence)
            firsts.setdefault(kind, decision)
        known = set(map(id, batch.groups))
        return [item for item in found if id(item) not in known]

    @property
    def _is_for_speed(self) -> bool:
        """Say whether the whole model is timed with what the pass writes."""
        return self._pass.goal is Goal.SPEED and bool(self._context.program.measuring)

    def _decided(self, pass_: Pass, groups: Sequence[Group]) -> list[Group]:
        suitable = self._suitable(pass_, groups)
        if len(suitable) < _FEWEST or not self._has_time(_FORWARDS * self._context.budget.forward):
            return []
        self._pass, self._standing = pass_, []
        try:
            with self._measured():
                self._references = self._taken(suitable)
        except OutOfTimeError:
            return []
        right, wrong = self._judged([group for group in suitable if self._can_judge(group)])
        return [*right, *in_halves(wrong, self._judged)]

    @contextmanager
    def _measured(self) -> Generator[None]:
        """Note what a check takes, and count it."""
        start = self._context.budget.spent
        with self._context.budget.spending(Stage.CHECKING):
            yield
        self._seconds = self._context.budget.spent - start

    def _suitable(self, pass_: Pass, groups: Sequence[Group]) -> list[Group]:
        """Return the groups of a pass that can be verified together."""
        if not pass_.numerics.keeps_function or not self._context.program.whole_calls or not self._context.checks:
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
        capture = capture_of(self._context.program.module(group.owner))
        return capture is not None and len(capture.specializations) == 1

    def _can_judge(self, group: Group) -> bool:
        """Say whether the runs call a group's module, exactly; random draws would hang on the order of nodes."""
        runs = self._references.runs
        is_exact = not self._references.are_random and all(each.conditions.wide is not None for each in runs)
        return is_exact and all(group.owner in each.called for each in runs)

    def _has_time(self, seconds: float) -> bool:
        budget = self._context.budget
        return budget.spent + seconds <= budget.for_sites

    def _taken(self, groups: Sequence[Group]) -> verification.References:
        """Return the runs of the whole model as it is."""
        program, inner = self._context.program, [group.owner for group in groups]
        modes = verification.modes_to_check(program.model, Phase.EVAL, program.training)
        budget = self._context.budget
        return verification.References.taken(
            program.model, program.whole_calls, modes, gradients=False, inner=inner,
            seed=self._context.request.seed, sizes=verification.Sizes.SMALLER, in_time=budget.ending(budget.for_checks),
        )  # fmt: skip

    def _judged(self, groups: Sequence[Group]) -> tuple[Sequence[Group], Sequence[Group]]:
        """Write groups beside those that stand; return those that stay, and those of which some may be wrong."""
        batch = Batch.of(self.tuner, self._pass, groups)
        if not batch.written:
            return (), ()
        if self._has_time(_VERIFYING * self._seconds):
            verdict = self._verdict(batch)
            if verdict is not None and verdict.ok and not verdict.is_rounded:
                self._standing += batch.edits
                return batch.keep(verdict, **(_BY_THE_WHOLE if self._is_for_speed else {})), ()
        batch.undo()
        is_open = len(batch.written) >= _FEWEST and self._has_time(self._seconds)
        return (), batch.groups if is_open else ()

    def _verdict(self, batch: Batch) -> verification.Verdict | None:
        """Return the worst verdict on the whole model with a batch in it; None where the time is over before."""
        map_state, model = composed((*self._standing, *batch.edits)).forward, self._context.program.model
        with suppress(OutOfTimeError), self._measured():
            found = self._references.verdicts(model, map_state=map_state, numerics=self._pass.numerics)
            return verification.worst(found)
        return None


def _is_judged(pass_: Pass, group: Group) -> bool:
    """Say whether a pass has judged all sites of a group, and a fault would show in the whole model."""
    return all(map(pass_.judges, group.sites)) and (pass_.numerics.keeps_function or _errs_little(pass_, group))


def _errs_little(pass_: Pass, group: Group) -> bool:
    """Say whether an approximate pass has compared what it found with what was there."""
    return (
        group.is_single
        and pass_.numerics is Numerics.APPROXIMATE
        and Measured.of(pass_.judgement(group.sites[0])).precision_error is not None
    )
