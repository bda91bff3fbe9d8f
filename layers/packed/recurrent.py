"""LSTMs on packed weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat import runs_kernels, wants_gradients
from ...compat.packed import Recurrence, is_packed, lstm_as_torch, lstm_layer, lstm_packed
from ...operators import Derived, derived
from .weights import BySettings, can_be_packed

__all__ = ["PackedLSTM", "Recurrence"]

State = tuple[Tensor, Tensor]
Result = tuple[Tensor, State]


@dataclass(frozen=True)
class _PackRecurrence:
    """Pack the tensors of a layer in one direction; return them as they are where that cannot be."""

    inputs: int
    hidden: int
    dtype: torch.dtype

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        gates = 4 * self.hidden
        shapes = [(gates, self.inputs), (gates, self.hidden), (gates,), (gates,)]
        fit = all(tuple(tensor.shape) == shape for tensor, shape in zip(tensors, shapes, strict=False))
        if not fit or not all(map(can_be_packed, tensors)):
            return tensors
        return lstm_packed([tensor.detach().to(self.dtype) for tensor in tensors], self.hidden)


class PackedLSTM(BySettings):
    """Compute an LSTM on packed weights, or as torch does where that cannot be: packed or empty sequences, say."""

    operator = "packed_lstm"
    __name__ = "packed_lstm"

    def __init__(self, its: Recurrence, dtype: torch.dtype = torch.float32) -> None:
        self.its, self.dtype, self.settings = its, dtype, (its, dtype)
        later = its.directions * its.hidden_size
        sizes = [later if number else its.input_size for number in range(its.num_layers)]
        self.weights: list[Derived] = [
            derived(_PackRecurrence(size, its.hidden_size, dtype), its.count)
            for size in sizes
            for _ in range(its.directions)
        ]  # fmt: skip

    def __call__(self, x: Any, hx: State | None, *tensors: Tensor) -> Result:
        """Return what `torch.nn.LSTM` gives for x, states and weights and biases in the order of `Recurrence.names`."""
        if not self._takes(x, hx, tensors):
            return self.plainly(x, hx, *tensors)
        count = self.its.count
        packed = [made(*tensors[at * count : (at + 1) * count]) for at, made in enumerate(self.weights)]
        if not all(is_packed(each[0]) for each in packed):
            return self.plainly(x, hx, *tensors)
        return self._computed(x, hx, packed)

    def _takes(self, x: Any, hx: State | None, tensors: Sequence[Tensor]) -> bool:
        """Say whether kernels may compute with these: nobody wants gradients, and they are plain tensors of float32."""
        if not (type(x) is Tensor and x.dim() == 3 and x.size(2) == self.its.input_size and _is_plain(x)):
            return False
        if hx is not None:
            shape = (len(self.weights), x.size(0 if self.its.batch_first else 1), self.its.hidden_size)
            if len(hx) != 2 or not all(type(h) is Tensor and _is_plain(h) and h.shape == shape for h in hx):
                return False
        if wants_gradients(x, *(hx or ()), *tensors):
            return False
        return len(tensors) == len(self.weights) * self.its.count and runs_kernels()

    def _computed(self, x: Tensor, hx: State | None, packed: Sequence[Sequence[Tensor]]) -> Result:
        its, dtype = self.its, self.dtype
        given = (x.transpose(0, 1) if its.batch_first else x).to(dtype).contiguous()
        if hx is None:
            zeros = given.new_zeros(len(packed), given.size(1), its.hidden_size)
            hx = zeros, zeros
        hidden, cells = (each.to(dtype).contiguous() for each in hx)
        last: list[tuple[Tensor, Tensor]] = []
        for layer in range(its.num_layers):
            outputs: list[Tensor] = []
            for direction in range(its.directions):
                at = layer * its.directions + direction
                states = hidden[at : at + 1], cells[at : at + 1]
                output, *state = lstm_layer(given, packed[at], states, its, is_reversed=direction == 1)
                outputs.append(output)
                last.append((state[0], state[1]))
            given = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        output = (given.transpose(0, 1) if its.batch_first else given).to(x.dtype)
        final = [
            torch.cat([each.reshape(1, -1, its.hidden_size) for each in kind]).to(x.dtype)
            for kind in zip(*last, strict=True)
        ]
        return output, (final[0], final[1])

    def plainly(self, x: Any, hx: State | None, *tensors: Tensor) -> Result:
        """Compute it as torch does."""
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            self._forget(tensors)  # an optimizer may step next, and torch does not count what fused ones write
        return lstm_as_torch(x, hx, tensors, self.its)

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        for at, made in enumerate(self.weights):
            if at * self.its.count < len(tensors) and tensors[at * self.its.count].requires_grad:
                made.forget(id(tensors[at * self.its.count]))


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu and x.layout is torch.strided and math.prod(x.shape) > 0
