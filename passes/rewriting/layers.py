"""Linear layers and convolutions in one view: a module, or a function on tensors that the graph reads."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from ...compat import own_parameters, tensor_at
from ...compat.packed import Geometry
from ...layers.masked import Masked
from ...operators import Derived, canonical_name, normalized_arguments
from ...runtime.values import TensorMeta, qualified, user_class
from ...tracing.program import Program
from .inlining import reason_against_inlining

__all__ = [
    "LAYERS", "Layer", "LayerCall", "call_of_layer", "holds_inputs_first", "layer_of", "reason_against_module",
    "shape_of", "tensor_read",
]  # fmt: skip

_OPERATORS: Mapping[type[nn.Module], str] = {
    nn.Linear: "linear",
    **{getattr(nn, f"Conv{rank}d"): f"conv{rank}d" for rank in (1, 2, 3)},
    **{getattr(nn, f"ConvTranspose{rank}d"): f"conv_transpose{rank}d" for rank in (1, 2, 3)},
}
LAYERS = tuple(_OPERATORS)
"""The linear layer and the convolutions of torch.nn."""

_FUNCTIONS: Mapping[str, Any] = {name: getattr(F, name) for name in _OPERATORS.values()}
_MASKED = (
    "its weight is masked, and may get zeros at each reading; call fxopt.transforms.prune.remove_masks(model), "
    "which keeps the zeros, and optimize again"
)
_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer or a convolution."""

    operator: str  # its name in `torch.nn.functional`
    settings: Mapping[str, Any]  # of a convolution, as the function and, for `padding_mode`, the module take them
    shape: tuple[int, ...]  # of its weight; empty where a module has none of its own
    module: nn.Module | None = None  # None for a function
    # the class of torch.nn, or of transformers, that the module is, or derives from
    base: type[nn.Module] | None = None
    inputs_first: bool = False  # the weight of a linear layer is [inputs, outputs], as in the `Conv1D` of transformers

    @property
    def is_linear(self) -> bool:
        return self.operator == "linear"

    @property
    def kind(self) -> str:
        """Return what messages call it."""
        return "linear" if self.is_linear else "convolution"

    @property
    def is_transposed(self) -> bool:
        return "transpose" in self.operator

    @property
    def rank(self) -> int:
        """Return how many dimensions behind the channels it moves along."""
        return 0 if self.is_linear else int(self.operator[-2])

    @property
    def groups(self) -> int:
        return int(self.settings.get("groups", 1))

    @property
    def channels(self) -> tuple[int, int]:
        """Return how many channels it reads, and gives."""
        if isinstance(self.module, nn.Linear):
            return self.module.in_features, self.module.out_features
        if self.module is not None and self.rank:
            conv = cast("nn.Conv2d", self.module)
            return conv.in_channels, conv.out_channels
        first, second = self.shape[:2]
        other_way = self.is_transposed or self.inputs_first
        return (first, second * self.groups) if other_way else (second * self.groups, first)

    @property
    def kernel(self) -> Sequence[int]:
        """Return the size of a convolution's kernel; nothing for a linear layer."""
        if self.module is None:
            return self.shape[2:]
        return cast("nn.Conv2d", self.module).kernel_size if self.rank else ()

    @property
    def dilation(self) -> tuple[int, ...]:
        return _each(self.settings.get("dilation", 1), self.rank)

    @property
    def mode(self) -> str:
        return str(self.settings.get("padding_mode", "zeros"))

    @property
    def geometry(self) -> Geometry | None:
        """Return a convolution's settings; None where it pads otherwise than with zeros, or they are no numbers."""
        rank, padding = self.rank, self.settings.get("padding", 0)
        stride, dilation = (_numbers(self.settings.get(name, 1), rank) for name in ("stride", "dilation"))
        output_padding = _numbers(self.settings.get("output_padding", 0), rank) if self.is_transposed else None
        zeros = (0,) * rank if isinstance(padding, str) else _numbers(padding, rank)
        if stride is None or dilation is None or zeros is None or type(self.settings.get("groups", 1)) is not int:
            return None
        if self.mode != "zeros" or (self.is_transposed and output_padding is None):
            return None
        its = Geometry(stride, zeros, dilation, self.groups, output_padding)
        if padding != "same":
            return its
        around = [d * (k - 1) for d, k in zip(dilation, self.kernel, strict=True)]
        return its.with_zeros([total // 2 for total in around], [total - total // 2 for total in around])

    @property
    def pads(self) -> bool:
        """Say whether zeros are put around what it reads."""
        padding = self.settings.get("padding", 0)
        if padding == "same":
            return any(size > 1 for size in self.kernel)
        return padding != "valid" and any(_each(padding, self.rank)) and self.mode == "zeros"

    def compute(self, x: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Return what it gives with other tensors in place of its own."""
        if self.module is not None:
            return functional_call(self.module, dict(own), (x,))
        return _FUNCTIONS[self.operator](x, own["weight"], own.get("bias"), **self.settings)


@dataclass(frozen=True, eq=False)
class LayerCall(Layer):
    """A call of a layer in a graph. Weight and bias are paths from the graph's owner, or the nodes that read or compute
    them; no tensor is None.
    """

    program: Program = field(kw_only=True)
    owner: str = field(kw_only=True)
    node: fx.Node = field(kw_only=True)
    # what it is given; None where a module is called with something else than one tensor
    x: fx.Node | None = field(kw_only=True)
    weight: str | fx.Node | None = field(kw_only=True)
    bias: str | fx.Node | None = field(kw_only=True)

    @property
    def name(self) -> str:
        """Return the path of the module, or the name of the node that calls the function, in the owner."""
        return self.node.name if self.module is None else str(self.node.target)

    @property
    def qualified_name(self) -> str:
        return qualified(self.owner, self.name)

    @property
    def paths(self) -> dict[str, str]:
        """Return "weight" and "bias", where they are tensors of the model -> their paths in the owner."""
        given = {"weight": _path(self.weight), "bias": _path(self.bias)}
        return {name: path for name, path in given.items() if path is not None}

    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as they are now."""
        weight, bias = (tensor_read(self.program, self.owner, each) for each in (self.weight, self.bias))
        return cast("Tensor", weight), bias


def layer_of(module: nn.Module) -> Layer | None:
    """Return a module as a layer; None where it is neither one nor of a class derived from one."""
    kind = user_class(type(module))
    base = next((each for each in _OPERATORS if issubclass(kind, each)), None)
    inputs_first = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    if base is None and not inputs_first:
        return None
    operator = "linear" if base is None else _OPERATORS[base]
    names = () if operator == "linear" else (*_SETTINGS, *["output_padding"] * ("transpose" in operator))
    settings = {name: getattr(module, name) for name in names if hasattr(module, name)}
    weight = own_parameters(module).get("weight")
    return Layer(operator, settings, () if weight is None else tuple(weight.shape), module, base or kind, inputs_first)


def holds_inputs_first(module: nn.Module) -> bool:
    """Say whether a module is a linear layer whose weight is [inputs, outputs], as that of GPT-2 in transformers."""
    layer = layer_of(module)
    return layer is not None and layer.inputs_first


def call_of_layer(program: Program, owner: str, node: fx.Node | None) -> LayerCall | None:
    """Return the call of a layer that a node is; None where it is none, or the weight is unknown or other settings."""
    if node is None or node.op not in ("call_module", "call_function", "call_method"):
        return None
    if node.op != "call_module":
        return _call_of_function(program, owner, node)
    layer = layer_of(module := program.callee(owner, node))
    if layer is None:
        return None
    given, own = [*node.args, *node.kwargs.values()], own_parameters(module)
    weight, bias = (None if own.get(name) is None else f"{node.target}.{name}" for name in ("weight", "bias"))
    x = given[0] if len(given) == 1 and isinstance(given[0], fx.Node) else None
    return LayerCall(**vars(layer), program=program, owner=owner, node=node, x=x, weight=weight, bias=bias)


def _call_of_function(program: Program, owner: str, node: fx.Node) -> LayerCall | None:
    name = canonical_name(node)
    if name is None or name not in _FUNCTIONS:
        return None
    settings = dict(normalized_arguments(name, node.target, node.args, node.kwargs).named)
    x, weight, bias = (settings.pop(each, None) for each in ("input", "weight", "bias"))
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node | None):
        return None
    tensor = tensor_read(program, owner, weight)
    if tensor is None:
        return None
    shape = tuple(tensor.shape)
    return LayerCall(name, settings, shape, program=program, owner=owner, node=node, x=x, weight=weight, bias=bias)


def reason_against_module(module: nn.Module, base: type[nn.Module]) -> str:
    """Return why what a module computes cannot be written into the graph as what its class `base` does, or ""."""
    reason, kind = reason_against_inlining(module), user_class(type(module))
    if reason is not None:
        return reason
    if kind is not base:
        return f"it is a {kind.__name__}, which may compute something else than nn.{base.__name__}"
    if type(module) is not kind and getattr(type(module), "_fxopt_is_operation", False):
        return _MASKED if isinstance(module, Masked) else "it is part of something fused"
    return ""


def shape_of(node: object) -> tuple[int, ...] | None:
    """Return the shape of what a node gives, where that is known; None for what is no node, too."""
    meta = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(map(int, meta.shape)) if isinstance(meta, TensorMeta) else None


def tensor_read(program: Program, owner: str, read: str | fx.Node | None) -> Tensor | None:
    """Return a tensor by its path or by the node that reads or derives it; None where that hangs on more."""
    path = _path(read)
    if path is not None:
        return tensor_at(program.module(owner), path)
    if isinstance(read, fx.Node) and read.target is operator.getitem and isinstance(read.args[0], fx.Node):
        made = _derived(program, owner, read.args[0])
        return None if made is None else made[read.args[1]]
    return None


def _path(read: str | fx.Node | None) -> str | None:
    if isinstance(read, fx.Node):
        return str(read.target) if read.op == "get_attr" else None
    return read


def _derived(program: Program, owner: str, node: fx.Node) -> Any:
    if not isinstance(node.target, Derived):
        return None
    reads = [each for each in node.args if isinstance(each, fx.Node)]
    originals = [tensor for tensor in (tensor_read(program, owner, each) for each in reads) if tensor is not None]
    if len(originals) < len(node.args):
        return None
    with torch.no_grad():
        return node.target(*originals)


def _numbers(given: object, rank: int) -> tuple[int, ...] | None:
    """Return a setting as one number for each dimension; None where it is no plain number."""
    values = list(cast("Sequence[object]", given)) if isinstance(given, (tuple, list)) else [given]
    if not all(type(value) is int for value in values) or len(values) not in (1, rank):
        return None
    return _each(tuple(values), rank)


def _each(value: Any, rank: int) -> tuple[int, ...]:
    values = tuple(cast("Sequence[int]", value if isinstance(value, (tuple, list)) else (value,)))
    return values if len(values) == rank else values * rank
