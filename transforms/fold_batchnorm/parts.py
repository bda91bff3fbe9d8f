"""Layers and batch norms as graphs call them: a module, or a function on tensors of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from ...compat import own_buffers, own_parameters
from ...operators import canonical_name, normalized_arguments
from ...tracing.program import Program

__all__ = ["LAYERS", "NORMS", "Layer", "Norm", "layer_at", "norm_at", "tensor_at"]

NORMS: Mapping[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (0, 1),
    nn.BatchNorm2d: (2,),
    nn.BatchNorm3d: (3,),
}
"""Kind of norm -> how many dimensions behind the channels the layers have that it can be folded into."""

LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip

_FUNCTIONS: Mapping[str, Any] = {
    "linear": F.linear,
    **{name: getattr(F, name) for rank in "123" for name in (f"conv{rank}d", f"conv_transpose{rank}d")},
}
_STATISTICS = ("running_mean", "running_var")
_SETTINGS = ("stride", "padding", "dilation", "groups", "output_padding", "padding_mode")


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer or a convolution.

    Attributes:
        name: of the module, or of the node that calls the function, in the owner.
        function: its name in `torch.nn.functional`.
        tensors: "weight", and "bias" where there is one -> the name in the owner.
        settings: of a convolution, as the function and, for `padding_mode`, the module take them.
        weight: as it was found; None if the module has none of its own.
        module: None for a function.
    """

    name: str
    function: str
    tensors: Mapping[str, str]
    settings: Mapping[str, Any]
    weight: Tensor | None
    module: nn.Module | None = None

    @property
    def kind(self) -> str:
        return "linear" if self.function == "linear" else "convolution"

    @property
    def is_transposed(self) -> bool:
        return "transpose" in self.function

    @property
    def groups(self) -> int:
        return int(self.settings.get("groups", 1))

    @property
    def rank(self) -> int:
        """Return how many dimensions behind the channels it has."""
        return 0 if self.function == "linear" else int(self.function[-2])

    @property
    def channels(self) -> tuple[int, int]:
        """Return how many channels it reads, and gives."""
        if isinstance(self.module, nn.Linear):
            return self.module.in_features, self.module.out_features
        if self.module is not None:
            conv = cast("nn.Conv2d", self.module)
            return conv.in_channels, conv.out_channels
        sizes = cast("Tensor", self.weight).shape
        return (sizes[0], sizes[1] * self.groups) if self.is_transposed else (sizes[1] * self.groups, sizes[0])

    @property
    def kernel(self) -> Sequence[int]:
        """Return the size of a convolution's kernel; nothing for a linear layer."""
        if self.module is None:
            return cast("Tensor", self.weight).shape[2:]
        return cast("nn.Conv2d", self.module).kernel_size if self.rank else ()

    @property
    def dilation(self) -> tuple[int, ...]:
        return _each(self.settings.get("dilation", 1), self.rank)

    @property
    def pads(self) -> bool:
        """Say whether zeros are put around what it reads."""
        padding = self.settings.get("padding", 0)
        if padding == "same":
            return any(size > 1 for size in self.kernel)
        return padding != "valid" and any(_each(padding, self.rank)) and self.mode == "zeros"

    @property
    def mode(self) -> str:
        return str(self.settings.get("padding_mode", "zeros"))

    def compute(self, x: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Return what it gives with other tensors in place of its own."""
        if self.module is not None:
            return functional_call(self.module, dict(own), (x,))
        return _FUNCTIONS[self.function](x, own["weight"], own.get("bias"), **self.settings)


@dataclass(frozen=True, eq=False)
class Norm:
    """A batch norm.

    Attributes:
        name: of the module, or of the node that calls the function, in the owner.
        tensors: "weight" and "bias" where there are any, the statistics -> the name in the owner.
        eps: what is added to the variance.
        width: how many channels it norms.
        training: it norms by the batch as things are.
        module: None for a call of `F.batch_norm`.
    """

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


def layer_at(program: Program, owner: str, node: fx.Node | None) -> Layer | None:
    """Return the layer that a node calls, if it calls one."""
    if node is None:
        return None
    if node.op == "call_module":
        module = program.callee(owner, node)
        return _layer_of(str(node.target), module) if isinstance(module, LAYERS) else None
    function = str(canonical_name(node)) if node.op == "call_function" else ""
    if function not in _FUNCTIONS or node.target is not _FUNCTIONS[function]:
        return None
    named = dict(normalized_arguments(function, node.target, node.args, node.kwargs).named)
    tensors = _read(named, ("weight", "bias"))
    settings = {name: value for name, value in named.items() if name not in ("input", "weight", "bias")}
    if tensors is None or "weight" not in tensors or not _is_constant(settings):
        return None
    weight = tensor_at(program.module(owner), tensors["weight"])
    return None if weight is None else Layer(node.name, function, tensors, settings, weight)


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
        training = _flag(program, owner, training)
    if mean is None or not isinstance(training, bool):
        return None
    return Norm(node.name, tensors, float(eps), mean.numel(), training)


def tensor_at(owner: nn.Module, path: str) -> Tensor | None:
    """Return the parameter, buffer or plain tensor at a dotted path, or None."""
    path, _, name = path.rpartition(".")
    found = getattr(owner.get_submodule(path), name, None)
    return found if isinstance(found, Tensor) else None


def _layer_of(name: str, module: nn.Module) -> Layer:
    rank = 0 if isinstance(module, nn.Linear) else len(cast("nn.Conv2d", module).kernel_size)
    transposed = isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    function = f"conv{'_transpose' if transposed else ''}{rank}d" if rank else "linear"
    settings = {each: getattr(module, each) for each in _SETTINGS if rank and hasattr(module, each)}
    if not transposed:
        settings.pop("output_padding", None)
    own = own_parameters(module)
    tensors = {each: f"{name}.{each}" for each in ("weight", "bias") if own.get(each) is not None}
    return Layer(name, function, tensors, settings, own.get("weight"), module)


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


def _flag(program: Program, owner: str, node: fx.Node) -> bool | None:
    """Return the mode that a node reads, or None if it reads something else."""
    path, _, name = str(node.target).rpartition(".")
    if node.op != "get_attr" or name != "training":
        return None
    return program.module(owner).get_submodule(path).training


def _is_constant(settings: Mapping[str, Any]) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(tuple(settings.values()), found.append)
    return not found


def _each(value: Any, rank: int) -> tuple[int, ...]:
    values = tuple(cast("Sequence[int]", value if isinstance(value, (tuple, list)) else (value,)))
    return values if len(values) == rank else values * rank
