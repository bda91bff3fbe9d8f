"""The layers of a graph that can be computed on packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from ...compat import own_parameters, own_tensor
from ...operators import canonical_name, normalized_arguments
from ...passes.rewriting import obstacle_to_inlining
from ...tracing.program import Program
from ...tracing.values import user_class

__all__ = ["Layer", "layer_at"]


@dataclass(frozen=True)
class Layer:
    """A call of a layer.

    Attributes:
        node: the call.
        x: what it is given.
        weight, bias: names of its tensors as seen from the graph's owner, or nodes that compute them; no bias is None.
        transposed: the weight of a linear layer is [inputs, outputs].
        modules: names of the modules that the graph then no longer calls.
        objection: why it stays as it is, or "".
        shape: of the weight.
    """

    node: fx.Node
    x: fx.Node
    weight: str | fx.Node
    bias: str | fx.Node | None
    shape: tuple[int, ...]
    transposed: bool = False
    modules: tuple[str, ...] = ()
    objection: str = ""

    def tensors(self, program: Program, owner: str) -> tuple[Tensor, Tensor | None]:
        """Return its weight and its bias as they are now."""
        weight, bias = (_tensor(program, owner, each) for each in (self.weight, self.bias))
        return cast("Tensor", weight), bias


def _tensor(program: Program, owner: str, read: str | fx.Node | None) -> Tensor | None:
    if read is None:
        return None
    return named_tensor(program, owner, read if isinstance(read, str) else str(read.target))


def layer_at(program: Program, owner: str, node: fx.Node) -> Layer | None:
    """Return the linear layer that a node calls; None where it calls none."""
    if node.op == "call_module":
        return _of_module(program, owner, node)
    if node.op in ("call_function", "call_method") and canonical_name(node) == "linear":
        return _of_function(program, owner, node)
    return None


def _of_module(program: Program, owner: str, node: fx.Node) -> Layer | None:
    module = program.callee(owner, node)
    kind = user_class(type(module))
    is_transposed = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    if not issubclass(kind, nn.Linear) and not is_transposed:
        return None
    given = [*node.args, *node.kwargs.values()]
    weight = own_parameters(module).get("weight")
    if len(given) != 1 or not isinstance(given[0], fx.Node):
        return None
    name, objection = str(node.target), _module_objection(module, kind)
    if weight is None:
        return Layer(node, given[0], "", None, (), False, (name,), objection or "its weight is no parameter of its own")
    bias = None if own_parameters(module).get("bias") is None else f"{name}.bias"
    return Layer(
        node, given[0], f"{name}.weight", bias, tuple(weight.shape), is_transposed, (name,),
        objection or tensor_objection(weight),
    )  # fmt: skip


def _module_objection(module: nn.Module, kind: type[nn.Module]) -> str:
    reason = obstacle_to_inlining(module)
    if reason is not None:
        return reason
    if kind is not nn.Linear and issubclass(kind, nn.Linear):
        return f"it is a {kind.__name__}, which may compute something else than nn.Linear"
    if type(module) is not kind and getattr(type(module), "_fxopt_is_operation", False):
        return "it is part of something fused, or masked"
    return ""


def _of_function(program: Program, owner: str, node: fx.Node) -> Layer | None:
    named = normalized_arguments("linear", node.target, node.args, node.kwargs).named
    x, weight, bias = (named.get(name) for name in ("input", "weight", "bias"))
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    tensor = held_by(program, owner, weight)
    if tensor is None or not (bias is None or isinstance(bias, fx.Node)):
        return None
    return Layer(node, x, weight, bias, tuple(tensor.shape), objection=tensor_objection(tensor))


def held_by(program: Program, owner: str, node: fx.Node) -> Tensor | None:
    """Return the parameter that a node reads, or None."""
    return named_tensor(program, owner, str(node.target)) if node.op == "get_attr" else None


def named_tensor(program: Program, owner: str, path_and_name: str) -> Tensor | None:
    """Return a tensor that a module owns, by its name as seen from the graph's owner, or None."""
    path, _, name = path_and_name.rpartition(".")
    try:
        module = program.module(owner).get_submodule(path)
    except AttributeError:
        return None
    return own_tensor(module, name)


def tensor_objection(weight: Tensor) -> str:
    """Return why a weight cannot be packed, or ""."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} ({weight.layout}), and no plain tensor"
    if weight.dtype is not torch.float32:
        return f"its weight is of {str(weight.dtype).removeprefix('torch.')}; only float32 is packed"
    if weight.device.type not in ("cpu", "meta"):
        return f"its weight is on {weight.device}; kernels for packed weights are for CPUs"
    if weight.is_inference():
        return "its weight was made in inference_mode, where torch does not count writes into it"
    return "" if weight.numel() else "its weight is empty"
