"""Whether the kernels of this machine compute what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.quantized import (
    Int8DynamicLinear,
    Int8DynamicLSTM,
    QuantizedLinear,
    quantized_by_rows,
    steps_of_rows,
)
from ...runtime.state import quantized

__all__ = ["kernel_problem", "lstm_problem"]

_ROWS = (1, 2, 17, 130)
"""Calls with so many rows are tried: kernels choose by it how to compute."""

_DIFFERENT = 17
_ROUNDING = 2.0**-6
"""What scales, activations and results in bfloat16 may make of the largest result; sums of integers are exact."""

_CALL_OF_LSTM = (4, 3)
"""Steps and rows."""
_ROUNDING_OF_LSTM = 0.1
"""Of the largest result: its activations are rounded at each step, which moves the results by 3% at the most."""


@cache
def kernel_problem(kind: type[QuantizedLinear], outputs: int, inputs: int, group: int) -> str:
    """Return in what a kernel of the CPU, or its gradients, differ from its simulation in floating point, or ""."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
        layer = kind(*quantized(weight, kind.form, group), nn.Parameter(bias), torch.float32)
        some = torch.randn(_DIFFERENT, inputs, generator=generator)
        wide = layer.wide_weight()
        reason = next(filter(None, (_product_problem(layer, wide, some, rows) for rows in _ROWS)), "")
        reason = reason or _gradient_problem(layer, some)
    return f"the kernel for {inputs} to {outputs} is off by {reason}" if reason else ""


def lstm_problem(lstm: nn.LSTM, group: int) -> str:
    """Return in what the kernel for an LSTM of these sizes differs from the LSTM with dequantized weights, or ""."""
    return _lstm_problem(
        lstm.input_size, lstm.hidden_size, lstm.num_layers, lstm.bias, lstm.batch_first, lstm.bidirectional, group
    )


@cache
def _lstm_problem(
    inputs: int, hidden: int, layers: int, bias: bool, batch_first: bool, bidirectional: bool, group: int
) -> str:
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.no_grad():
        lstm = nn.LSTM(inputs, hidden, layers, bias, batch_first, 0.0, bidirectional, device="meta")
        layer = _random_lstm(lstm.to_empty(device="cpu"), group, generator)
        x = torch.randn(*_CALL_OF_LSTM, inputs, generator=generator)
        states = torch.randn(2, len(lstm.all_weights), x.shape[1 - batch_first], hidden, generator=generator)
        found, expected = (run(x, (states[0], states[1])) for run in (layer.kernel, layer.simulated))
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        error, allowed = float((one - other).abs().max()), _ROUNDING_OF_LSTM * float(other.abs().max())
        if not error <= allowed:
            return f"the kernel for an LSTM of {inputs} to {hidden} is off by {error:.3g}, not {allowed:.3g}"
    return ""


def _random_lstm(lstm: nn.LSTM, group: int, generator: torch.Generator) -> Int8DynamicLSTM:
    held: dict[str, tuple[Tensor, Tensor]] = {}
    for name, parameter in lstm.named_parameters():
        parameter.normal_(std=lstm.hidden_size**-0.5, generator=generator)
        if name.startswith("weight_"):
            held[name] = quantized(parameter, "int8", group)
    return Int8DynamicLSTM(lstm, held)


def _product_problem(layer: QuantizedLinear, weight: Tensor, some: Tensor, rows: int) -> str:
    """Compare a call with so many rows, of which few are different: only those are simulated."""
    with torch.no_grad():
        expected, allowed = _simulated(layer, weight, some[:rows])
        index = torch.arange(rows) % len(some)
        error = float((layer.kernel(some[index]) - expected[index]).abs().max())
    return "" if error <= allowed else f"{error:.3g}, not {allowed:.3g}, with {rows} rows"


def _gradient_problem(layer: QuantizedLinear, some: Tensor) -> str:
    """Compare the gradients of input and bias with those of the simulation."""
    for name, found, expected in zip(
        ("input", "bias"),
        _gradients(layer, layer.with_gradient, some),
        _gradients(layer, layer.in_floats, some),
        strict=True,
    ):
        error, allowed = float((found - expected).abs().max()), _ROUNDING * float(expected.abs().max())
        if not error <= allowed:
            return f"{error:.3g}, not {allowed:.3g}, in the gradient of its {name}"
    return ""


def _gradients(layer: QuantizedLinear, compute: Callable[[Tensor], Tensor], some: Tensor) -> Sequence[Tensor]:
    with torch.enable_grad():
        x = some.clone().requires_grad_()
        result = compute(x)
        return torch.autograd.grad([result], [x, cast("Tensor", layer.bias)], [some[:, :1].expand_as(result)])


def _simulated(layer: QuantizedLinear, weight: Tensor, x: Tensor) -> tuple[Tensor, float]:
    """Return what a layer stands for, and what rounding may do to it."""
    if not isinstance(layer, Int8DynamicLinear):
        expected = F.linear(x.bfloat16().float(), weight, layer.bias)
        return expected, _ROUNDING * float(expected.abs().max())
    # An activation in the middle between two steps may be rounded to either.
    step = float(steps_of_rows(x).max())
    return F.linear(quantized_by_rows(x), weight, layer.bias), 2 * step * float(weight.abs().max())
