"""From the optimized model back to the original one, and from an optimized copy into the user's own object."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .record import Record

__all__ = ["restored", "transplanted"]


def restored(model: nn.Module, record: Record) -> nn.Module:
    """Return the original structure with the current weights, buffers, modes and plain attributes."""
    state = record.state_map.backward(model.state_dict())
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    memo: dict[int, Any] = {}
    tensors = (*record.skeleton.named_parameters(remove_duplicate=False), *record.skeleton.named_buffers(remove_duplicate=False))
    for name, outline in tensors:
        if name in state and id(outline) not in memo:
            memo[id(outline)] = _real(outline, state[name], trainable.get(name, outline.requires_grad))
    original = copy.deepcopy(record.skeleton, memo)
    now = dict(model.named_modules(remove_duplicate=False))
    for name, module in original.named_modules(remove_duplicate=False):
        if name in now:
            _carry_over(now[name], module)
    return original


def _real(outline: Tensor, value: Tensor, requires_grad: bool) -> Tensor:
    value = value.detach().clone()
    return nn.Parameter(value, requires_grad) if isinstance(outline, nn.Parameter) else value


def _carry_over(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the mode, the transient buffers and the plain attributes that `source` has now."""
    target.training = source.training
    for name in target._non_persistent_buffers_set:  # pyright: ignore[reportPrivateUsage]
        buffer = source._buffers.get(name)  # pyright: ignore[reportPrivateUsage]
        if buffer is not None:
            target._buffers[name] = buffer.detach().clone()  # pyright: ignore[reportPrivateUsage]
    for name, value in vars(source).items():
        if name in vars(target) and not name.startswith("_") and isinstance(value, (bool, int, float, str, type(None))):
            vars(target)[name] = value


def transplanted(model: nn.Module, fast: nn.Module) -> nn.Module:
    """Turn `model` into `fast`: modules that survive keep their identity, and so do tensors that no rewrite touched."""
    originals = dict(model.named_modules(remove_duplicate=False))
    same = {id(module): originals[name] for name, module in fast.named_modules(remove_duplicate=False) if name in originals}
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    kept = {
        id(tensor): tensors[name]
        for name, tensor in (*fast.named_parameters(remove_duplicate=False), *fast.named_buffers(remove_duplicate=False))
        if name in tensors
    }
    for module in list(fast.modules()):
        target = same.get(id(module), module)
        belongings = _with_originals(vars(module), same, kept)
        target.__class__ = type(module)
        vars(target).clear()
        vars(target).update(belongings)
    return model


def _with_originals(attributes: Mapping[str, Any], modules: Mapping[int, nn.Module], tensors: Mapping[int, Tensor]) -> dict[str, Any]:
    belongings = dict(attributes)
    belongings["_modules"] = {name: modules.get(id(child), child) for name, child in attributes["_modules"].items()}
    for register in ("_parameters", "_buffers"):
        belongings[register] = {name: tensors.get(id(t), t) for name, t in attributes[register].items()}
    return belongings
