"""How the modules around a pass's sites are called: recorded in one run for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ...errors import CaptureError
from ...tracing.examples import Inputs
from ...tracing.isolation import AutocastState
from ...tracing.program import Program
from ..timing import Stage, TimeBudget

__all__ = ["SiteCalls"]


class SiteCalls:
    """Look up the recorded calls of the owners of one pass's sites.

    A rewrite that keeps the function keeps them good inputs; to run the whole model for every site would be quadratic.
    """

    def __init__(self, program: Program, budget: TimeBudget) -> None:
        self._program, self._budget = program, budget
        self._owners: tuple[str, ...] = ()
        self._calls: Mapping[nn.Module, Sequence[Inputs]] | None = None
        self._autocast: Mapping[nn.Module, AutocastState | None] = {}

    def expect(self, owners: Iterable[str]) -> None:
        """Record anew, and then the calls of all modules of these names in one run."""
        self._owners = tuple(dict.fromkeys(owners))
        self.forget()

    def of(self, owner: str) -> Sequence[Inputs]:
        """Return the calls of the module called `owner`; none without example inputs, or where nothing calls it."""
        if not self._program.inputs:
            return ()
        module = self._program.module(owner)
        if self._calls is None or module not in self._calls:
            self._calls = self._recorded((*self._owners, owner))
        return self._calls[module]

    def under(self, owner: str) -> AutocastState | None:
        """Return the autocast that the calls `of` a module ran under, which a region around it may have switched on."""
        if not self.of(owner):
            return None
        return self._autocast.get(self._program.module(owner))

    def forget(self) -> None:
        """Record anew: the function has changed."""
        self._calls = None

    def _recorded(self, owners: Iterable[str]) -> Mapping[nn.Module, Sequence[Inputs]]:
        modules = dict.fromkeys(module for owner in owners if (module := self._find(owner)) is not None)
        with self._budget.spending(Stage.CHECKING):
            found = self._program.recording(modules).calls
        called = {module: found[module] for module in modules if found.get(module)}
        self._autocast = {module: calls[0].autocast_state for module, calls in called.items()}
        # What each call gave, and called in turn, would keep every tensor of the whole run alive.
        kept = {
            module: [Inputs(*c.args, **c.kwargs) for c in calls if c.autocast_state == calls[0].autocast_state]
            for module, calls in called.items()
        }
        return {module: kept.get(module, []) for module in modules}

    def _find(self, owner: str) -> nn.Module | None:
        try:
            return self._program.module(owner)
        except CaptureError:
            return None  # an earlier rewrite removed it
