"""The layers of a graph that can be computed on packed weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from ...layers.packed import Activation, Geometry, PackedConvolution, PackedLinear, TransposedLinear, why_not_packed
from ...passes.rewriting import LayerCall, call_in, call_of_layer, is_undisturbed, reason_against_module, shape_of
from ...runtime.graphs import usual
from ...tracing.program import Program, is_called

__all__ = ["Packable", "graphs_in", "packable_at"]

_PADDING = "it pads otherwise than with zeros, or its settings are no plain numbers"


@dataclass(frozen=True)
class Packable:
    """A call of a layer that there are packed kernels for, with zeros that a `pad` before it adds, or why it stays."""

    call: LayerCall
    x: fx.Node
    reason: str
    geometry: Geometry | None = None
    pad: fx.Node | None = None

    def packed(
        self, activation: Activation, dtype: torch.dtype, joins: str = "add", *, transposed: bool = False
    ) -> PackedLinear | PackedConvolution:
        """Return what computes it on a packed weight, or at one row on a transposed one."""
        if transposed:
            return TransposedLinear(activation, joins, self.call.inputs_first)
        if self.geometry is None:
            return PackedLinear(activation, dtype, self.call.inputs_first, joins)
        size = None if self.geometry.size is None else self.given
        return PackedConvolution(dataclasses.replace(self.geometry, size=size), activation, dtype)

    @property
    def outputs(self) -> tuple[int, int] | None:
        """Return the dimensions of the outputs in the weight and in the result; None where they hang together."""
        if self.geometry is None:
            return 1 if self.call.inputs_first else 0, -1
        return None if self.call.groups > 1 or self.call.is_transposed else (0, -self.call.rank - 1)

    @property
    def terms(self) -> int:
        """Return how many products each output is the sum of, at the most."""
        return math.prod(self.call.shape) // self.call.shape[1 if self._is_other_way else 0]

    @property
    def rows(self) -> slice:
        """Return which part of what it is given stands for all: the last image."""
        is_batch = self.geometry is not None and len(shape_of(self.x) or ()) == self.call.rank + 2
        return slice(-1, None) if is_batch else slice(None)

    @property
    def given(self) -> tuple[int, ...] | None:
        """Return the shape of what it is given, as wide as its weight is by now; None where it is not known."""
        shape, dim = shape_of(self.x), -self.call.rank - 1
        width = self.call.shape[0] if self._is_other_way else self.call.shape[1] * self.call.groups
        if shape is None or len(shape) < -dim:
            return shape
        return (*shape[: len(shape) + dim], width, *shape[len(shape) + dim + 1 :])

    @property
    def rows_given(self) -> int:
        """Return how many rows a linear layer is given; 0 where that is not known, and of a convolution."""
        given = self.given
        return 0 if self.geometry is not None or given is None else math.prod(given[:-1])

    @property
    def kind(self) -> Hashable:
        """Return what layers that take as long have in common."""
        return self.given, self.call.shape, self.call.inputs_first, self.geometry, self.call.bias is None

    @property
    def _is_other_way(self) -> bool:
        return self.call.inputs_first or self.call.is_transposed


def graphs_in(program: Program) -> Iterator[tuple[str, int, fx.Graph]]:
    """Yield owner, number and graph of all that run in evaluation; of a model in training, all that are called."""
    for owner, capture in program.captures.items():
        if is_called(program, owner):
            module = program.module(owner)
            for number, specialization in usual(capture.specializations):
                if program.training or specialization.runs_in_mode(module):
                    yield owner, number, specialization.graph


def packable_at(program: Program, owner: str, node: fx.Node) -> Packable | None:
    """Return the linear layer or the convolution in two or three dimensions that a node calls; None for others."""
    call = call_of_layer(program, owner, node)
    if call is None or call.x is None or call.rank == 1:
        return None
    reason = None if call.module is None or call.base is None else reason_against_module(call.module, call.base)
    if not reason:
        is_own = call.weight is not None
        reason = why_not_packed(call.tensors()[0]) if is_own else "its weight is no parameter of its own"
    if call.is_linear or not call.shape:
        return Packable(call, call.x, reason)
    its = call.geometry
    geometry = None if its is None else _fitting(its, call.kernel)
    if geometry is None:
        return Packable(call, call.x, reason or _PADDING)
    geometry = dataclasses.replace(geometry, size=shape_of(call.x))
    return _with_pad(Packable(call, call.x, reason, geometry), geometry)


def _with_pad(layer: Packable, geometry: Geometry) -> Packable:
    """Return a convolution with the zeros that are added before it, which nothing else reads."""
    program, owner = layer.call.program, layer.call.owner
    call = call_in(program, owner, layer.x, "pad") if len(layer.x.users) == 1 else None
    if call is None or call.named.get("mode", "constant") != "constant" or call.named.get("value") not in (None, 0):
        return layer
    x, its = call.orders[0][0], _padded(geometry, call.named.get("pad"), layer.call.kernel)
    if its is None or not isinstance(x, fx.Node) or not is_undisturbed(program, owner, (layer.x, layer.call.node)):
        return layer
    size = None if geometry.size is None else shape_of(x)
    return Packable(layer.call, x, layer.reason, dataclasses.replace(its, size=size), layer.x)


def _padded(geometry: Geometry, zeros: object, kernel: Sequence[int]) -> Geometry | None:
    """Return the settings of a convolution behind a pad by `zeros`, as `F.pad` has them; None where there are none."""
    given = list(cast("Sequence[object]", zeros)) if isinstance(zeros, (tuple, list)) else []
    numbers = [each for each in given if type(each) is int and each >= 0]
    if not given or len(numbers) < len(given) or len(given) % 2 or len(given) > 2 * geometry.rank:
        return None
    before, after = ([0] * (geometry.rank - len(given) // 2) + numbers[side::2][::-1] for side in (0, 1))
    return None if geometry.output_padding is not None else _fitting(geometry.with_zeros(before, after), kernel)


def _fitting(geometry: Geometry, kernel: Sequence[int]) -> Geometry | None:
    """Return the settings of a convolution; None where kernels would start in nothing but zeros."""
    if geometry.padding_after is None:
        return geometry
    spans = (d * (k - 1) for d, k in zip(geometry.dilation, kernel, strict=True))
    return geometry if all(zeros <= span for zeros, span in zip(geometry.even.padding, spans, strict=True)) else None
