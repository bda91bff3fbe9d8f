"""Verify all that a pass changes by design at once: on the whole model, beside what it must be equal to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ....errors import BudgetError, MatchFailure, PassError
from ....runtime.graphs import Region
from ....runtime.state import StateMap
from ....tracing.examples import Inputs
from ....tracing.isolation import copied_module
from ... import verification
from ...contract import Pass
from ...rewriting import Edit
from ...sites import Goal, Numerics, Phase, Refusal
from ..groups import Candidate, Group
from ..history import History
from ..tuner import Tuner
from .references import with_references

__all__ = ["ReferenceCheck"]


@dataclass
class ReferenceCheck:
    """Write all sites of a pass that says what the rewritten model must be equal to, and compare once.

    What is wrong is found by halving. So a pass with many sites costs what one costs, and its sites, which were chosen
    together, are not left out for want of time.

    Attributes:
        tuner: writes the sites.
        history: what stands.
        seed: of upstream gradients and random draws.
    """

    tuner: Tuner
    history: History
    seed: int = 0
    _pass: Pass = field(init=False)

    def undecided(self, pass_: Pass, found: Sequence[Group | Refusal]) -> list[Group | Refusal]:
        """Return what is left to be decided one by one."""
        groups = [item for item in found if isinstance(item, Group)]
        if len(groups) < 2 or not self._is_suitable(pass_, groups):
            return list(found)
        self._pass = pass_
        decided = set(map(id, self._compared(groups)))
        return [item for item in found if id(item) not in decided]

    def _is_suitable(self, pass_: Pass, groups: Sequence[Group]) -> bool:
        says = pass_.numerics is Numerics.SEMANTIC and type(pass_).reference is not Pass.reference
        plain = all(group.is_single and group.choices == (None,) for group in groups)
        return says and plain and pass_.goal is not Goal.SPEED and self.tuner.checks and bool(self._calls)

    @property
    def _calls(self) -> Sequence[Inputs]:
        return self.tuner.program.whole_calls

    def _decided(self, groups: Sequence[Group]) -> list[Group]:
        """Compare; where no time is left, briefly, to find what is wrong, and what is left of them once in full.

        Raises:
            BudgetError: it takes longer to find what is wrong.
        """
        if self.tuner.has_time(self._pass):
            return self._compared(groups)
        wrong = self._wrong(groups)
        rest = [group for group in groups if id(group) not in wrong]
        decided = self._left([Candidate(each, wrong[id(each)]) for each in groups if id(each) in wrong])
        return decided + (self._compared(rest, last=True) if rest else [])

    def _wrong(self, groups: Sequence[Group]) -> dict[int, str]:
        """Return the groups, by their identity, to which a brief comparison objects, with the reason."""
        verdict, written = self._tried(groups, hurried=True)
        self._undo(written)
        if verdict is None or verdict.ok:
            return {}
        if len(groups) == 1:
            return {id(groups[0]): verdict.reason}
        half = len(groups) // 2
        return {**self._wrong(groups[:half]), **self._wrong(groups[half:])}

    def _compared(self, groups: Sequence[Group], *, last: bool = False) -> list[Group]:
        """Write groups and compare; of several that are wrong, each half by itself."""
        refused: list[Candidate] = []
        verdict, written = self._tried(groups, refused)
        decided = self._left(refused)
        if verdict is None:
            self._undo(written)
            return decided
        if verdict.ok:
            return [*decided, *self._kept(written, verdict)]
        self._undo(written)
        if len(written) == 1:
            self.history.leave(self._pass, Candidate(written[0][0], verdict.reason))
            return [*decided, written[0][0]]
        if last:
            raise BudgetError(
                f"pass '{self._pass.name}': {verdict.reason}; {self.tuner.budget} was spent before it was known at "
                f"which of {len(written)} places; give a larger time_budget"
            )
        rest, half = [group for group, _ in written], len(written) // 2
        return [*decided, *self._decided(rest[:half]), *self._decided(rest[half:])]

    def _tried(
        self, groups: Sequence[Group], refused: list[Candidate] | None = None, *, hurried: bool = False
    ) -> tuple[verification.Verdict | None, list[tuple[Group, Edit]]]:
        """Write groups and compare; return the verdict, and what stands in the program now."""
        with self.tuner.budget.spending():
            original = copied_module(self.tuner.program.model)
            written, cannot_be = self._written(groups)
            if refused is not None:
                refused += cannot_be
            return (self._verdict(original, written, hurried=hurried) if written else None), written

    def _left(self, candidates: Sequence[Candidate]) -> list[Group]:
        """Note why groups are left as they are."""
        for candidate in candidates:
            self.history.leave(self._pass, candidate)
        return [candidate.group for candidate in candidates]

    def _undo(self, written: Sequence[tuple[Group, Edit]]) -> None:
        for _, edit in reversed(written):
            edit.undo()

    def _written(self, groups: Sequence[Group]) -> tuple[list[tuple[Group, Edit]], list[Candidate]]:
        written: list[tuple[Group, Edit]] = []
        refused: list[Candidate] = []
        try:
            for group in groups:
                try:
                    written.append((group, self.tuner.apply(self._pass, group)))
                except MatchFailure as failure:
                    refused.append(Candidate(group, str(failure), was_written=False))
        except PassError:
            self._undo(written)
            raise
        return written, refused

    def _verdict(
        self, original: nn.Module, written: Sequence[tuple[Group, Edit]], *, hurried: bool
    ) -> verification.Verdict | None:
        """Return the worst verdict on the model, or None where the pass does not say what it must be equal to."""
        total = StateMap()
        for _, edit in written:
            total = total.compose(edit.state_map_of_model())
        expected = with_references(original, [(self._pass, group.sites[0]) for group, _ in written])
        if expected is None:
            return None
        modes = verification.modes_to_check(self.tuner.program.model, self._phase, self.tuner.program.training)
        simulation = verification.Simulation.taken(
            expected,
            self._calls,
            modes=modes[:1] if hurried else modes,
            gradients=self._phase.covers_training and not hurried,
            seed=self.seed,
            sizes=verification.Sizes.SMALLER,
            widest=torch.float32 if hurried else torch.float64,
        )
        verdicts = simulation.verdicts(self.tuner.program.model, self._mapping(total))
        return min(verdicts, key=lambda verdict: (verdict.ok, -verdict.meaning_error))

    def _mapping(self, total: StateMap) -> verification.MapState:
        """Return the map of all that is written; what regions borrow goes by the names of those who lend it."""
        modules = self.tuner.program.names.modules
        borrowed = tuple(f"{name}." for name, module in modules.items() if isinstance(module, Region))
        if not borrowed:
            return total.forward
        return lambda state: total.forward({n: t for n, t in state.items() if not n.startswith(borrowed)})

    @property
    def _phase(self) -> Phase:
        return self._pass.phase

    def _kept(self, written: Sequence[tuple[Group, Edit]], verdict: verification.Verdict) -> list[Group]:
        figures = {
            "checked": verdict.checked_in, "meaning_error": verdict.meaning_error,
            "precision_error": verdict.precision_error, "checked_together": len(written),
        }  # fmt: skip
        for group, edit in written:
            self.history.keep(self._pass, Candidate(group, verdict=verdict, edit=edit, figures=figures), edit)
        self.tuner.calls.forget()
        return [group for group, _ in written]
