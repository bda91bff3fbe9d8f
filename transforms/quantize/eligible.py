"""Which layers can be replaced at all, whatever the scheme, and why others stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from ...compat import has_hooks, has_state_hooks, submodule
from ...layers.quantized import ASKED, QuantizedLayer
from ...operators import Derived
from ...passes.contract import word_for
from ...passes.driver import record_of
from ...passes.sites import Refusal, Site
from ...passes.verification import TensorOwners, TensorReads
from ...tracing.program import Program
from ...tracing.values import qualified
from ..fold_batchnorm.arithmetic import Fold
from .settings import Settings

__all__ = ["Layer", "already_quantized", "obstacle", "sites"]

_QUANTIZED = "it is quantized already; for another scheme, begin with the model as it was, or with fxopt.restore(model)"
_NEVER_CALLED = "the example inputs never call it"
_BYPASSED = "torch's encoder layer computes with its weights, and does not call it in evaluation"
_FOLDED = (
    "a batch norm was folded into it; int8_static folds norms itself: begin with the model as it was, or with "
    "fxopt.restore(model)"
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Layer:
    """A layer that a scheme would replace.

    Attributes:
        name: its qualified name.
        module: the layer.
        weights: name in the layer -> what would be quantized.
        detail: for the report.
        objection: why the scheme cannot take it, or "".
    """

    name: str
    module: nn.Module
    weights: Mapping[str, Tensor]
    detail: str = ""
    objection: str = ""

    @property
    def size(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())


def sites(settings: Settings, program: Program, layers: Sequence[Layer]) -> Iterator[Site | Refusal]:
    """Yield a site for each layer, the largest first, and why others stay as they are.

    So what one time budget allows is spent where the most is gained.
    """
    yield from already_quantized(settings.keep, program)
    called = _called(program, [layer.module for layer in layers])
    for layer in sorted(layers, key=lambda layer: -layer.size):
        if word_for(settings.keep, layer.name, program) is not None:
            continue
        reason = (obstacle(layer, program) if layer.weights else "") or layer.objection
        if not reason and called is not None and layer.module not in called:
            reason = _BYPASSED if _in_encoder(layer.name, program) else _NEVER_CALLED
        yield Refusal(reason, layer.name or "(root)") if reason else Site(program, layer.name, {}, detail=layer.detail)


def already_quantized(keep: Sequence[str], program: Program) -> Iterator[Refusal]:
    """Yield why layers stay as they are that were quantized before this run."""
    earlier = record_of(program.model)
    steps = () if earlier is None else earlier.state_map.steps
    names = dict.fromkeys(target.rpartition(".")[0] for step in steps for target in step.targets)
    for name in names:
        if isinstance(submodule(program.model, name), QuantizedLayer) and word_for(keep, name, program) is None:
            yield Refusal(_QUANTIZED, name)


def _in_encoder(name: str, program: Program) -> bool:
    return isinstance(program.module(name.rpartition(".")[0]), nn.TransformerEncoderLayer)


def _called(program: Program, modules: list[nn.Module]) -> set[nn.Module] | None:
    """Return those of the modules that the example inputs call, or None where there are none."""
    if not program.inputs or program.replaying:
        return None
    return {module for module in modules if program.recording(modules).calls.get(module)}


def obstacle(layer: Layer, program: Program) -> str:
    """Return why a layer must stay as it is, or ""."""
    if not layer.name:
        return "the whole model is this layer, and nothing can be put in its place"
    if has_hooks(layer.module) or has_state_hooks(layer.module):
        return "it has hooks, which the layer in its place would not have"
    return next(filter(None, (_weight_problem(layer, name, program) for name in layer.weights)), "")


def _weight_problem(layer: Layer, name: str, program: Program) -> str:
    weight, tensor = qualified(layer.name, name), layer.weights[name]
    tied = [other for other in program.analyses[TensorOwners].names(weight) if other != weight]
    if tied:
        return f"its weight is tied to '{tied[0]}'"
    reads = program.analyses[TensorReads]
    for reader in reads.readers_of(tensor):
        nodes = reads.nodes_of(tensor, reader)
        if any(isinstance(_function_of(user), Fold) for node in nodes for user in node.users):
            return _FOLDED
        if reader != layer.name and not (name == "weight" and _only_asks(nodes)):
            return f"'{reader}' reads its weight"
    return _value_problem(f"'{weight}'", tensor)


def _function_of(node: fx.Node) -> object:
    return node.target.function if isinstance(node.target, Derived) else None


def _only_asks(nodes: Sequence[fx.Node]) -> bool:
    """Say whether nodes read a tensor for its type and the like, and no number of it."""
    users = [user for node in nodes for user in node.users]
    return all(user.target is getattr and user.args[1] in ASKED for user in users)


def _value_problem(name: str, tensor: Tensor) -> str:
    """Return what keeps a weight from being quantized, or ""."""
    if tensor.dtype not in _DTYPES:
        return f"{name} is of {str(tensor.dtype).removeprefix('torch.')}; convert it to float32, bfloat16 or float16"
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return f"{name} is a {type(tensor).__name__} ({tensor.layout}), and no plain tensor"
    if not tensor.numel():
        return f"{name} is empty"
    return "" if tensor.is_meta or tensor.isfinite().all() else f"{name} has elements that are not finite"
