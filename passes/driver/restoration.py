"""From the optimized model back to the original one, and from an optimized copy into the user's own object."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, cast

from torch import Tensor, nn

from ...compat import modules_by_name, own_buffers, own_parameters, transient_buffers
from ...tracing.graphs import capture_of, deactivate_again
from ...tracing.values import is_compiled, map_leaves, tensors_in
from .record import Record

__all__ = ["restored", "transplanted"]


def restored(model: nn.Module, record: Record) -> nn.Module:
    """Return the original structure with the current weights, buffers, modes, hooks and attributes."""
    state = record.state_map.backward(model.state_dict())
    skeletons = _named_tensors(record.skeleton)
    trainable = _trainable(model, record, skeletons)
    memo: dict[int, Any] = {}
    for name, skeleton in skeletons.items():
        if name in state and id(skeleton) not in memo:
            memo[id(skeleton)] = _real(skeleton, state[name], trainable.get(name, skeleton.requires_grad))
    original = copy.deepcopy(record.skeleton, memo)
    _carry_over(modules_by_name(model, every_name=True), modules_by_name(original, every_name=True))
    return original


def _trainable(model: nn.Module, record: Record, skeletons: Mapping[str, Tensor]) -> dict[str, bool]:
    """Return which of the original parameters want gradients now; members that differed keep their own flags."""
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for new, names in record.state_map.origins.items():
        if new in flags and len({skeletons[name].requires_grad for name in names if name in skeletons}) == 1:
            flags.update(dict.fromkeys(names, flags[new]))
    return flags


def _real(skeleton: Tensor, value: Tensor, requires_grad: bool) -> Tensor:
    value = value.detach().clone()
    return nn.Parameter(value, requires_grad) if isinstance(skeleton, nn.Parameter) else value


def _carry_over(sources: Mapping[str, nn.Module], targets: Mapping[str, nn.Module]) -> None:
    """Give modules the modes, transient buffers, hooks and attributes that those of the same names have now."""
    pairs = [(sources[name], target) for name, target in targets.items() if name in sources]
    compiled = [pair for pair in pairs if is_compiled(pair[0])]
    for source, target in compiled:  # they were copied whole, with the numbers of that time
        target.load_state_dict(source.state_dict())
        target.train(source.training)
    pairs = [pair for pair in pairs if pair not in compiled]
    memo: dict[int, Any] = {id(source): target for source, target in pairs}
    for source, target in pairs:
        for name in transient_buffers(target):
            buffer = own_buffers(source).get(name)
            if buffer is not None:
                own_buffers(target)[name] = buffer.detach().clone()
        for before, now in (
            (own_buffers(source), own_buffers(target)),
            (own_parameters(source), own_parameters(target)),
        ):
            memo |= {id(before[name]): now[name] for name in before if before[name] is not None and name in now}
    for source, target in pairs:
        constants = _constants(source)
        for name, value in vars(source).items():
            if name in _REGISTERS or _is_ours(name):
                continue
            if name in vars(target) or name not in constants:
                _cut_off_history(value, memo)
                vars(target)[name] = copy.deepcopy(value, memo)


_REGISTERS = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


def _constants(module: nn.Module) -> set[str]:
    """Return the names of what a module's graphs read: plain attributes among them may be constants of a pass."""
    capture = capture_of(module)
    graphs = [] if capture is None else [specialization.graph for specialization in capture.specializations]
    return {str(node.target) for graph in graphs for node in graph.find_nodes(op="get_attr")}


def _cut_off_history(value: Any, memo: dict[int, Any]) -> None:
    """Note copies of tensors that a forward left behind: with the graph they come from they cannot be copied."""
    for tensor in tensors_in(value):
        if not tensor.is_leaf:
            memo.setdefault(id(tensor), tensor.detach().clone())


def transplanted(model: nn.Module, fast: nn.Module) -> nn.Module:
    """Turn `model` into `fast`: what survives keeps its identity: modules, their attributes and hooks, tensors."""
    originals = modules_by_name(model, every_name=True)
    tensors = _named_tensors(model)
    rewritten = modules_by_name(fast, every_name=True)
    same: dict[int, object] = {id(module): originals[name] for name, module in rewritten.items() if name in originals}
    same |= {id(tensor): tensors[name] for name, tensor in _named_tensors(fast).items() if name in tensors}
    for module in list(fast.modules()):
        target = cast("nn.Module", same.get(id(module), module))
        # New modules and entries may hold surviving ones: views of fused members do. (Ordered dicts hold hooks.)
        new: dict[str, Any] = {
            name: value
            if isinstance(value, OrderedDict) or is_dataclass(value)
            else map_leaves(lambda leaf: same.get(id(leaf), leaf), value)
            for name, value in vars(module).items()
            if target is module or name not in vars(target) or name in _REGISTERS or _is_ours(name)
        }
        target.__class__ = type(module)
        for name in [name for name in vars(target) if _is_ours(name) and name not in new]:
            del vars(target)[name]
        vars(target).update(new, training=module.training)
        deactivate_again(target)
    return model


def _is_ours(name: str) -> bool:
    return name.startswith("_fxopt")


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}
