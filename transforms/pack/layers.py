"""The layers of a graph that can be computed on packed weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from ...compat import own_parameters
from ...layers.masked import Masked
from ...layers.packed import Activation, Geometry, PackedConvolution, PackedLinear, TransposedLinear, why_not_packed
from ...operators import canonical_name, normalized_arguments
from ...passes.rewriting import Found, Place, call_in, obstacle_to_inlining
from ...runtime.values import user_class
from ...tracing.examples import TensorMeta
from ...tracing.program import Program
from .geometry import CONVOLUTIONS, NAMES, geometry_of_call, geometry_of_module, padded
from .reading import computed

__all__ = ["Layer", "layer_at", "module_objection", "shape_of"]

_PADDING = "it pads otherwise than with zeros, or its settings are no plain numbers"


_MASKED = (
    "its weight is masked, and may get zeros at each reading; call fxopt.transforms.prune.remove_masks(model), "
    "which keeps the zeros, and then pack it"
)


@dataclass(frozen=True)
class Layer:
    """A call of a layer.

    Attributes:
        node: the call.
        x: what it is given.
        weight, bias: names of its tensors as seen from the graph's owner, or nodes that compute them; no bias is None.
        shape: of the weight.
        modules: names of the modules that the graph then no longer calls.
        objection: why it stays as it is, or "".
        inputs_first: the weight of a linear layer is [inputs, outputs].
        geometry: the settings of a convolution; None of a linear layer.
        pad: what adds zeros before a convolution, and is computed with it; None for nothing.
    """

    node: fx.Node
    x: fx.Node
    weight: str | fx.Node
    bias: str | fx.Node | None
    shape: tuple[int, ...]
    modules: tuple[str, ...] = ()
    objection: str = ""
    inputs_first: bool = False
    geometry: Geometry | None = None
    pad: fx.Node | None = None

    def tensors(self, program: Program, owner: str) -> tuple[Tensor, Tensor | None]:
        """Return its weight and its bias as they are now."""
        weight, bias = (computed(program, owner, each) for each in (self.weight, self.bias))
        return cast("Tensor", weight), bias

    def packed(
        self, activation: Activation, dtype: torch.dtype, joins: str = "add", *, transposed: bool = False
    ) -> PackedLinear | PackedConvolution:
        """Return what computes it on a packed weight, or at one row on a transposed one."""
        if transposed:
            return TransposedLinear(activation, joins, self.inputs_first)
        if self.geometry is None:
            return PackedLinear(activation, dtype, self.inputs_first, joins)
        size = None if self.geometry.size is None else self.given
        return PackedConvolution(dataclasses.replace(self.geometry, size=size), activation, dtype)

    @property
    def outputs(self) -> tuple[int, int] | None:
        """Return the dimensions of the outputs in the weight and in the result; None where they hang together."""
        if self.geometry is None:
            return 1 if self.inputs_first else 0, -1
        return (
            (0, -self.geometry.rank - 1) if self.geometry.groups == 1 and self.geometry.output_padding is None else None
        )

    @property
    def terms(self) -> int:
        """Return how many products each output is the sum of, at the most."""
        is_other_way = self.inputs_first or (self.geometry is not None and self.geometry.output_padding is not None)
        return math.prod(self.shape) // self.shape[1 if is_other_way else 0]

    @property
    def rows(self) -> slice:
        """Return which part of what it is given stands for all: the last image."""
        is_batch = self.geometry is not None and len(shape_of(self.x) or ()) == self.geometry.rank + 2
        return slice(-1, None) if is_batch else slice(None)

    @property
    def given(self) -> tuple[int, ...] | None:
        """Return the shape of what it is given, as wide as its weight is by now; None where it is not known."""
        shape = shape_of(self.x)
        if self.geometry is None:
            dim, width = -1, self.shape[0 if self.inputs_first else 1]
        elif self.geometry.output_padding is None:
            dim, width = -self.geometry.rank - 1, self.shape[1] * self.geometry.groups
        else:
            dim, width = -self.geometry.rank - 1, self.shape[0]
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
        return self.given, self.shape, self.inputs_first, self.geometry, self.bias is None


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of what a node gives, where that is known."""
    meta = node.meta.get("val")
    return tuple(map(int, meta.shape)) if isinstance(meta, TensorMeta) else None


def layer_at(program: Program, owner: str, node: fx.Node) -> Layer | None:
    """Return the linear layer or the convolution that a node calls; None where it calls none."""
    if node.op == "call_module":
        layer = _of_module(program, owner, node)
    else:
        name = canonical_name(node) if node.op in ("call_function", "call_method") else None
        layer = _of_function(program, owner, node, name) if name == "linear" or name in NAMES else None
    return layer if layer is None or layer.geometry is None else _with_pad(program, owner, layer, layer.geometry)


def _with_pad(program: Program, owner: str, layer: Layer, geometry: Geometry) -> Layer:
    """Return a convolution with the zeros that are added before it, which nothing else reads."""
    place = Place(program, owner)
    call = call_in(place, layer.x, "pad") if len(layer.x.users) == 1 else None
    if call is None or call.named.get("mode", "constant") != "constant" or call.named.get("value") not in (None, 0):
        return layer
    (x, *_), kernel = call.orders[0], layer.shape[2:]
    its = padded(geometry, call.named.get("pad"), kernel)
    if its is None or not isinstance(x, fx.Node) or not place.is_undisturbed(Found(computed=(layer.x, layer.node))):
        return layer
    size = None if geometry.size is None else shape_of(x)
    return dataclasses.replace(layer, x=x, geometry=dataclasses.replace(its, size=size), pad=layer.x)


def _of_module(program: Program, owner: str, node: fx.Node) -> Layer | None:
    module, given = program.callee(owner, node), [*node.args, *node.kwargs.values()]
    kind = user_class(type(module))
    is_transposed = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    base = next((each for each in (nn.Linear, *CONVOLUTIONS) if issubclass(kind, each)), None)
    if (base is None and not is_transposed) or len(given) != 1 or not isinstance(given[0], fx.Node):
        return None
    name, objection = str(node.target), module_objection(module, kind, base)
    weight = own_parameters(module).get("weight")
    if weight is None:
        return Layer(node, given[0], "", None, (), (name,), objection or "its weight is no parameter of its own")
    bias = None if own_parameters(module).get("bias") is None else f"{name}.bias"
    geometry = None
    if base in CONVOLUTIONS:
        geometry = geometry_of_module(module, shape_of(given[0]))
        objection = objection or ("" if geometry else _PADDING)
    return Layer(
        node, given[0], f"{name}.weight", bias, tuple(weight.shape), (name,), objection or why_not_packed(weight),
        is_transposed, geometry,
    )  # fmt: skip


def module_objection(module: nn.Module, kind: type[nn.Module], base: type[nn.Module] | None) -> str:
    """Return why a module stays as it is, or ""; `kind` is the user's class of it, `base` the one of torch."""
    reason = obstacle_to_inlining(module)
    if reason is not None:
        return reason
    if base is not None and kind is not base:
        return f"it is a {kind.__name__}, which may compute something else than nn.{base.__name__}"
    if type(module) is not kind and getattr(type(module), "_fxopt_is_operation", False):
        if isinstance(module, Masked):
            return _MASKED
        return "it is part of something fused"
    return ""


def _of_function(program: Program, owner: str, node: fx.Node, name: str) -> Layer | None:
    named = normalized_arguments(name, node.target, node.args, node.kwargs).named
    x, weight, bias = (named.get(each) for each in ("input", "weight", "bias"))
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    tensor = computed(program, owner, weight)
    if tensor is None or not (bias is None or isinstance(bias, fx.Node)):
        return None
    objection, geometry, shape = why_not_packed(tensor), None, tuple(tensor.shape)
    if name in NAMES:
        geometry = geometry_of_call(name, named, shape, shape_of(x))
        objection = objection or ("" if geometry else _PADDING)
    return Layer(node, x, weight, bias, shape, (), objection, False, geometry)
