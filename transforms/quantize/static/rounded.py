"""Layers that compute in floats what they would compute in 8 bits, for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....compat import own_parameters
from ....compat.quantized import static_format
from ....passes.kinds import error_of
from ....runtime.state import dequantized, quantized
from ..layers import outputs_first, weight_of
from ..methods import shift_of
from .scaling import InputForm

__all__ = ["RoundedLayer"]


@dataclass(frozen=True)
class RoundedLayer:
    """A layer, the form of its input, its weight as 8 bits hold it, with one scale for each output, and its bias, if
    calibration has shifted it.
    """

    module: nn.Module
    input: InputForm
    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Module, form: InputForm, group: int) -> RoundedLayer:
        own = outputs_first(module, weight_of(module).detach()).contiguous()
        weight = own if form.weight is None else form.weight.to(own).reshape(own.shape)
        factors, bias = form.factors(weight), None
        values, scales = quantized(weight if factors is None else weight / factors, static_format(), group)
        wide = dequantized(values, scales, static_format(), weight.dtype)
        if form.shift:
            own_bias = own_parameters(module).get("bias")
            bias = (shift_of(form.shift, len(weight)).to(scales) * scales).to(weight.dtype)
            bias = bias if own_bias is None else own_bias.detach() + bias
        rounded = outputs_first(module, wide if factors is None else wide * factors)
        return cls(module, form, rounded, scales.expand(len(weight)), bias)

    @contextmanager
    def _rounded(self) -> Generator[None]:
        """Let the layer have the rounded weight, and the bias that is shifted, for a while."""
        registry, tensors = own_parameters(self.module), {"weight": self.weight}
        if self.bias is not None:
            tensors["bias"] = self.bias
        before = {name: registry[name] for name in tensors}
        registry.update({name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()})
        try:
            yield
        finally:
            registry.update(before)

    @contextmanager
    def computed_rounded(self) -> Generator[None]:
        """Let the layer compute with the rounded weight and its shift, on a rounded input, for a while."""
        handle = self.module.register_forward_pre_hook(self._round_input, with_kwargs=True)
        try:
            with self._rounded():
                yield
        finally:
            handle.remove()

    def _round_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (self.input.rounded(args[0] if args else kwargs["input"]),), {}

    def own_error(self, x: Tensor, result: Tensor) -> float:
        """Return by how much the layer's own result is off, relative to its scale."""
        with self._rounded():
            return error_of(result, self.module.forward(self.input.rounded(x)))
