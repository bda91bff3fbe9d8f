"""From the optimized model back to the original one, and from an optimized copy into the user's own object."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch import Tensor, nn

from ..compat import modules_by_name, own_buffers, transient_buffers
from .expansion import map_structure
from .record import Record

__all__ = ["restored", "transplanted"]


def restored(model: nn.Module, record: Record) -> nn.Module:
    """Return the original structure with the current weights, buffers, modes and plain attributes."""
    state = record.state_map.backward(model.state_dict())
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    memo: dict[int, Any] = {}
    for name, outline in _named_tensors(record.skeleton).items():
        if name in state and id(outline) not in memo:
            memo[id(outline)] = _real(outline, state[name], trainable.get(name, outline.requires_grad))
    original = copy.deepcopy(record.skeleton, memo)
    now = modules_by_name(model, every_name=True)
    for name, module in modules_by_name(original, every_name=True).items():
        if name in now:
            _carry_over(now[name], module)
    return original


def _real(outline: Tensor, value: Tensor, requires_grad: bool) -> Tensor:
    value = value.detach().clone()
    return nn.Parameter(value, requires_grad) if isinstance(outline, nn.Parameter) else value


def _carry_over(source: nn.Module, target: nn.Module) -> None:
    """Give `target` the mode, the transient buffers and the plain attributes that `source` has now."""
    target.training = source.training
    for name in transient_buffers(target):
        buffer = own_buffers(source).get(name)
        if buffer is not None:
            own_buffers(target)[name] = buffer.detach().clone()
    for name, value in vars(source).items():
        if name in vars(target) and not name.startswith("_") and isinstance(value, (bool, int, float, str, type(None))):
            vars(target)[name] = value


def transplanted(model: nn.Module, fast: nn.Module) -> nn.Module:
    """Turn `model` into `fast`: modules that survive keep their identity, and so do tensors that no rewrite touched."""
    originals = modules_by_name(model, every_name=True)
    tensors = _named_tensors(model)
    rewritten = modules_by_name(fast, every_name=True)
    same: dict[int, object] = {id(module): originals[name] for name, module in rewritten.items() if name in originals}
    same |= {id(tensor): tensors[name] for name, tensor in _named_tensors(fast).items() if name in tensors}
    for module in list(fast.modules()):
        target = cast("nn.Module", same.get(id(module), module))
        # Modules and tensors may be held by plain attributes too: lists of layers, views of fused members.
        belongings = map_structure(dict(vars(module)), lambda leaf: same.get(id(leaf), leaf))
        target.__class__ = type(module)
        vars(target).clear()
        vars(target).update(belongings)
    return model


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}
