"""Which layers stay in floats, so that the whole model is within the budget: those that cost the most."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ....compat import own_parameters
from ....compat.quantized import static_format
from ....passes.kinds import error_of
from ....runtime.state import dequantized, quantized
from ....tracing.examples import Inputs
from ....tracing.program import Program
from ...comparing import ComparedRun
from ..judging import Judge, Measurement
from ..layers import outputs_first, weight_of
from ..options import Options
from ..within import costs, left_out
from .scaling import InputForm

__all__ = ["Sensitivity", "sensitivity"]


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing costs, relative to the scale: each layer's results, and the model's by it alone."""

    own: Mapping[str, float]
    alone: Mapping[str, float] = field(default_factory=dict[str, float])
    left: Sequence[str] = ()
    together: str = ""  # what all layers cost, in words
    metric: Measurement | None = None  # with the layers that are not left


def sensitivity(
    program: Program, ranges: Mapping[str, InputForm], options: Options, calls: Sequence[Inputs]
) -> Sensitivity:
    """Simulate the quantized model on calls, and leave out as few layers as bring it within what may be lost."""
    simulation = _RoundedModel(program, ranges, options.group, calls)
    judge = Judge(simulation, options)
    lost = judge.loss(list(ranges))
    if lost <= judge.allowed:
        return Sensitivity(simulation.own_errors, metric=judge.measured(ranges))
    alone = costs(ranges, simulation.on_less().error)
    left = left_out(alone, judge.loss, judge.allowed)
    return Sensitivity(simulation.own_errors, alone, left, judge.said(lost), judge.measured(ranges.keys() - set(left)))


# -- layers that compute in floats what they would compute in 8 bits, for a while ----------------------------------


@dataclass(frozen=True)
class _Rounded:
    """A layer, the form of its input, and its weight as 8 bits hold it."""

    module: nn.Module
    input: InputForm
    weight: Tensor

    @classmethod
    def of(cls, module: nn.Module, form: InputForm, group: int) -> _Rounded:
        own = outputs_first(module, weight_of(module).detach()).contiguous()
        weight = own if form.weight is None else form.weight.to(own)
        factors = form.factors(weight)
        held = quantized(weight if factors is None else weight / factors, static_format(), group)
        wide = dequantized(*held, static_format(), weight.dtype)
        return cls(module, form, outputs_first(module, wide if factors is None else wide * factors))

    @contextmanager
    def rounded(self) -> Generator[None]:
        """Let the layer have the rounded weight for a while."""
        registry = own_parameters(self.module)
        before = registry["weight"]
        registry["weight"] = nn.Parameter(self.weight, requires_grad=False)
        try:
            yield
        finally:
            registry["weight"] = before

    @contextmanager
    def computed_rounded(self) -> Generator[None]:
        """Let the layer compute with the rounded weight, on a rounded input, for a while."""
        handle = self.module.register_forward_pre_hook(self._round_input, with_kwargs=True)
        try:
            with self.rounded():
                yield
        finally:
            handle.remove()

    def _round_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (self.input.rounded(args[0] if args else kwargs["input"]),), {}

    def own_error(self, x: Tensor, result: Tensor) -> float:
        """Return by how much the layer's own result is off, relative to its scale."""
        with self.rounded():
            return error_of(result, self.module.forward(self.input.rounded(x)))


class _RoundedModel(ComparedRun[str]):
    """Run a model on calls with some layers rounded, by name and form of their inputs, and compare."""

    def __init__(self, program: Program, ranges: Mapping[str, InputForm], group: int, calls: Sequence[Inputs]) -> None:
        layers = {name: _Rounded.of(program.module(name), form, group) for name, form in ranges.items()}
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
