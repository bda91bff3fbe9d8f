"""Layers that compute in floats what they would compute in 8 bits, for a while: what does each of them cost?"""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....compat import own_parameters
from ....errors import CalibrationError
from ....layers.quantized import Range
from ....passes.state import dequantized, quantized
from ....passes.verification import smaller
from ....tracing.program import Program
from ....tracing.recording import preserved
from ....tracing.values import Inputs
from ...calibration import run_call
from ..judging import error_of

__all__ = ["RoundedModel"]


@dataclass(frozen=True)
class Layer:
    """A layer, the range of its input, and its weight as 8 bits hold it."""

    module: nn.Module
    range: Range
    weight: Tensor

    @classmethod
    def of(cls, module: nn.Module, range_: Range, group: int) -> Layer:
        weight = cast("Tensor", own_parameters(module)["weight"]).detach()
        return cls(module, range_, dequantized(*quantized(weight, "int8", group), "int8", weight.dtype))

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

    def own_error(self, x: Tensor, result: Tensor) -> float:
        """Return by how much the layer's own result is off, relative to its scale."""
        with self.rounded():
            return error_of(result, self.module.forward(self.range.rounded(x)))


class RoundedModel:
    """Run a model on one call with some of its layers rounded, and compare.

    Args:
        program: of the model, which is left as it is.
        ranges: of the inputs of layers, by name.
        group: see `quantized`.
        call: of the model.
    """

    def __init__(self, program: Program, ranges: Mapping[str, Range], group: int, call: Inputs) -> None:
        self._model, self._call = program.model, call
        self._layers = {name: Layer.of(program.module(name), range_, group) for name, range_ in ranges.items()}
        self.own_errors: dict[str, float] = {}
        self._expected = self._run_watched()

    def on_less(self) -> RoundedModel:
        """Return the same on a smaller call, if the model takes one."""
        for args, kwargs in smaller((self._call.args, self._call.kwargs)):
            other = copy.copy(self)
            other._call = Inputs(*args, **kwargs)
            with suppress(CalibrationError):
                other._expected = other._run()
                return other
        return self

    def error(self, names: Collection[str]) -> float:
        """Return by how much the model's results are off where these layers are rounded, relative to their scale."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self._layers[name].rounded())
                stack.callback(self._hook(name, _round_input))
            return error_of(self._expected, self._run())

    def _run_watched(self) -> Any:
        with ExitStack() as stack:
            for name, layer in self._layers.items():
                handle = layer.module.register_forward_hook(partial(self._compare, name), with_kwargs=True)
                stack.callback(handle.remove)
            return self._run()

    def _run(self) -> Any:
        with torch.no_grad(), preserved(self._model):
            return run_call(self._model, self._call, 0)

    def _hook(self, name: str, hook: Any) -> Any:
        layer = self._layers[name]
        return layer.module.register_forward_pre_hook(partial(hook, layer), with_kwargs=True).remove

    def _compare(self, name: str, _: nn.Module, args: Any, kwargs: Any, result: Tensor) -> None:
        error = self._layers[name].own_error(args[0] if args else kwargs["input"], result)
        self.own_errors[name] = max(error, self.own_errors.get(name, 0.0))


def _round_input(layer: Layer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = layer.range.rounded(args[0] if args else kwargs["input"])
    return (x,), {}
