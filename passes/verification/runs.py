"""Run one module exactly (in float64 where it can) and natively, under conditions that repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...runtime.values import Arguments, flatten
from .execution import Conditions, Execution, StandIns
from .float64 import Float64Mode
from .inputs import jittered
from .module_harness import ModuleHarness
from .outcome import Outcome
from .tape import Tape

__all__ = ["Runs", "coarsest_epsilon", "raised_by"]

_STREAM = 0x0DD5EED0DD5EED
"""Where the plain random stream begins: at no seed that code sets, whose draws would look like those that go on."""

_NO_GRADIENT = re.compile(
    r"Trying to backward through (\S+?)(?:\.default)? but no autograd formula|derivative for (\S+) is not implemented"
)
"""What torch says of an operator without a gradient."""


def raised_by(name: str, failure: Exception | None) -> str:
    """Return what to say of an exception that a module of this class raised in its runs, and what to do."""
    without = _NO_GRADIENT.search(str(failure))
    if without is None:
        return f"{name} raised {type(failure).__name__} on a call it was recorded with: {failure}"
    operator = without[1] or without[2]
    return (
        f"{name} computes no gradients that can be checked: the operator {operator} has none; give it one by "
        "torch.library.register_autograd or, if the model is for inference only, call "
        "model.requires_grad_(False) first"
    )


@dataclass
class Runs:
    """Give a module's exact and native runs, and find out on the way what they take. The first exact run goes under
    `Float64Mode`, which is slow; where that had nothing to promote, later ones of the same graph go without.
    """

    harness: ModuleHarness  # the module
    conditions: Conditions  # what it is run under
    called: set[str] = field(default_factory=set[str])  # those inner modules that ran
    census: Float64Mode | None = None  # what the first exact run was made of
    kept: StandIns = field(default_factory=StandIns)  # see `Execution`

    @property
    def wide(self) -> torch.dtype | None:
        """Return the type of exact runs."""
        return self.conditions.wide

    def set(self, **changed: Any) -> None:
        """Change conditions; what was seen of another type of exact runs is forgotten."""
        self.census = None if "wide" in changed else self.census
        self.conditions = replace(self.conditions, **changed)

    def let_go(self) -> None:
        """Forget the stand-ins of exact runs: a later one makes them again."""
        for key in [key for key in self.kept if key[1] in (torch.float64, torch.complex128)]:
            del self.kept[key]

    def exact(
        self, arguments: Arguments, state: Mapping[str, Tensor], like: Arguments | None = None, *, second: bool = False,
        frozen: bool = False,
    ) -> Outcome:  # fmt: skip
        """Run in the wide type, from the tape where draws are random, on the graph that a call with `like`
        would run (by default `arguments`); with `second` derivatives, or with `frozen` parameters.
        """
        wide, given = self.wide, self.conditions
        if wide is None:
            return self.native(arguments, state)
        mode = self.census or Float64Mode(wide, given.in_time)
        is_watched = self.census is None or given.several or mode.promoted
        execution = self._execution(wide, promotion=mode if is_watched else None, second=second, frozen=frozen)
        run = execution.run(arguments, state, like)
        self.census = mode
        if mode.random and not given.random and not given.whole:
            self.set(random=True)
            return self.exact(arguments, state, like, second=second, frozen=frozen)
        return run

    def native(self, arguments: Arguments, state: Mapping[str, Tensor], *, gradients: bool = True) -> Outcome:
        """Run in the module's own types, random draws from the tape."""
        return self._execution(gradients=gradients).run(arguments, state)

    def around(
        self, arguments: Arguments, state: Mapping[str, Tensor], step: float, count: int, *,
        native: bool = False, second: bool = False, of_inputs: bool = True,
    ) -> Iterator[Outcome]:  # fmt: skip
        """Run on inputs and state that are off by `step`: what the module means is what they mean."""
        for number in range(count):
            near, values = jittered((arguments, dict(state)), step, None if native else self.wide, number)
            near = near if of_inputs else arguments
            yield self.native(near, values) if native else self.exact(near, values, like=arguments, second=second)

    def served(
        self, calls: Sequence[Arguments], state: Mapping[str, Tensor], untaken: set[int] | None = None
    ) -> list[Outcome]:
        """Make calls one after another in the module's own types, without gradients; see `Execution.serve`."""
        return self._execution(gradients=False).serve(calls, state, untaken)

    def doubled(self, arguments: Arguments, state: Mapping[str, Tensor]) -> Outcome:
        """Run as a module that was converted to float64: what its code casts or makes besides keeps its types."""
        execution = self._execution(torch.float64, gradients=False, defaults=False)
        return replace(execution, by_node=False).run(arguments, state)

    def stepped(
        self, calls: tuple[Arguments, Arguments], state: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> Outcome:
        """Run in the module's own types, without gradients; change arguments and state in place; run again."""
        return self._execution(gradients=False).step(calls, state, after)

    def stream(self, arguments: Arguments, state: Mapping[str, Tensor]) -> Outcome:
        """Run in the module's own types on the plain random stream."""
        conditions = replace(self.conditions, seed=self.conditions.seed + _STREAM)
        return Execution(self.harness, conditions).run(arguments, state)

    def _execution(self, wide: torch.dtype | None = None, *, gradients: bool = True, **settings: Any) -> Execution:
        given = self.conditions
        return Execution(
            self.harness, given if gradients else replace(given, gradients=False), wide,
            tape=Tape(given.seed, keyed=given.keyed) if given.random else None,
            by_node=(wide is not None or given.random) and not given.whole,
            called=self.called, kept=self.kept, **settings,
        )  # fmt: skip


def coarsest_epsilon(arguments: Arguments, state: Mapping[str, Tensor]) -> float:
    """Return the resolution of the coarsest float type among inputs and state; float32's where there is none."""
    leaves: Iterable[Any] = (*state.values(), *flatten(arguments).values())
    kinds = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point}
    known = [torch.finfo(kind).eps for kind in kinds if kind.itemsize > 1]
    return max(known, default=torch.finfo(torch.float32).eps)
