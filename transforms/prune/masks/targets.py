"""Which weights can be masked: those of linears, convolutions and the like, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....compat import has_hooks, own_parameters
from ....layers.masked import gone_of
from ....layers.members import FusedMembers, stacked_weights
from ....layers.moe import MixtureOfExperts
from ....passes.contract import word_for
from ....passes.sites import Refusal
from ....runtime.values import is_leaf, qualified, user_class
from ....tracing.program import Program

__all__ = ["Target", "targets"]

_INPUTS: dict[type[nn.Module], int] = {
    nn.Linear: 1,
    nn.Bilinear: 1,
    nn.Conv1d: 1,
    nn.Conv2d: 1,
    nn.Conv3d: 1,
    nn.ConvTranspose1d: 0,
    nn.ConvTranspose2d: 0,
    nn.ConvTranspose3d: 0,
    nn.MultiheadAttention: 1,
    nn.RNNBase: 1,
    MixtureOfExperts: 2,
}
"""Layers whose matrices are pruned; along which dimension of their weights the inputs lie."""

_OTHERS = {"transformers.pytorch_utils.Conv1D": 0}
"""Layers of other libraries, by their full names."""


class Target(NamedTuple):
    """A weight that can be masked, by the names of the layer and of the weight in it: which values are zero for good
    already, and along which dimension the layer's inputs lie.
    """

    owner: str
    name: str
    weight: Tensor
    gone: Tensor
    inputs: int

    @property
    def path(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


def targets(program: Program, keep: Sequence[str]) -> Iterator[Target | Refusal]:
    """Yield every weight that can be masked, and every layer that cannot, in the model's order; modules that words in
    `keep` name are left out, with what is in them.
    """
    names: dict[Tensor, list[str]] = {}
    for module in program.names.distinct:
        for name, tensor in own_parameters(module).items():
            if tensor is not None:
                names.setdefault(tensor, []).append(qualified(program.names.name(module), name))
    for module in program.names.distinct:
        inputs = _inputs(user_class(type(module)))
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
                yield _tied(target, names[weight]) or _empty(target) or target


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


def _inputs(cls: type[nn.Module]) -> int | None:
    """Return along which dimension of its weights a layer's inputs lie, or None where it has no matrices to prune."""
    known = (dim for kind, dim in _INPUTS.items() if issubclass(cls, kind))
    return next(known, _OTHERS.get(f"{cls.__module__}.{cls.__qualname__}"))


def _obstacle(module: nn.Module, owner: str) -> str:
    """Return why a layer cannot be put behind masks, or ""."""
    if not owner:
        return "the whole model is this layer; put it into an nn.Sequential"
    cls = user_class(type(module))
    if not is_leaf(module) and f"{cls.__module__}.{cls.__qualname__}" not in _OTHERS:
        return f"it is a {cls.__name__}, which has a forward of its own"
    if has_hooks(module):
        return "it has hooks, which see the layer itself"
    if not all(parameter is None or parameter.is_floating_point() for parameter in own_parameters(module).values()):
        return "its weights are no floating-point numbers"
    return ""


def _tied(target: Target, names: Sequence[str]) -> Refusal | None:
    others = [name for name in names if name != target.path]
    return Refusal(f"its {target.name} is tied to '{others[0]}'", target.owner) if others else None


def _empty(target: Target) -> Refusal | None:
    return None if target.weight.numel() else Refusal(f"its {target.name} has no elements", target.owner)
