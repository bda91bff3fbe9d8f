"""What passes find, and the words of their contract: sites and refusals; numerics, goals and phases."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx, nn

from ...tracing.program import Program

__all__ = ["Goal", "Numerics", "OwnForward", "Phase", "Refusal", "Site"]


class Numerics(enum.Enum):
    """What a rewrite promises about results."""

    EXACT = "exact"
    """Bitwise the same, the random stream included."""
    REASSOCIATED = "reassociated"
    """The same function in exact arithmetic; rounding may differ."""
    APPROXIMATE = "approximate"
    """Another function within an error budget that the pass's options state."""
    SEMANTIC = "semantic"
    """Another function by design."""


class Goal(enum.Enum):
    """What a rewrite is for; it decides how the rewrite is measured."""

    SPEED = "speed"
    MEMORY = "memory"
    SIZE = "size"
    PARALLEL = "parallel"


class Phase(enum.Enum):
    """When a rewrite is valid."""

    EVAL = "eval"
    TRAIN = "train"
    BOTH = "both"

    @property
    def covers_training(self) -> bool:
        return self is not Phase.EVAL

    @property
    def covers_evaluation(self) -> bool:
        return self is not Phase.TRAIN


class OwnForward(enum.Enum):
    """What the original forward of a rewritten module is worth for a call that no graph fits."""

    RIGHT = "right"
    """It gives the same: it may run."""
    ACCEPTABLE = "acceptable"
    """It gives something else that the user can do with (the unquantized function, say): it may run."""
    WRONG = "wrong"
    """It must not run: the call raises GuardError."""


@dataclass(frozen=True)
class Refusal:
    """Say why a place that looks right is left as it is.

    Attributes:
        reason: one clause, without a full stop.
        at: the name of the node or module at fault, qualified from the root.
    """

    reason: str
    at: str | fx.Node


@dataclass(frozen=True)
class Site:
    """One place that a pass wants to rewrite.

    Nodes are kept by name, so that a site survives copies of its graph, and a plan can name it.

    Attributes:
        program: where the site is.
        owner: qualified name of the module whose graph holds the nodes ("" is the root).
        nodes: label -> name of a node in that graph.
        specialization: which of the owner's graphs (0 unless training and evaluation differ).
        choices: the lowerings that `rewrite` can produce, in order of preference; empty if there is one only.
        choice: the lowering that `rewrite` shall produce now.
        phase: narrows the pass's own phase for this site.
        required: the user asked for this choice by name: it is timed and reported, but kept where it is slower.
        detail: one clause for the report ("128 members, 4 parameters each").
        label: what the report calls the site; the owner's name by default.
        kind: equal for sites of one owner that are alike, so that what is measured of one holds for all; None is
            like no other.
        opened: while the site is rewritten, gives its graph as it may be edited; None while it is only looked at.
    """

    program: Program = field(repr=False, compare=False)
    owner: str
    nodes: Mapping[str, str]
    specialization: int = 0
    choices: tuple[str, ...] = ()
    choice: str | None = None
    phase: Phase | None = None
    required: bool = False
    detail: str = ""
    label: str = ""
    kind: Hashable = None
    opened: Callable[[], fx.Graph] | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, label: str) -> fx.Node:
        """Return the node called `label`, looked up in the graph as it is now; in `rewrite`, in that being edited."""
        if self.opened is not None:
            self.opened()
        return self.program.node(self.owner, self.nodes[label], self.specialization)

    @property
    def graph(self) -> fx.Graph:
        """Return the graph as it is now; in `rewrite`, the one being edited."""
        if self.opened is not None:
            self.opened()
        return self.program.graph(self.owner, self.specialization)

    def module(self, label: str) -> nn.Module:
        """Return the module that the call_module node `label` calls."""
        return self.program.callee(self.owner, self[label])

    @property
    def key(self) -> str:
        """Name the site: stable over runs of the same model, and printable."""
        suffix = f"#{self.specialization}" if self.specialization else ""
        owner = f"{self.owner or '(root)'}{suffix}"
        names = sorted(self.nodes.values())
        if not names:
            return owner
        span = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}({len(names)})"
        return f"{owner}:{span}"
