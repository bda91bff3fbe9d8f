"""Verify all that a pass changes by design at once: on the whole model, beside what it must be equal to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ....compat import own_children
from ....errors import BudgetError
from ....runtime.graphs import Region
from ....runtime.state import StateMap
from ....tracing.examples import Inputs
from ....tracing.isolation import copied_module
from ... import verification
from ...contract import Pass
from ...pipeline import switches_kept
from ...sites import Goal, Numerics, Refusal, Site
from ...timing import Stage
from ..batch import Batch
from ..context import Check, RunContext
from ..groups import Candidate, Group
from ..halving import in_halves
from ..history import composed
from ..tuner import Tuner

__all__ = ["ReferenceCheck", "with_references"]


@dataclass
class ReferenceCheck:
    """Write all sites of a pass that has a reference, and compare once; what is wrong is found by halving.

    Its sites were chosen together: they take the time of one, and are not left out for want of time.
    """

    tuner: Tuner
    _pass: Pass = field(init=False)

    def undecided(self, pass_: Pass, found: Sequence[Group | Refusal]) -> list[Group | Refusal]:
        """Return what is left to be decided one by one."""
        groups = [item for item in found if isinstance(item, Group)]
        if len(groups) < 2 or not self._is_suitable(pass_, groups):
            return list(found)
        self._pass = pass_
        settled, wrong = self._compared(groups)
        decided = {id(each) for each in (*settled, *in_halves(wrong, self._judged))}
        return [item for item in found if id(item) not in decided]

    def _is_suitable(self, pass_: Pass, groups: Sequence[Group]) -> bool:
        says = pass_.numerics is Numerics.SEMANTIC and type(pass_).reference is not Pass.reference
        plain = all(group.is_single and group.choices == (None,) for group in groups)
        return says and plain and pass_.goal is not Goal.SPEED and self._context.checks and bool(self._calls)

    @property
    def _context(self) -> RunContext:
        return self.tuner.context

    @property
    def _calls(self) -> Sequence[Inputs]:
        return self._context.program.whole_calls

    def _judged(self, groups: Sequence[Group]) -> tuple[Sequence[Group], Sequence[Group]]:
        """Compare, briefly if no time is left, then the right ones in full; raise BudgetError if that takes longer."""
        if self._context.check_of(self._pass) is Check.NOW:
            return self._compared(groups)
        settled, doubtful = self._objections(groups)
        wrong = self._left([*settled, *in_halves(doubtful, self._objections)])
        known = set(map(id, wrong))
        rest = [group for group in groups if id(group) not in known]
        return [*wrong, *(self._compared(rest, last=True)[0] if rest else ())], ()

    def _objections(self, groups: Sequence[Group]) -> tuple[Sequence[Candidate], Sequence[Group]]:
        """Return the one group that a brief comparison objects to, or those of which it does to some."""
        verdict, batch = self._tried(groups, hurried=True)
        batch.undo()
        if verdict is None or verdict.ok:
            return (), ()
        return ([Candidate.wrong(groups[0], verdict)], ()) if len(groups) == 1 else ((), groups)

    def _compared(self, groups: Sequence[Group], *, last: bool = False) -> tuple[Sequence[Group], Sequence[Group]]:
        """Write groups and compare; return those that are decided, and those of which some are wrong."""
        verdict, batch = self._tried(groups)
        if verdict is not None and verdict.ok:
            left, kept = self._left(batch.refused), batch.keep(verdict)
            self._context.calls.forget()
            return [*left, *kept], ()
        batch.undo()
        alone = [Candidate.wrong(group, verdict) for group in batch.groups[:1] if verdict and len(batch.written) == 1]
        decided = self._left([*batch.refused, *alone])
        if verdict is None or alone:
            return decided, ()
        if last:
            raise BudgetError(
                f"pass '{self._pass.name}': {verdict.reason}; {self._context.budget} was spent before it was known at "
                f"which of {len(batch.written)} places; give a larger time_budget"
            )
        return decided, batch.groups

    def _tried(self, groups: Sequence[Group], *, hurried: bool = False) -> tuple[verification.Verdict | None, Batch]:
        """Write groups and compare; return the verdict, and what stands in the program now."""
        with self._context.budget.spending(Stage.CHECKING):
            original = copied_module(self._context.program.model)
            batch = Batch.of(self.tuner, self._pass, groups)
            return (self._verdict(original, batch, hurried=hurried) if batch.written else None), batch

    def _left(self, candidates: Sequence[Candidate]) -> list[Group]:
        """Note why groups are left as they are."""
        for candidate in candidates:
            self._context.history.leave(self._pass, candidate)
        return [candidate.group for candidate in candidates]

    def _verdict(self, original: nn.Module, batch: Batch, *, hurried: bool) -> verification.Verdict | None:
        """Return the worst verdict on the model, or None where the pass does not say what it must be equal to."""
        program = self._context.program
        expected = with_references(original, [(self._pass, group.sites[0]) for group in batch.groups])
        if expected is None:
            return None
        phase, wide = self._pass.phase, torch.float32 if hurried else torch.float64
        modes = verification.modes_to_check(program.model, phase, program.training)
        map_state = self._mapping(composed(batch.edits))

        def verdicts(mode: bool | None) -> list[verification.Verdict]:
            references = verification.References.taken(
                expected, self._calls, [mode], steady=True, brief=True,
                gradients=phase.covers_training and not hurried, seed=self._context.request.seed,
                sizes=verification.Sizes.SMALLER, widest=wide,
            )  # fmt: skip
            return references.verdicts(program.model, map_state=map_state)

        # One after the other: what the runs of one mode hold, gradients in float64, is gone before the next.
        return verification.worst(each for mode in modes[: 1 if hurried else None] for each in verdicts(mode))

    def _mapping(self, total: StateMap) -> verification.MapState:
        """Return the map of all that is written; what regions borrow goes by the names of those who lend it."""
        modules = self._context.program.names.modules
        borrowed = tuple(f"{name}." for name, module in modules.items() if isinstance(module, Region))
        if not borrowed:
            return total.forward
        return lambda state: total.forward({n: t for n, t in state.items() if not n.startswith(borrowed)})


def with_references(model: nn.Module, sites: Iterable[tuple[Pass, Site]]) -> nn.Module | None:
    """Change a copy of the original at sites, in order; None where a pass cannot say what it must be."""
    for pass_, site in sites:
        try:
            original = model.get_submodule(site.owner)
            with switches_kept():
                reference = pass_.reference(site, original)
        except Exception:  # the original may lack what an earlier rewrite made, and the site names
            return None
        if reference is None:
            return None
        if reference is not original:
            model = _put(model, site.owner, reference)
    return model


def _put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    path, _, last = name.rpartition(".")
    if not name:
        return module
    own_children(model.get_submodule(path)).update({last: module})  # fused members refuse items
    return model
