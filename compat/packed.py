"""The packed kernels of oneDNN for floats on CPUs: private names of PyTorch, all in one place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = [
    "Geometry", "Recurrence", "convolution_of", "convolution_packed", "is_packed", "linear_packed", "linear_product",
    "lstm_as_torch", "lstm_layer", "lstm_packed", "why_no_packing",
]  # fmt: skip

_OPERATORS: Any = cast("Any", torch.ops).mkldnn
_NEEDED = (
    "_reorder_linear_weight", "_linear_pointwise", "_reorder_convolution_weight", "_convolution_pointwise",
    "_reorder_convolution_transpose_weight", "_convolution_transpose_pointwise", "_reorder_mkldnn_rnn_layer_weight",
)  # fmt: skip

is_packed: Callable[[Tensor], bool] = cast("Any", Tensor).is_mkldnn.__get__
"""Say whether a tensor is in the form that oneDNN reads."""


@cache
def why_no_packing(dtype: torch.dtype) -> str:
    """Return why this machine or this PyTorch cannot compute with packed weights of a dtype, or ""."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    missing = next((name for name in _NEEDED if not hasattr(_OPERATORS, name)), None)
    if missing is not None:
        return f"this PyTorch lacks torch.ops.mkldnn.{missing}"
    if dtype is torch.bfloat16 and not _OPERATORS._is_mkldnn_bf16_supported():
        return "this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16 or the like), so it would be slower"
    return ""


def linear_packed(weight: Tensor) -> Tensor:
    """Return a weight, [outputs, inputs], as oneDNN reads it."""
    return _OPERATORS._reorder_linear_weight(weight)


@cache
def _linear() -> Any:
    return _OPERATORS._linear_pointwise.default


def linear_product(x: Tensor, packed: Tensor, bias: Tensor | None, behind: tuple[str, list[float], str]) -> Tensor:
    """Return `x @ weight.T + bias` with an activation behind it: its name there, its numbers, and its kind."""
    name, scalars, kind = behind
    return _linear()(x, packed, bias, name, scalars, kind)


@dataclass(frozen=True)
class Geometry:
    """The settings of a convolution, one number for each dimension that it moves along."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None
    size: tuple[int, ...] | None = None  # of the inputs that the weight is packed for, None for any
    padding_after: tuple[int, ...] | None = None  # zeros behind the input where they differ

    @property
    def rank(self) -> int:
        return len(self.stride)

    @property
    def lists(self) -> tuple[list[int], list[int], list[int], int]:
        """Return what all kernels take, in their order."""
        return list(self.stride), list(self.padding), list(self.dilation), self.groups

    @cached_property
    def even(self) -> Geometry:
        """Return the settings for kernels that pad alike, and `part`, what is wanted of their results."""
        if self.padding_after is None:
            return self
        most = zip(self.padding, self.padding_after, self.stride, strict=True)
        padding = tuple(before + stride * max(-((before - behind) // stride), 0) for before, behind, stride in most)
        return replace(self, padding=padding, padding_after=None)

    def with_zeros(self, before: Sequence[int], after: Sequence[int]) -> Geometry:
        """Return it with so many more zeros before and behind each dimension."""
        most = tuple(map(operator.add, self.padding, before))
        behind = tuple(map(operator.add, self.padding_after or self.padding, after))
        return replace(self, padding=most, padding_after=None if most == behind else behind)

    def part(self, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[slice, ...]:
        """Return what is wanted of the results of a kernel with even padding, for inputs of `sizes`."""
        slices = [slice(None), slice(None)]
        for dim, size in enumerate(sizes):
            around = size + self.padding[dim] + (self.padding_after or self.padding)[dim]
            start = (self.even.padding[dim] - self.padding[dim]) // self.stride[dim]
            count = (around - self.dilation[dim] * (kernel[dim] - 1) - 1) // self.stride[dim] + 1
            slices.append(slice(start, start + count))
        return tuple(slices)


def convolution_packed(weight: Tensor, its: Geometry) -> Tensor:
    """Return the weight of a convolution along two or three dimensions as oneDNN reads it."""
    rest = its.stride, its.dilation, its.groups, its.size
    if its.output_padding is None:
        return _OPERATORS._reorder_convolution_weight(weight, its.padding, *rest)
    return _OPERATORS._reorder_convolution_transpose_weight(weight, its.padding, its.output_padding, *rest)


@cache
def _convolutions() -> tuple[Any, Any]:
    return _OPERATORS._convolution_pointwise.default, _OPERATORS._convolution_transpose_pointwise.default


def convolution_of(
    its: Geometry, behind: tuple[str, list[float], str]
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return what computes a convolution and an activation, channels last, of input, packed weight and bias."""
    plain, transposed = _convolutions()
    function, padding = (plain, ()) if its.output_padding is None else (transposed, (its.output_padding,))
    settings = its.padding, *padding, its.stride, its.dilation, its.groups, *behind

    def compute(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return function(x, packed, bias, *settings)

    return compute


@dataclass(frozen=True)
class Recurrence:
    """The settings of an LSTM, as `torch.nn.LSTM` names them."""

    input_size: int
    hidden_size: int
    num_layers: int = 1
    bias: bool = True
    batch_first: bool = False
    bidirectional: bool = False

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors in the order in which they are read: layers, directions, kinds."""
        ends = [f"_l{n}{end}" for n in range(self.num_layers) for end in ("", "_reverse")[: self.directions]]
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: self.count]
        return [f"{kind}{end}" for end in ends for kind in kinds]

    @property
    def count(self) -> int:
        """Return how many tensors there are for a layer in one direction."""
        return 4 if self.bias else 2


_LSTM = 2
"""What the kernel calls an LSTM."""


def lstm_packed(tensors: Sequence[Tensor], hidden: int) -> tuple[Tensor, ...]:
    """Return weights of a one-way LSTM layer ([4 * hidden, inputs], ...), and its biases, as oneDNN reads them."""
    weights = [each.contiguous() for each in tensors[:2]]
    biases = [each.contiguous() for each in tensors[2:]] or [weights[0].new_zeros(4 * hidden)] * 2
    return *_OPERATORS._reorder_mkldnn_rnn_layer_weight(*weights, hidden, False, True, False), *biases


@cache
def _lstm() -> Any:
    return cast("Any", torch.ops).aten.mkldnn_rnn_layer.default


def lstm_layer(
    x: Tensor, packed: Sequence[Tensor], states: tuple[Tensor, Tensor], its: Recurrence, *, is_reversed: bool
) -> list[Tensor]:
    """Return outputs [T, N, hidden], hidden and cell state of a one-way LSTM layer; states are [1, N, hidden] each."""
    sizes, kind = its.hidden_size, its.bidirectional
    return _lstm()(x, *packed, *states, is_reversed, [], _LSTM, sizes, its.num_layers, True, kind, False, False)[:3]


class _Shell:
    """What the forward of `torch.nn.LSTM` reads, for tensors that are handed over: threads share nothing."""

    mode, proj_size, dropout, training = "LSTM", 0, 0.0, False
    _own: Any = nn.LSTM
    forward, check_input, check_hidden_size = _own.forward, _own.check_input, _own.check_hidden_size
    check_forward_args, permute_hidden = _own.check_forward_args, _own.permute_hidden
    get_expected_hidden_size, get_expected_cell_size = _own.get_expected_hidden_size, _own.get_expected_cell_size

    def __init__(self, its: Recurrence, tensors: Sequence[Tensor]) -> None:
        vars(self).update(vars(its))
        self._flat_weights = list(tensors)

    def _update_flat_weights(self) -> None:
        """Let the tensors be those that were handed over."""


def lstm_as_torch(x: Any, hx: Any, tensors: Sequence[Tensor], its: Recurrence) -> Any:
    """Return what `torch.nn.LSTM` gives in evaluation, with its checks, for tensors in the order of its own."""
    return _Shell(its, tensors).forward(x, hx)
