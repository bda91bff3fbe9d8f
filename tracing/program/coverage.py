"""How much of a model runs from graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.graphs import Miss
from .capturing import Opaque

__all__ = ["Coverage"]


@dataclass(frozen=True)
class Coverage:
    """Count a model's modules by how they run: from a graph, as one operation each, or their original forward, and why.

    `missed` are the guards that turned calls away since the model was handed over, by module.
    """

    captured: Sequence[str]
    leaves: Sequence[str]
    opaque: Sequence[Opaque]
    missed: Sequence[Miss] = ()

    @property
    def share(self) -> float:
        """Return the part of the modules with a forward of the user's that runs from a graph, from 0 to 1."""
        total = len(self.captured) + len(self.opaque)
        return len(self.captured) / total if total else 1.0

    @property
    def text(self) -> str:
        """Return the figures and every reason, a line each."""
        total = len(self.captured) + len(self.opaque)
        head = f"{len(self.captured)} of {total} modules captured ({self.share:.0%}), {len(self.leaves)} leaves"
        missed = (f"  missed: {miss.module or '(root)'}: {miss}" for miss in self.missed)
        return "\n".join([head, *(f"  opaque: {opaque}" for opaque in self.opaque), *missed])

    def __str__(self) -> str:
        return self.text
