"""What layers with small numbers err by, and gain: each is compared, and one of each kind timed, by itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import MatchFailure
from ...passes.sites import Cause
from ...passes.timing import time_kind, timing_figures
from ...passes.verification import Tolerance, distance
from ...runtime.values import user_class
from ...settings import Measure
from ...tracing.program import Program
from ...tracing.recording import Call
from .eligible import Layer
from .replacing import Instead

__all__ = ["Judgement", "Make", "error_of", "judged"]

_ANY = Tolerance(0.0, math.inf)

_BYTES = 2**25
"""So much of a kind is called in turn, where there is as much: in use, weights do not wait in the caches either."""

Make = Callable[[nn.Module], Instead]


@dataclass(frozen=True)
class Judgement:
    """What is known of a layer with small numbers.

    Attributes:
        error: of its results, relative to their scale.
        figures: what plans say of it.
        objection: why it is not to be had, or "".
        layer: it, as long as others are looked at.
        cause: the kind of objection.
    """

    error: float = 0.0
    figures: Mapping[str, Any] | None = None
    objection: str = ""
    layer: nn.Module | None = None
    cause: Cause = Cause.JUDGED_WRONG

    @property
    def gain(self) -> float:
        """Return the seconds that it saves for its error; where nothing was timed, only the error counts."""
        figures = self.figures or {}
        saved = figures["before_us"] - figures["after_us"] if "after_us" in figures else 1.0
        return saved / max(self.error, 1e-12)


def judged(
    program: Program, layers: Sequence[Layer], make: Make, budget: float, *, measuring: Measure
) -> list[Judgement]:
    """Compare layers with the same in small numbers, on what the model gives them.

    Args:
        program: whose example inputs call all of them.
        layers: to be judged.
        make: returns what would stand in the place of one, or raises `MatchFailure`.
        budget: the error that is allowed.
        measuring: whether, and how, they are timed; then those are objected to that are no faster.
    """
    calls = program.recording([layer.module for layer in layers]).calls
    kinds: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(_kind(layer.module, calls[layer.module]), []).append(number)
    found: dict[int, Judgement] = {}
    with torch.no_grad():
        for alike in kinds.values():
            trial = _Trial([layers[number].module for number in alike], calls, make, budget)
            found.update(zip(alike, trial.judgements(measuring), strict=True))
    return [found[number] for number in range(len(layers))]


def error_of(expected: Any, found: Any) -> float:
    """Return the largest difference between tensors of floats in two results, relative to the scale of each."""
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
    floats = ((old, new) for old, new in pairs if isinstance(old, Tensor) and old.is_floating_point())
    return max((distance(old, new, _ANY).error for old, new in floats), default=0.0)


@dataclass
class _Trial:
    """Layers of one kind, beside the same in small numbers."""

    modules: Sequence[nn.Module]
    calls: Mapping[nn.Module, Sequence[Call]]
    make: Make
    budget: float

    def judgements(self, measuring: Measure) -> list[Judgement]:
        """Return what is known of each, in order."""
        some: list[tuple[nn.Module, nn.Module]] = []
        found: list[Judgement] = []
        for module in self.modules:
            try:
                instead = self.make(module).layer
            except MatchFailure as failure:
                found.append(Judgement(objection=str(failure)))
                continue
            found.append(self._compared(module, instead))
            if measuring and not found[-1].objection and sum(_size(each) for each, _ in some) < _BYTES:
                some.append((module, instead))
        if not some:
            return found
        figures = self._timed(some, cold=measuring.is_cold)
        return [self._beside(each, figures) for each in found]

    def _compared(self, module: nn.Module, instead: nn.Module) -> Judgement:
        calls = self.calls[module]
        chosen = {0, (len(calls) - 1) // 2, len(calls) - 1}  # the first, one in the middle, the last
        error = max(
            error_of(calls[number].output, instead(*calls[number].args, **calls[number].kwargs)) for number in chosen
        )
        if error <= self.budget:
            return Judgement(error, layer=instead)
        return Judgement(
            error, objection=f"it errs by {error:.2g} of its scale, more than the budget of {self.budget:g}"
        )

    def _timed(self, some: Sequence[tuple[nn.Module, nn.Module]], *, cold: bool) -> dict[str, Any]:
        given = [(self.calls[module][0].args, self.calls[module][0].kwargs) for module, _ in some]

        def run(layers: Sequence[nn.Module]) -> Callable[[], None]:
            def call() -> None:
                for layer, (args, kwargs) in zip(layers, given, strict=True):
                    layer(*args, **kwargs)

            return call

        before, after = run([module for module, _ in some]), run([instead for _, instead in some])
        return timing_figures(time_kind(before, after, least=1.0, cold=cold), count=len(some))

    def _beside(self, judgement: Judgement, figures: Mapping[str, Any]) -> Judgement:
        slow = f"no faster: {figures['speedup']:.3g}x ({figures['speedup_low']:.3g} to {figures['speedup_high']:.3g})"
        if judgement.objection or figures["speedup"] > 1.0:
            return dataclasses.replace(judgement, figures=figures)
        return dataclasses.replace(judgement, figures=figures, objection=slow, cause=Cause.JUDGED_SLOWER)


def _size(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def _kind(module: nn.Module, calls: Sequence[Call]) -> Hashable:
    """Return what layers that take as long have in common."""
    given: list[object] = pytree.tree_leaves((calls[0].args, calls[0].kwargs))
    shapes = tuple((each.shape, each.dtype) if isinstance(each, Tensor) else type(each).__name__ for each in given)
    tensors = tuple((name, tuple(each.shape), each.dtype) for name, each in module.named_parameters())
    return user_class(type(module)), shapes, tensors, repr(module)
