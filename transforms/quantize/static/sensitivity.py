"""Which layers stay in floats, so that the whole model is within the budget: those that cost the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ....tracing.examples import Inputs
from ....tracing.program import Program
from ...comparing import ComparedRun
from ..judging import Judge, Measurement
from ..options import Options
from ..within import costs_in_groups, left_out
from .rounded import RoundedLayer
from .scaling import InputForm

__all__ = ["RoundedModel", "Sensitivity", "sensitivity"]


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing costs, relative to the scale: each layer's results, and about the model's by it alone."""

    own: Mapping[str, float]
    alone: Mapping[str, float] = field(default_factory=dict[str, float])
    left: Sequence[str] = ()
    together: str = ""  # what all layers cost, in words
    metric: Measurement | None = None  # with the layers that are not left


def sensitivity(
    program: Program, ranges: Mapping[str, InputForm], options: Options, calls: Sequence[Inputs]
) -> Sensitivity:
    """Simulate the quantized model on calls, and leave out as few layers as bring it within what may be lost."""
    simulation = RoundedModel(program, ranges, options.group, calls)
    judge = Judge(simulation, options)
    lost = judge.loss(list(ranges))
    if lost <= judge.allowed:
        return Sensitivity(simulation.own_errors, metric=judge.measured(ranges))
    alone = costs_in_groups(
        dict.fromkeys(ranges, 1), simulation.on_less().error, judge.allowed if options.metric is None else 0.0
    )
    left = left_out(alone, judge.loss, judge.allowed)
    return Sensitivity(simulation.own_errors, alone, left, judge.said(lost), judge.measured(ranges.keys() - set(left)))


class RoundedModel(ComparedRun[str]):
    """Run a model on calls with some layers rounded, by name and form of their inputs, and compare."""

    def __init__(self, program: Program, ranges: Mapping[str, InputForm], group: int, calls: Sequence[Inputs]) -> None:
        layers = {name: RoundedLayer.of(program.module(name), form, group) for name, form in ranges.items()}
        self._layers = layers
        self.own_errors: dict[str, float] = {}
        with ExitStack() as stack:
            for name, layer in layers.items():
                handle = layer.module.register_forward_hook(partial(self._compare, name), with_kwargs=True)
                stack.callback(handle.remove)
            super().__init__(program.model, calls, lambda name: layers[name].computed_rounded())

    def _compare(self, name: str, _: nn.Module, args: Any, kwargs: Any, result: Tensor) -> None:
        error = self._layers[name].own_error(args[0] if args else kwargs["input"], result)
        self.own_errors[name] = max(error, self.own_errors.get(name, 0.0))
