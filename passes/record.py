"""What an optimized model remembers of how it became what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tracing.program import Coverage
    from .plan import Plan
    from .state_map import StateMap

__all__ = ["Record"]


@dataclass
class Record:
    """Everything that reports, checkpoints and replays need; it holds text and numbers, no module and no graph.

    Attributes:
        plan: every decision, in the order taken.
        state_map: from the original names and tensors to today's.
        graphs_before, graphs_after: the text of each graph by its module's qualified name ("" is the root).
        coverage: how much of the model was captured, and what was not.
        parameters_before, parameters_after: numbers of elements, tied ones counted once.
        timings: the whole model on the example inputs, if timed: "before_ms", "after_ms" and their ratio, "speedup".
        checked: what the rewrites were verified in: "float64", "float32", "not at all".
        messages: warnings and notes, a line each.
    """

    plan: Plan
    state_map: StateMap
    graphs_before: Mapping[str, str]
    graphs_after: Mapping[str, str]
    coverage: Coverage
    parameters_before: int
    parameters_after: int
    timings: Mapping[str, float] | None = None
    checked: str = "not at all"
    messages: list[str] = field(default_factory=list)
