"""What a run knows: what the user asked for, the program, the time that is left, and what was decided until now."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ...errors import PassError
from ...runtime.record import Plan
from ...settings import Measure, Settings
from ...tracing.examples import Inputs
from ...tracing.program import Program, is_on_meta
from ..contract import Pass
from ..rewriting import Snapshot
from ..sites import Goal, Numerics, Phase, Reason
from ..timing import DEFAULT_BUDGET, BudgetRequest, TimeBudget
from .groups import Group
from .history import History
from .site_calls import SiteCalls

__all__ = ["Check", "Progress", "Request", "RunContext"]


@dataclass(frozen=True)
class Progress:
    """Where a run is: at which pass or check, and how many of its sites are decided, of a total if one is known."""

    what: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked."""

    words: Callable[[Reason], str]  # what plans say of a reason
    passes: Sequence[Pass] = ()  # in the order in which they run
    inputs: tuple[Inputs, ...] = ()
    phase: Phase | None = None  # None: the model's own mode
    verify: bool = True
    measure: Measure = Measure.YES
    plan: Plan | None = None  # decisions to repeat instead
    checks_plan: bool = False  # verify what the plan repeats: another rank has decided on it
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    time_budget: BudgetRequest = DEFAULT_BUDGET
    on_failure: Callable[[PassError], str | None] | None = None  # writes a reproducer and returns its path
    on_progress: Callable[[Progress], None] = lambda _: None
    cache: Path | None = None  # the folder of decisions of earlier runs; None: every run decides anew
    trains: bool = False  # whether an optimizer goes along
    twin: nn.Module | None = None  # small, with data: rewrites of a model on the meta device are verified in it

    @property
    def decides(self) -> bool:
        """Say whether rewrites are checked or timed, and no plan is repeated."""
        return self.plan is None and (self.verify or bool(self.measure))


class Check(enum.Enum):
    """How what a pass makes of a place is checked in the time that is left."""

    NOW = enum.auto()
    """In full."""
    BRIEFLY = enum.auto()
    """On one recorded call: no time is left, but the rewrite is owed."""
    WITH_THE_WHOLE = enum.auto()
    """Not by itself: comparing and timing the whole model tells enough of it."""
    NEVER = enum.auto()
    """The place is left as it was."""


@dataclass(frozen=True)
class RunContext:
    """What every part of one run knows; its program is rewritten in place."""

    program: Program
    request: Request
    budget: TimeBudget
    trained: Collection[nn.Module]  # those that the user gave in training mode
    calls: SiteCalls
    history: History
    snapshot: Snapshot = field(default_factory=Snapshot)
    objected: set[str] = field(default_factory=set[str])  # the keys of sites that a check found to be wrong

    @classmethod
    def of(
        cls, program: Program, request: Request, budget: TimeBudget, trained: Collection[nn.Module] | None = None
    ) -> RunContext:
        """Return the context of a run that begins; by default those modules are trained that are in training now."""
        if trained is None:
            trained = {module for module in program.names.distinct if module.training}
        return cls(program, request, budget, trained, SiteCalls(program, budget), History(request.words))

    @property
    def checks(self) -> bool:
        """Say whether rewrites are verified."""
        return self.request.verify and not is_on_meta(self.program.model)

    def is_timed(self, pass_: Pass) -> bool:
        """Say whether what a pass finds is timed at its sites."""
        return bool(self.request.measure) and pass_.goal is Goal.SPEED and not pass_.profiles_itself

    def asks(self, pass_: Pass, group: Group) -> bool:
        """Say whether there is anything to verify or to time at a group."""
        if not (self.request.verify or self.is_timed(pass_)) or is_on_meta(self.program.module(group.owner)):
            return False
        return bool(self.calls.of(group.owner))

    def leaves_to_the_whole(self, pass_: Pass) -> bool:
        """Say whether comparing and timing the whole model tells enough of what a pass writes where time is over."""
        return pass_.only_speeds_up and self.checks and bool(self.program.whole_calls)

    def check_of(self, pass_: Pass, group: Group | None = None, *, ended: bool = False) -> Check:
        """Return how a group, or what else a pass may find, is checked as much time as is left; `ended`: time has just
        ended in the middle of a check. What a check objected to is left neither to the whole model nor to a brief one.
        """
        if not ended and (not self.request.verify or self.budget.allows_check(clean_up=pass_.clean_up)):
            return Check.NOW
        if group is not None and not self.objected.isdisjoint(site.key for site in group.sites):
            return Check.NEVER if ended or pass_.skippable else Check.NOW
        may_be_left = pass_.skippable if group is None else group.may_be_left(pass_)
        if may_be_left and self.leaves_to_the_whole(pass_):
            is_written = ended or self.budget.allows_writing(skippable=pass_.skippable)
            return Check.WITH_THE_WHOLE if is_written else Check.NEVER
        return Check.NEVER if pass_.skippable else Check.BRIEFLY

    def note_change(self, pass_: Pass) -> None:
        """Note that a rewrite of a pass stands: within a budget, calls stay good inputs to compare on."""
        if pass_.numerics is Numerics.SEMANTIC:
            self.calls.forget()

    def forget(self) -> None:
        """Learn anew what the modules are and how they are called: something else than a rewrite has changed them."""
        self.calls.forget()
        self.snapshot.forget()
