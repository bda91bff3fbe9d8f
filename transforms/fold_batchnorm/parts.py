"""Layers and batch norms as graphs call them: a module, or a function on tensors of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...compat import own_buffers, own_parameters
from ...layers.folded import Fold
from ...layers.masked import gone_of
from ...operators import normalized_arguments
from ...passes.rewriting import LayerCall, call_of_layer
from ...tracing.program import Program

__all__ = ["NORMS", "Norm", "fold_of", "layer_at", "norm_at", "tensor_at"]

NORMS: Mapping[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (0, 1),
    nn.BatchNorm2d: (2,),
    nn.BatchNorm3d: (3,),
}
"""Kind of norm -> how many dimensions behind the channels the layers have that it can be folded into."""

_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, eq=False)
class Norm:
    """A batch norm, a module or a call of `F.batch_norm`; `tensors` are its own -> their paths in the owner."""

    name: str
    tensors: Mapping[str, str]
    eps: float
    width: int
    training: bool
    module: nn.BatchNorm1d | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return how many dimensions behind the channels what it norms may have."""
        return next((ranks for kind, ranks in NORMS.items() if isinstance(self.module, kind)), (0, 1, 2, 3))

    @property
    def has_statistics(self) -> bool:
        wanted = _STATISTICS if self.module is None else (*_STATISTICS, "num_batches_tracked")
        return all(name in self.tensors for name in wanted)


def layer_at(program: Program, owner: str, node: fx.Node | None) -> LayerCall | None:
    """Return the layer that a node calls, if it calls one with tensors of the model and known settings."""
    call = call_of_layer(program, owner, node)
    if call is None or call.inputs_first:
        return None
    computed: list[fx.Node] = []
    fx.map_arg(tuple(call.settings.values()), computed.append)
    if computed:
        return None
    count = sum(each is not None for each in (call.weight, call.bias))
    return call if len(call.paths) == count else None


def norm_at(program: Program, owner: str, node: fx.Node) -> Norm | None:
    """Return the batch norm that a node calls, if it calls one that may have statistics of its own."""
    if node.op == "call_module":
        module = program.callee(owner, node)
        return _norm_of(str(node.target), cast("nn.BatchNorm1d", module)) if isinstance(module, tuple(NORMS)) else None
    if node.target is not F.batch_norm:
        return None
    named = dict(normalized_arguments("batch_norm", node.target, node.args, node.kwargs).named)
    tensors, training, eps = _read(named, (*_STATISTICS, "weight", "bias")), named.get("training"), named.get("eps")
    if tensors is None or not set(_STATISTICS) <= tensors.keys() or not isinstance(eps, (int, float)):
        return None
    mean = tensor_at(program.module(owner), tensors["running_mean"])
    if isinstance(training, fx.Node):
        path, _, name = str(training.target).rpartition(".")
        is_flag = training.op == "get_attr" and name == "training"
        training = program.module(owner).get_submodule(path).training if is_flag else None
    if mean is None or not isinstance(training, bool):
        return None
    return Norm(node.name, tensors, float(eps), mean.numel(), training)


def fold_of(layer: LayerCall, norm: Norm, *, before: bool) -> Fold:
    """Return how a layer and a norm `before` it, or behind it, become one."""
    masks = [] if layer.module is None else list(gone_of(layer.module))
    return Fold(
        eps=norm.eps,
        biased="bias" in layer.paths,
        scaled="weight" in norm.tensors,
        shifted="bias" in norm.tensors,
        counted="num_batches_tracked" in norm.tensors,
        transposed=layer.is_transposed,
        groups=layer.groups,
        masked=tuple(name for name in masks if name in layer.paths),
        before=before,
    )


def tensor_at(owner: nn.Module, path: str) -> Tensor | None:
    """Return the parameter, buffer or plain tensor at a dotted path, or None."""
    path, _, name = path.rpartition(".")
    found = getattr(owner.get_submodule(path), name, None)
    return found if isinstance(found, Tensor) else None


def _norm_of(name: str, module: nn.BatchNorm1d) -> Norm:
    own = {**own_parameters(module), **own_buffers(module)}
    names = ("weight", "bias", *_STATISTICS, "num_batches_tracked")
    tensors = {each: f"{name}.{each}" for each in names if own.get(each) is not None}
    return Norm(name, tensors, float(module.eps), module.num_features, module.training, module)


def _read(named: Mapping[str, Any], names: Sequence[str]) -> dict[str, str] | None:
    """Return the names of the tensors that are arguments, without those that are None; None if one is computed."""
    given = {name: named[name] for name in names if named.get(name) is not None}
    if any(not isinstance(node, fx.Node) or node.op != "get_attr" for node in given.values()):
        return None
    return {name: str(node.target) for name, node in given.items()}
