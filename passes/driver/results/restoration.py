"""From the optimized model back to the original structure, and from an optimized copy into the user's own object."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....compat import REGIONS, all_modules, modules_by_name, own_buffers, own_parameters, transient_buffers
from ....runtime.graphs import deactivate_again, share_children, specializations_of
from ....runtime.record import Record, record_of
from ....runtime.values import is_scripted, map_leaves, qualified, same_kind, tensors_in
from .tensor_hooks import carry_tensor_hooks, lost_hooks_text

__all__ = ["carry_hooks", "rebuilt", "transplanted"]


def rebuilt(model: nn.Module, record: Record) -> nn.Module:
    """Return the original structure with the current weights, buffers, modes and attributes."""
    state: dict[str, Tensor] = model.state_dict()
    skeletons = _named_tensors(record.skeleton)
    trainable = _trainable(model, record, skeletons)
    memo: dict[int, Any] = {}
    for name, skeleton in skeletons.items():
        if name in state and id(skeleton) not in memo:
            memo[id(skeleton)] = _real(skeleton, state[name], trainable.get(name, skeleton.requires_grad))
    original = copy.deepcopy(record.skeleton, memo)
    sources, targets = (modules_by_name(each, every_name=True) for each in (model, original))
    _carry_over(sources, targets, record.attributes)
    for name in sources.keys() & targets:
        targets[name].training = sources[name].training
        _take_away(name, sources[name], targets[name], state)
    return original


def carry_hooks(source: nn.Module, target: nn.Module) -> list[str]:
    """Register the hooks on parameters again, and warn of those that nothing takes."""
    record = record_of(source)
    lost = carry_tensor_hooks(source, target, () if record is None else record.state_map.names)
    if lost:
        warnings.warn(lost_hooks_text(lost), stacklevel=4)
    return lost


def _trainable(model: nn.Module, record: Record, skeletons: Mapping[str, Tensor]) -> dict[str, bool]:
    """Return which of the original parameters want gradients now; members that differed keep their own flags."""
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for new, names in record.state_map.origins.items():
        if new in flags and len({skeletons[name].requires_grad for name in names if name in skeletons}) == 1:
            flags.update(dict.fromkeys(names, flags[new]))
    return flags


def _real(skeleton: Tensor, value: Tensor, requires_grad: bool) -> Tensor:
    in_order = skeleton.is_contiguous() and skeleton.shape == value.shape  # a pass may have laid it channels last
    value = value.detach().clone(memory_format=torch.contiguous_format if in_order else torch.preserve_format)
    return nn.Parameter(value, requires_grad) if isinstance(skeleton, nn.Parameter) else value


def _carry_over(sources: Mapping[str, nn.Module], targets: Mapping[str, nn.Module], changed: Collection[str]) -> None:
    """Copy transient buffers, hooks and attributes between modules of one name, but for those that a pass `changed`."""
    alike = {name: t for name, t in targets.items() if name in sources and same_kind(sources[name], t)}
    kept = _attributes_of(alike, changed)
    pairs = [(sources[name], target) for name, target in alike.items()]
    scripted = [pair for pair in pairs if is_scripted(pair[0])]
    for source, target in scripted:  # they were copied whole, with the numbers of that time
        target.load_state_dict(source.state_dict())
    pairs = [pair for pair in pairs if pair not in scripted]
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
        left_out = {*_REGISTERS, *vars(source).get(REGIONS, ()), *kept[id(target)]}
        constants = _constants(source)
        for name, value in vars(source).items():
            if name in left_out or _is_ours(name):
                continue
            if name in vars(target) or name not in constants:
                _cut_off_history(value, memo)
                vars(target)[name] = copy.deepcopy(value, memo)


def _take_away(path: str, source: nn.Module, target: nn.Module, state: Collection[str]) -> None:
    """Take what the user has set to None, of which there is no state, out of the original structure, too."""
    pairs = (own_parameters(source), own_parameters(target)), (own_buffers(source), own_buffers(target))
    for now, register in cast("Any", pairs):
        for name, skeleton in register.items():
            is_gone = skeleton is not None and skeleton.is_meta and qualified(path, name) not in state
            if is_gone and name in now and now[name] is None:
                register[name] = None


def _attributes_of(modules: Mapping[str, nn.Module], names: Collection[str]) -> dict[int, set[str]]:
    """Return id of a module -> those of its attributes whose qualified names are given; a module may have several."""
    found: dict[int, set[str]] = {id(module): set() for module in modules.values()}
    for path, module in modules.items() if names else ():
        found[id(module)].update(name for name in vars(module) if qualified(path, name) in names)
    return found


_REGISTERS = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


def _constants(module: nn.Module) -> set[str]:
    """Return the names of what a module's graphs read: plain attributes among them may be constants of a pass."""
    return {str(node.target) for each in specializations_of(module) for node in each.graph.find_nodes(op="get_attr")}


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
    record = record_of(fast)
    changed = _attributes_of(rewritten, frozenset() if record is None else record.attributes)
    same: dict[int, object] = {
        id(module): originals[name]
        for name, module in rewritten.items()
        if name in originals and same_kind(module, originals[name])
    }
    same |= {
        id(tensor): tensors[name]
        for name, tensor in _named_tensors(fast).items()
        if name in tensors and tensors[name].shape == tensor.shape and tensors[name].dtype == tensor.dtype
    }
    for module in all_modules(fast):
        target = cast("nn.Module", same.get(id(module), module))
        # New modules and entries may hold surviving ones: views of fused members do. (Ordered dicts hold hooks.)
        new: dict[str, Any] = {
            name: value
            if isinstance(value, OrderedDict) or is_dataclass(value)
            else map_leaves(lambda leaf: same.get(id(leaf), leaf), value)
            for name, value in vars(module).items()
            if target is module
            or name not in vars(target)
            or name in (*_REGISTERS, *changed[id(module)], *vars(module).get(REGIONS, ()))
            or _is_ours(name)
        }
        object.__setattr__(target, "__class__", type(module))
        ours = [*filter(_is_ours, vars(target)), *vars(target).get(REGIONS, ())]
        for name in (name for name in ours if name not in new):
            del vars(target)[name]
        vars(target).update(new, training=module.training)
        deactivate_again(target)
    for module in all_modules(model):
        share_children(module)
    return model


def _is_ours(name: str) -> bool:
    return name.startswith("_fxopt")


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}
