"""Verify all that a pass changes by design at once: on the whole model, beside what it must be equal to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ....errors import MatchFailure, PassError
from ....tracing.graphs import Region
from ....tracing.values import Inputs
from ... import verification
from ...contract import Pass
from ...rewriting import Edit
from ...sites import Goal, Numerics, Phase, Refusal
from ...state import StateMap, copied_module
from ..groups import Group
from ..history import History
from ..tuner import Candidate, Tuner
from .references import with_references

__all__ = ["Simulated"]


@dataclass
class Simulated:
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
        """Compare, while there is time."""
        unchecked = [each for group in groups if (each := self.tuner.unchecked(self._pass, group)) is not None]
        return self._left(unchecked) or self._compared(groups)

    def _compared(self, groups: Sequence[Group]) -> list[Group]:
        """Write groups and compare; of several that are wrong, each half by itself."""
        with self.tuner.budget.spending():
            original = copied_module(self.tuner.program.model)
            written, refused = self._written(groups)
            verdict = self._verdict(original, written) if written else None
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
        rest, half = [group for group, _ in written], len(written) // 2
        return [*decided, *self._decided(rest[:half]), *self._decided(rest[half:])]

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

    def _verdict(self, original: nn.Module, written: Sequence[tuple[Group, Edit]]) -> verification.Verdict | None:
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
            modes=modes,
            gradients=self._phase.covers_training,
            seed=self.seed,
            sizes=verification.Sizes.SMALLER,
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
