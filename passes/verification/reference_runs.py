"""Run one module exactly (in float64 where it can) and natively, under conditions that repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...runtime.values import Arguments, flatten
from .execution import Execution, Kept, Outcome
from .float64 import Float64Mode
from .inputs import jittered
from .module_harness import ModuleHarness
from .tape import Tape

__all__ = ["ReferenceRuns", "coarsest_epsilon", "epsilon_of", "raised_by"]

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
class ReferenceRuns:
    """Give a module's exact and native runs, and find out on the way what they take.

    The first exact run goes under `Float64Mode`, which is slow; where it had nothing to promote, later ones of the same
    graph go without.

    Attributes:
        harness: the module.
        training: the mode to run in; None leaves every flag as it is.
        gradients: whether gradients are wanted.
        of_inputs: whether those of float arguments are wanted too; some modules take none that require them.
        seed: of upstream gradients and random draws.
        wide: the type of exact runs; None means that there are native runs only.
        keyed: name draws by the node they happen in, where the module has a graph.
        random: whether the draws come from a tape.
        several: whether calls run several graphs, so that the first run does not tell what the others take.
        whole: run a model as it is handed over: its own forward, whatever it is, on the random draws that it is served.
        inner: modules inside whose graphs are interpreted in exact runs; see `Execution`.
        called: those of them that ran.
        census: what the first exact run was made of.
    """

    harness: ModuleHarness
    training: bool | None
    gradients: bool
    seed: int
    wide: torch.dtype | None = torch.float64
    keyed: bool = True
    random: bool = False
    of_inputs: bool = True
    several: bool = False
    whole: bool = False
    inner: Sequence[str] = ()
    called: set[str] = field(default_factory=set[str])
    _kept: Kept = field(default_factory=dict[tuple[int, torch.dtype], "tuple[Tensor, int]"])
    census: Float64Mode | None = None

    def exact(
        self, arguments: Arguments, state: Mapping[str, Tensor], like: Arguments | None = None, *, second: bool = False,
        frozen: bool = False,
    ) -> Outcome:  # fmt: skip
        """Run in `wide`; a run that turns out to be random is run again from the tape.

        A captured module runs the graph that a call with `like` would (by default, one with `arguments`). Gradients are
        the second ones where these are asked for; those of parameters are left out where these are frozen.
        """
        if self.wide is None:
            return self.native(arguments, state)
        watched = self.census is None or self.several
        mode = self.census or Float64Mode(self.wide)
        trial = self._trial(self.wide, mode if watched or mode.promoted else None)
        trial.second, trial.frozen = second, frozen
        run = trial.run(arguments, state, like)
        self.census = mode
        if mode.random and not self.random and not self.whole:
            self.random = True
            return self.exact(arguments, state, like, second=second, frozen=frozen)
        return run

    def native(self, arguments: Arguments, state: Mapping[str, Tensor]) -> Outcome:
        """Run in the module's own types, random draws from the tape."""
        return self._trial(None, None).run(arguments, state)

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
        trial = self._trial(None, None)
        trial.gradients = False
        return trial.serve(calls, state, untaken)

    def doubled(self, arguments: Arguments, state: Mapping[str, Tensor]) -> Outcome:
        """Run as a module that was converted to float64: what its code casts or makes besides keeps its types."""
        trial = self._trial(torch.float64, None)
        trial.gradients, trial.by_node, trial.inner, trial.defaults = False, False, (), False
        return trial.run(arguments, state)

    def stepped(
        self, calls: tuple[Arguments, Arguments], state: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> Outcome:
        """Run in the module's own types, without gradients; change arguments and state in place; run again."""
        trial = self._trial(None, None)
        trial.gradients = False
        return trial.step(calls, state, after)

    def stream(self, arguments: Arguments, state: Mapping[str, Tensor]) -> Outcome:
        """Run in the module's own types on the plain random stream."""
        seed = self.seed + _STREAM
        return Execution(self.harness, self.training, self.gradients, self.of_inputs, seed).run(arguments, state)

    def _trial(self, wide: torch.dtype | None, mode: Float64Mode | None) -> Execution:
        tape = Tape(self.seed, keyed=self.keyed) if self.random else None
        by_node = (wide is not None or self.random) and not self.whole
        return Execution(
            self.harness, self.training, self.gradients, self.of_inputs, self.seed, wide, mode, tape, by_node,
            inner=self.inner if by_node else (), called=self.called, kept=self._kept,
        )  # fmt: skip


def coarsest_epsilon(arguments: Arguments, state: Mapping[str, Tensor]) -> float:
    """Return the resolution of the coarsest float type among inputs and state; float32's where there is none."""
    leaves: Iterable[Any] = (*state.values(), *flatten(arguments).values())
    kinds = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point}
    known = [torch.finfo(kind).eps for kind in kinds if kind.itemsize > 1]
    return max(known, default=torch.finfo(torch.float32).eps)


def epsilon_of(wide: torch.dtype | None) -> float | None:
    """Return the resolution of `wide`; None for None."""
    return None if wide is None else torch.finfo(wide).eps
