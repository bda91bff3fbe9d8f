"""What a pass is: a frozen value that finds sites in a program and rewrites them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx, nn

from .options import format_options

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["FunctionPass", "Goal", "Numerics", "OwnForward", "Pass", "Phase", "Refusal", "Site"]


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
        home: qualified name of the module whose graph holds the nodes ("" is the root).
        nodes: label -> name of a node in that graph.
        variant: which of the home's graphs (0 unless training and evaluation differ).
        choices: the lowerings that `rewrite` can produce, in order of preference; empty if there is one only.
        choice: the lowering that `rewrite` shall produce now.
        phase: narrows the pass's own phase for this site.
        required: the user asked for this choice by name: it is timed and reported, but kept where it is slower.
        detail: one clause for the report ("128 members, 4 parameters each").
        label: what the report calls the site; the home's name by default.
        kind: equal for sites of one home that are alike, so that what is measured of one holds for all; None is like no
            other.
    """

    program: Program = field(repr=False, compare=False)
    home: str
    nodes: Mapping[str, str]
    variant: int = 0
    choices: tuple[str, ...] = ()
    choice: str | None = None
    phase: Phase | None = None
    required: bool = False
    detail: str = ""
    label: str = ""
    kind: Hashable = None

    def __getitem__(self, label: str) -> fx.Node:
        """Return the node called `label`, looked up in the graph as it is now."""
        return self.program.node(self.home, self.nodes[label], self.variant)

    @property
    def graph(self) -> fx.Graph:
        return self.program.graph(self.home, self.variant)

    def module(self, label: str) -> nn.Module:
        """Return the module that the call_module node `label` calls."""
        return self.program.callee(self.home, self[label])

    @property
    def key(self) -> str:
        """Name the site: stable over runs of the same model, and printable."""
        suffix = f"#{self.variant}" if self.variant else ""
        home = f"{self.home or '(root)'}{suffix}"
        names = sorted(self.nodes.values())
        if not names:
            return home
        span = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}({len(names)})"
        return f"{home}:{span}"


class Pass:
    """Base of all passes; subclass it as a frozen dataclass whose fields are the pass's options.

    A subclass's docstring says Before, After and Refuses. The class attributes are its contract:

    Attributes:
        numerics: what verification demands.
        goal: what measurement demands; only `Goal.SPEED` sites are timed one by one.
        clean_up: whether a site saves too little to be timed; where the whole model is slower, such sites go first.
        phase: when the result is valid.
        own_forward: whether the original forward of a module that the pass rewrote may run where no graph fits a call.
            None: it is right where the pass keeps the function, unless it would leave out a region or does not know
            tensors that the pass added; else wrong.
        before: names of passes that must not run earlier than this one.
        after: names of passes that must not run later than this one.
        requires: names of passes that must have run already.
        destroys: pass name -> why it can no longer run once this pass has.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    clean_up: ClassVar[bool] = False
    phase: ClassVar[Phase] = Phase.BOTH
    own_forward: ClassVar[OwnForward | None] = None
    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    destroys: ClassVar[Mapping[str, str]] = {}

    @property
    def name(self) -> str:
        """Return the pass's name: the class name in snake_case, the same as its file and pipeline word."""
        return snake_case(type(self).__name__)

    def find(self, program: Program) -> Iterable[Site | Refusal]:
        """Yield every place this pass could rewrite, and every near miss with its reason; change nothing."""
        raise NotImplementedError(f"{type(self).__name__}.find")

    def rewrite(self, site: Site, edit: Any) -> None:
        """Rewrite one site, through `edit` only: an `Edit`, whose file stands above this one."""
        raise NotImplementedError(f"{type(self).__name__}.rewrite")

    def rewrite_group(self, sites: Sequence[Site], edit: Any) -> None:
        """Rewrite several sites of one graph, in order; a pass may know a cheaper way than one after another."""
        for site in sites:
            with edit.at(site):
                self.rewrite(site, edit)

    def __str__(self) -> str:
        return f"{self.name}{format_options(self)}" if is_dataclass(self) else self.name


@dataclass(frozen=True)
class FunctionPass(Pass):
    """Run a plain function on each captured module, given and returned as a `GraphModule`.

    Before: any captured module        After: what the function made of its graph
    Refuses: nothing of its own; what it returns is checked like any other rewrite.
    """

    function: Callable[[fx.GraphModule], fx.GraphModule]

    goal: ClassVar[Goal] = Goal.SIZE

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def find(self, program: Program) -> Iterable[Site]:
        for home, capture in program.captures.items():
            for variant in range(len(capture.variants)):
                yield Site(program, home, {}, variant)

    def rewrite(self, site: Site, edit: Any) -> None:
        edit.run_function(self.function)

    def __str__(self) -> str:
        return self.name


def snake_case(name: str) -> str:
    """Return `FuseEnsembles` as `fuse_ensembles`."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
