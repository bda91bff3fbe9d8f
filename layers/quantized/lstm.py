"""An LSTM whose weights are integers of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ...compat import autocast_dtype, is_plainly_eager, own_buffers, own_parameters, wants_gradients
from ...compat.quantized import int8_cells, int8_lstm, runs_simulation
from ...runtime.state import dequantized
from .layer import QuantizedLayer, is_finite

__all__ = ["Int8DynamicLSTM"]


class Int8DynamicLSTM(QuantizedLayer):
    """Quantize activations at each step, and multiply integers of 8 bits. Packed sequences, inputs without a batch and
    calls that want gradients run as the LSTM with the weights that the numbers stand for.
    """

    def __init__(self, lstm: nn.LSTM, weights: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        for name, (values, scales) in weights.items():
            self.register_buffer(f"{name}_values", values)
            self.register_buffer(f"{name}_scales", scales)
        for name, bias in own_parameters(lstm).items():
            if name not in weights:
                self.register_parameter(name, bias)
        self.weights = tuple(weights)
        self.__dict__["simulation"] = _without_data(lstm)  # no child: it has no tensors to save

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:  # noqa: A002  as nn.LSTM calls it
        if not isinstance(input, Tensor) or input.ndim != 3 or not input.is_cpu or not input.numel():
            return self.simulated(input, hx)
        wanted = wants_gradients(input, *self.parameters())
        if runs_simulation() or wanted or not is_plainly_eager() or not is_finite(input):
            if wanted:  # an optimizer may step on the biases next
                self.packing.forget()
            return self.simulated(input, hx)
        return self.kernel(input.to(autocast_dtype(input)), hx)

    def kernel(self, input: Tensor, hx: tuple[Tensor, Tensor] | None) -> Any:  # noqa: A002
        """Compute in int8; the results have the input's type."""
        lstm: nn.LSTM = self.__dict__["simulation"]
        cells = self.packing.of(self._packed, *own_buffers(self).values(), *own_parameters(self).values())
        directions = 2 if lstm.bidirectional else 1
        if hx is None:
            zeros = input.new_zeros(lstm.num_layers * directions, input.shape[1 - lstm.batch_first], lstm.hidden_size)
            hx = zeros, zeros
        output, *state = int8_lstm(input.float(), [each.float() for each in hx], cells, lstm)
        return output.to(input.dtype), tuple(each.to(input.dtype) for each in state)

    def simulated(self, input: Any, hx: tuple[Tensor, Tensor] | None) -> Any:  # noqa: A002
        """Compute what the kernel stands for in floating point."""
        buffers: Any = own_buffers(self)
        held = {name: (buffers[f"{name}_values"], buffers[f"{name}_scales"]) for name in self.weights}
        biases = own_parameters(self)
        dtype = next((bias.dtype for bias in biases.values() if bias is not None), input.data.dtype)  # after .double()
        weights = {name: dequantized(*pair, "int8", dtype) for name, pair in held.items()}
        tensors: Any = {**weights, **biases}
        return functional_call(self.__dict__["simulation"], tensors, (input, hx))

    def _packed(self, *_: Tensor) -> list[Any]:
        lstm: nn.LSTM = self.__dict__["simulation"]
        buffers, biases = own_buffers(self), own_parameters(self)
        endings = [f"_l{n}{end}" for n in range(lstm.num_layers) for end in ("", "_reverse")[: 1 + lstm.bidirectional]]
        pairs: list[Any] = []
        for ending in endings:
            for side in ("ih", "hh"):
                weight = f"weight_{side}{ending}"
                pairs.append(
                    (buffers[f"{weight}_values"], buffers[f"{weight}_scales"], biases.get(f"bias_{side}{ending}"))
                )
        return int8_cells(pairs)

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        return self.__dict__["simulation"].extra_repr()


def _without_data(lstm: nn.LSTM) -> nn.LSTM:
    return nn.LSTM(
        lstm.input_size, lstm.hidden_size, lstm.num_layers, lstm.bias, lstm.batch_first, 0.0, lstm.bidirectional,
        device="meta",
    ).eval()  # fmt: skip
