"""Recurrent layers of N members at once: the loop over time is theirs in common, and each step is batched products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .ensemble import batched_linear

__all__ = ["recurrent_members"]

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Tensor, "Tensor | None"], State]


def recurrent_members(
    x: Tensor, weights: Mapping[str, Tensor], options: Mapping[str, Any], training: bool, shared: bool
) -> tuple[Tensor, Any]:
    """Run `nn.LSTM`, `nn.GRU` or `nn.RNN` number i on input i, from states of zero; weights are [N, ...] by name.
    Takes x [T, B, in] if `shared`, else [N, T, B, in], or with `batch_first`, or without a batch; members come first.
    """
    count = weights["weight_ih_l0"].shape[0]
    layer = x.expand(count, *x.shape) if shared else x
    batched = layer.ndim == 4
    flip = batched and options["batch_first"]
    layer = layer.transpose(1, 2) if flip else layer if batched else layer.unsqueeze(2)
    finals: list[State] = []
    for number in range(options["num_layers"]):
        if number and options["dropout"]:
            layer = F.dropout(layer, options["dropout"], training)
        layer, states = _layer(layer, weights, options, number)
        finals.extend(states)
    output = layer.transpose(1, 2) if flip else layer if batched else layer.squeeze(2)
    last = tuple(torch.stack(parts, 1) for parts in zip(*finals, strict=True))
    last = last if batched else tuple(state.squeeze(2) for state in last)
    return output, last if options["mode"] == "LSTM" else next(iter(last))


def _layer(
    x: Tensor, weights: Mapping[str, Tensor], options: Mapping[str, Any], number: int
) -> tuple[Tensor, list[State]]:
    outputs: list[Tensor] = []
    finals: list[State] = []
    for suffix in ("", "_reverse") if options["bidirectional"] else ("",):
        named = {name: weights.get(f"{name}_l{number}{suffix}") for name in _NAMES}
        output, state = _direction(x, named, options, reverse=bool(suffix))
        outputs.append(output)
        finals.append(state)
    return (torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]), finals


_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _direction(
    x: Tensor, named: Mapping[str, Tensor | None], options: Mapping[str, Any], reverse: bool
) -> tuple[Tensor, State]:
    kernel, recurrent, bias, hidden_bias = (named[name] for name in _NAMES)
    if kernel is None or recurrent is None:
        raise LookupError("a recurrent layer without weights")
    given = batched_linear(x, kernel, bias)
    step, states = _STEPS[options["mode"]]
    zero = x.new_zeros(x.shape[0], x.shape[2], options["hidden_size"])
    state: State = (zero,) * states
    outputs: list[Tensor] = []
    moments = given.unbind(1)
    for now in reversed(moments) if reverse else moments:
        state = step(now, state, recurrent, hidden_bias)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs, 1), state


def _lstm(given: Tensor, state: State, recurrent: Tensor, bias: Tensor | None) -> State:
    hidden, cell = state
    into, forget, new, out = (given + batched_linear(hidden, recurrent, bias)).chunk(4, -1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru(given: Tensor, state: State, recurrent: Tensor, bias: Tensor | None) -> State:
    (hidden,) = state
    reset, update, new = given.chunk(3, -1)
    reset_h, update_h, new_h = batched_linear(hidden, recurrent, bias).chunk(3, -1)
    candidate = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (candidate + (update + update_h).sigmoid() * (hidden - candidate),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(given: Tensor, state: State, recurrent: Tensor, bias: Tensor | None) -> State:
        return (activation(given + batched_linear(state[0], recurrent, bias)),)

    return step


_STEPS: Mapping[str, tuple[Step, int]] = {
    "LSTM": (_lstm, 2),
    "GRU": (_gru, 1),
    "RNN_TANH": (_rnn(torch.tanh), 1),
    "RNN_RELU": (_rnn(torch.relu), 1),
}
