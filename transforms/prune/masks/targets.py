"""Which weights can be masked: those of linears, convolutions and the like, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....compat import has_hooks, modules_by_name, own_parameters
from ....layers.masked import gone_of
from ....layers.members import FusedMembers, stacked_weights
from ....layers.moe import MixtureOfExperts
from ....passes.contract import word_for
from ....passes.rewriting import holds_inputs_first
from ....passes.sites import Refusal
from ....runtime.values import is_leaf, qualified, user_class
from ....tracing.program import Program

__all__ = ["Target", "masked_targets", "targets"]

_INPUTS: dict[type[nn.Module], int] = {
    **dict.fromkeys((nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, nn.RNNBase), 1),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 0),
    MixtureOfExperts: 2,
}
"""Layers whose matrices are pruned; along which dimension of their weights the inputs lie."""


class Target(NamedTuple):
    """A weight that can be masked, by the names of the layer and of the weight in it."""

    owner: str
    name: str
    weight: Tensor
    gone: Tensor  # which values are zero for good already
    inputs: int  # the dimension along which the layer's inputs lie

    @property
    def path(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


def targets(program: Program, keep: Sequence[str]) -> Iterator[Target | Refusal]:
    """Yield every weight that can be masked, and every layer that cannot, in the model's order; not those in `keep`."""
    names: dict[Tensor, list[str]] = {}
    for module in program.names.distinct:
        for name, tensor in own_parameters(module).items():
            if tensor is not None:
                names.setdefault(tensor, []).append(qualified(program.names.name(module), name))
    for module in program.names.distinct:
        inputs = _inputs(module)
        owner = program.names.name(module)
        if word_for(keep, owner, program) is not None:
            continue
        if inputs is None:
            yield from _stacked(module, owner)
            continue
        reason = _obstacle(module, owner)
        if reason:
            yield Refusal(reason, owner or "(root)")
            continue
        for name, weight in own_parameters(module).items():
            if weight is not None and _is_matrix(module, name, weight):
                gone = gone_of(module).get(name, torch.zeros_like(weight, dtype=torch.bool))
                target = Target(owner, name, weight.detach(), gone.to(weight.device), inputs)
                tied = next((other for other in names[weight] if other != target.path), None)
                reason = f"is tied to '{tied}'" if tied is not None else "" if weight.numel() else "has no elements"
                yield Refusal(f"its {name} {reason}", owner) if reason else target


def masked_targets(model: nn.Module) -> Iterator[Target]:
    """Yield the weights of a model that have masks."""
    for path, module in modules_by_name(model).items():
        for name, gone in gone_of(module).items():
            weight, inputs = own_parameters(module)[name], _inputs(module)
            if weight is not None and inputs is not None:
                yield Target(path, name, weight.detach(), gone.to(weight.device), inputs)


def _is_matrix(module: nn.Module, name: str, weight: Tensor) -> bool:
    """Say whether a parameter of a known layer is a weight, not a bias: of experts these are matrices, stacked."""
    return weight.ndim == 3 if isinstance(module, MixtureOfExperts) else weight.ndim > 1 and "weight" in name


def _stacked(module: nn.Module, owner: str) -> Iterator[Refusal]:
    """Yield why stacked weights of experts or of other members cannot be masked."""
    names = stacked_weights(module)
    if not names:
        return
    if isinstance(module, FusedMembers):
        yield Refusal("the weights of its members are stacked; prune before they are fused", owner)
    else:
        said = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        yield Refusal(f"it is no layer that can be masked: its stacked weights {said} stay", owner or "(root)")


def _inputs(module: nn.Module) -> int | None:
    """Return along which dimension of its weights a layer's inputs lie, or None where it has no matrices to prune."""
    known = (dim for kind, dim in _INPUTS.items() if issubclass(user_class(type(module)), kind))
    return next(known, 0 if holds_inputs_first(module) else None)


def _obstacle(module: nn.Module, owner: str) -> str:
    """Return why a layer cannot be put behind masks, or ""."""
    if not owner:
        return "the whole model is this layer; put it into an nn.Sequential"
    cls = user_class(type(module))
    if not is_leaf(module) and not holds_inputs_first(module):
        return f"it is a {cls.__name__}, which has a forward of its own"
    if has_hooks(module):
        return "it has hooks, which see the layer itself"
    if not all(parameter is None or parameter.is_floating_point() for parameter in own_parameters(module).values()):
        return "its weights are no floating-point numbers"
    return ""
