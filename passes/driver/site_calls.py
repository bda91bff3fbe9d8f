"""How the modules around a pass's sites are called: recorded in one run for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ...errors import CaptureError
from ...tracing.program import Program
from ...tracing.values import Inputs

__all__ = ["SiteCalls"]


class SiteCalls:
    """Look up the recorded calls of the homes of one pass's sites.

    A rewrite that keeps the function keeps the calls, but for rounding: they stay good inputs to compare on and to time
    with. Running the whole model anew for every site would cost the square of its length.

    Args:
        program: which the sites are in.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._homes: tuple[str, ...] = ()
        self._calls: Mapping[nn.Module, Sequence[Inputs]] | None = None

    def expect(self, homes: Iterable[str]) -> None:
        """Record anew, and then the calls of all modules of these names in one run."""
        self._homes = tuple(dict.fromkeys(homes))
        self.forget()

    def of(self, home: str) -> Sequence[Inputs]:
        """Return the calls of the module called `home`; none where there are no example inputs, or it is not called."""
        if not self._program.inputs:
            return ()
        module = self._program.module(home)
        if self._calls is None or module not in self._calls:
            self._calls = self._recorded((*self._homes, home))
        return self._calls[module]

    def forget(self) -> None:
        """Record anew: the function has changed."""
        self._calls = None

    def _recorded(self, homes: Iterable[str]) -> Mapping[nn.Module, Sequence[Inputs]]:
        modules = dict.fromkeys(module for home in homes if (module := self._find(home)) is not None)
        found = self._program.recording(modules).calls
        # What each call gave, and called in turn, would keep every tensor of the whole run alive.
        return {module: [Inputs(*call.args, **call.kwargs) for call in found.get(module, ())] for module in modules}

    def _find(self, home: str) -> nn.Module | None:
        try:
            return self._program.module(home)
        except CaptureError:
            return None  # an earlier rewrite removed it
