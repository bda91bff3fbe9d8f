"""From the optimized model back to the original one, and from an optimized copy into the user's own object.

Optimizers go along: they stay the same objects and train the parameters of the other form.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...compat import modules_by_name, own_buffers, own_parameters, transient_buffers
from ...errors import StateError, UsageError
from ...tracing.graphs import deactivate_again, specializations_of
from ...tracing.values import is_scripted, map_leaves, qualified, same_kind, tensors_in
from ..optimizers import choose_form, reset_form
from ..pipeline import ranks
from ..state import (
    RECORD_KEY,
    StateMap,
    adopt_added,
    all_parameters,
    carry_tensor_hooks,
    check_type,
    leave_to_other_ranks,
    live_optimizers,
    lost_hooks_text,
    release_added,
    translate_optimizer,
)
from .record import Record, record_of
from .run import Request

__all__ = ["check_optimizer", "hand_over", "move_optimizer", "move_optimizer_back", "restored"]

SomeOptimizer = TypeVar("SomeOptimizer", bound=Optimizer)


def restored(model: nn.Module, record: Record) -> nn.Module:
    """Return the original structure with the current weights, buffers, modes, hooks and attributes."""
    original = _original(model, record)
    _carry_hooks(model, original)
    return original


def _original(model: nn.Module, record: Record) -> nn.Module:
    """Return the original structure without the hooks on parameters."""
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


def _carry_hooks(source: nn.Module, target: nn.Module) -> list[str]:
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
    """Give modules the transient buffers, hooks and attributes that those of the same names have now, but `changed`.

    Of what a pass put in the place of another module nothing is taken.
    """
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
        constants = _constants(source)
        for name, value in vars(source).items():
            if name in _REGISTERS or _is_ours(name) or name in kept[id(target)]:
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


def _transplanted(model: nn.Module, fast: nn.Module) -> nn.Module:
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
    for module in list(fast.modules()):
        target = cast("nn.Module", same.get(id(module), module))
        # New modules and entries may hold surviving ones: views of fused members do. (Ordered dicts hold hooks.)
        new: dict[str, Any] = {
            name: value
            if isinstance(value, OrderedDict) or is_dataclass(value)
            else map_leaves(lambda leaf: same.get(id(leaf), leaf), value)
            for name, value in vars(module).items()
            if target is module
            or name not in vars(target)
            or name in (*_REGISTERS, *changed[id(module)])
            or _is_ours(name)
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


# -- optimizers go along ----------------------------------------------------------------------------------------------


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Refuse, before anything is done, what cannot move with a model.

    Raises:
        UsageError: it is no optimizer.
        StateError: it is none of those that work element by element, or trains nothing of the model.
    """
    if not isinstance(optimizer, Optimizer):
        given = type(optimizer).__name__
        raise UsageError(
            f"optimizer= takes a torch.optim.Optimizer over the model's parameters, not {given}; "
            "give one of several, and move the others with fxopt.translate_optimizer(other, fast)"
        )
    check_type(optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise StateError(
            f"this {type(optimizer).__name__} holds none of the model's parameters; build it on the model that you "
            "give: Adam(model.parameters())"
        )


def hand_over(
    model: nn.Module, fast: nn.Module, request: Request, optimizer: Optimizer | None, *, inplace: bool
) -> nn.Module:
    """Return what the user gets of an optimized copy: it, or `model` turned into it; its optimizer goes with it.

    Its steps take another form then, where that is faster.

    Raises:
        StateError: the optimizer cannot move; neither it nor `model` is changed then.
    """
    record = cast("Record", record_of(fast))
    if optimizer is not None:
        _move_optimizer(optimizer, model, fast, record)
        _choose_form(fast, record, optimizer, request)
    record.lost_hooks.extend(_carry_hooks(model, fast))
    if not inplace:
        return fast
    names, before = _names(fast), list(model.parameters())
    _transplanted(model, fast)
    if optimizer is not None:
        # What no pass changed is the user's own again.
        translate_optimizer(optimizer, names, StateMap(), dict(model.named_parameters()))
    _warn_of_forgotten(before, model)
    return model


def _choose_form(fast: nn.Module, record: Record, optimizer: Optimizer, request: Request) -> None:
    """Let an optimizer take its steps in the form that is fastest, or that the plan names, and note that."""
    plan = request.plan
    choice = choose_form(
        optimizer, fast, check=request.verify, measure=bool(request.measure) and plan is None,
        decided=None if plan is None else plan.optimizer_form, ranks=ranks() if plan is None else None,
    )  # fmt: skip
    decided = replace(record.plan, optimizer_form=choice.form)
    vars(fast)[RECORD_KEY] = record.changed(decided, optimizer=choice.to_json())


def _move_optimizer(optimizer: Optimizer, model: nn.Module, fast: nn.Module, record: Record) -> None:
    earlier, names, states = record_of(model), record.original_names(_held(optimizer)), dict[str, dict[str, Any]]()
    with _all_or_nothing(optimizer):
        if earlier is not None:  # the optimizer knows what was made of the original parameters
            original = _original(model, earlier)
            states = _moved_back(optimizer, model, earlier, original)
            names = _names(original)
        translate_optimizer(optimizer, names, record.state_map, all_parameters(fast))
        adopt_added(optimizer, fast, states)
    leave_to_other_ranks(optimizer, fast)


def move_optimizer(optimizer: SomeOptimizer, fast: nn.Module, record: Record) -> SomeOptimizer:
    """Let an optimizer of the original model train the optimized one: the public `translate_optimizer`.

    Raises:
        StateError: it cannot be moved; nothing is changed then.
    """
    names, parameters = record.original_names(_held(optimizer)), dict(fast.named_parameters())
    return adopt_added(translate_optimizer(optimizer, names, record.state_map, parameters), fast)


def move_optimizer_back(optimizer: Optimizer, fast: nn.Module, record: Record, original: nn.Module) -> None:
    """Let an optimizer of an optimized model train the one that was restored from it, in the form that it had.

    Raises:
        UsageError: it is no optimizer.
        StateError: it cannot be moved; nothing is changed then.
    """
    check_optimizer(optimizer, fast)
    _moved_back(optimizer, fast, record, original)
    reset_form(optimizer)


def _moved_back(
    optimizer: Optimizer, fast: nn.Module, record: Record, original: nn.Module
) -> dict[str, dict[str, Any]]:
    """Return what an optimizer knew of parameters that passes had added, and let it go on with the restored model."""
    parameters = dict(original.named_parameters())
    with _all_or_nothing(optimizer):
        states = release_added(optimizer, fast)
        translate_optimizer(optimizer, _names(fast), record.state_map, parameters, direction="backward")
    return states


def _held(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


@contextmanager
def _all_or_nothing(optimizer: Optimizer) -> Generator[None]:
    """Put the optimizer's groups and state back after an error in one of several moves."""
    groups: list[dict[str, Any]] = [{key: copy.copy(v) for key, v in g.items()} for g in optimizer.param_groups]
    state = dict(optimizer.state)
    try:
        yield
    except BaseException:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


def _warn_of_forgotten(before: Iterable[nn.Parameter], model: nn.Module) -> None:
    """Warn of optimizers that still hold parameters which were merged in place: they train nothing any more."""
    now = set(map(id, model.parameters()))
    gone = {id(parameter) for parameter in before if id(parameter) not in now}
    for optimizer in live_optimizers() if gone else ():
        held = sum(id(parameter) in gone for group in optimizer.param_groups for parameter in group["params"])
        if held:
            warnings.warn(
                f"this {type(optimizer).__name__} holds {held} parameters that were merged into others, and does not "
                "train them any more: move it by fxopt.translate_optimizer(optimizer, model), or give it to optimize "
                "as optimizer=",
                stacklevel=4,
            )
