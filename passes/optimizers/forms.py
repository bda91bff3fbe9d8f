"""Give an optimizer another form of the same step, and take it back; checkpoints do not know of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...compat_optimizers import note_fused

__all__ = ["FORMS", "forms_of", "has_own_flags", "is_dense", "reset_form", "set_flags", "set_form"]

FORMS: Mapping[str, Mapping[str, bool | None]] = {
    "": {"foreach": None, "fused": None},
    "foreach": {"foreach": True, "fused": None},
    "fused": {"foreach": None, "fused": True},
}
"""Form -> the flags of a group; without a name it is what torch takes where a user says nothing."""

_CHOSEN = "_fxopt_form"


class _Chosen(NamedTuple):
    """What an optimizer was given: the form, and the hooks that keep it out of checkpoints."""

    form: str
    hooks: tuple[RemovableHandle, ...]


def forms_of(optimizer: Optimizer) -> list[str]:
    """Return the forms that an optimizer has, torch's own choice first; dampened momentum has no fused one here."""
    dampened = any(group.get("dampening") for group in (*optimizer.param_groups, optimizer.defaults))
    forms: list[str] = []
    for form, chosen in FORMS.items():
        is_known = all(flag in optimizer.defaults for flag, value in chosen.items() if value)
        if is_known and not (dampened and form == "fused"):
            forms.append(form)
    return forms


def has_own_flags(optimizer: Optimizer) -> bool:
    """Say whether its user has set a flag, to true or to false."""
    groups = (*optimizer.param_groups, optimizer.defaults)
    return any(group.get(flag) is not None for group in groups for flag in FORMS[""])


def set_form(optimizer: Optimizer, form: str) -> None:
    """Let an optimizer take its steps in another form, in place; `reset_form` undoes it.

    Saved states have the flags that its user gave, so they load where no form was chosen; those that are loaded, flags
    and all, leave the form as it is.
    """
    reset_form(optimizer)
    set_flags(optimizer, form)
    hooks = (
        optimizer.register_state_dict_post_hook(_as_given),
        optimizer.register_load_state_dict_post_hook(lambda loaded: set_flags(loaded, form)),
        *([optimizer.register_step_pre_hook(_prepare)] if form == "fused" else []),
    )
    vars(optimizer)[_CHOSEN] = _Chosen(form, hooks)


def reset_form(optimizer: Optimizer) -> None:
    """Take back a form that was chosen here; what a user has set stays."""
    chosen: _Chosen | None = vars(optimizer).pop(_CHOSEN, None)
    if chosen is not None:
        for hook in chosen.hooks:
            hook.remove()
        set_flags(optimizer, "")


def set_flags(optimizer: Optimizer, form: str) -> None:
    """Set the flags of all groups, and of those that join later, with what torch's constructor does beside."""
    for group in (*optimizer.param_groups, optimizer.defaults):
        group.update({flag: value for flag, value in FORMS[form].items() if flag in optimizer.defaults})
    note_fused(optimizer, form == "fused")
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = _counted(state["step"], parameter, fused=form == "fused")


def _counted(step: Tensor, parameter: Tensor, *, fused: bool) -> Tensor:
    """Return a number of steps where it is read: by fused kernels in float32 and beside the parameter."""
    return step.to(parameter.device, torch.float32) if fused else step.cpu()


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor fills the memory that it reaches over, in any order, as fused kernels take it."""
    if not tensor.numel():
        return True
    sizes = [(count, stride) for count, stride in zip(tensor.shape, tensor.stride(), strict=True) if count > 1]
    return sum((count - 1) * stride for count, stride in sizes) + 1 == tensor.numel()


def _prepare(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Bring what fused kernels take as it comes into the form that they need, before a step."""
    _, *given = args  # the optimizer itself is the first
    gradients_are_there = not any(map(callable, (*given, options.get("closure"))))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None or not gradients_are_there:
                _begin_momentum(optimizer, group, parameter)
            if parameter.dim() > 1:
                _lay_alike(optimizer, parameter)


def _begin_momentum(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> None:
    """Begin a momentum of SGD at zero, from where a step without dampening leads to the gradient.

    Torch begins all of a group at once, out of memory that is not set (2.13): parameters that join later, or get their
    first gradient later, fail there, and a first step that a GradScaler skips leaves any numbers behind.
    """
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
        state = optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def _lay_alike(optimizer: Optimizer, parameter: Tensor) -> None:
    """Lay a gradient and moments in memory as their parameter lies.

    Fused kernels of a CPU read the memory of all of them in one order, and do not look whether it is the same (torch
    2.13): moments of a checkpoint from before `model.to(memory_format=torch.channels_last)` would end up elsewhere.
    """
    strides, state = parameter.stride(), optimizer.state.get(parameter, {})
    if parameter.grad is not None and parameter.grad.stride() != strides:
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != strides:
            state[name] = torch.empty_like(value).as_strided(parameter.shape, strides).copy_(value)


def _as_given(_: Optimizer, saved: dict[str, Any]) -> None:
    """Write a saved state as the optimizer would without the form that was chosen."""
    for group in saved["param_groups"]:
        group.update({flag: value for flag, value in FORMS[""].items() if flag in group})
    for name, state in saved["state"].items():
        if isinstance(state.get("step"), Tensor) and state["step"].device.type != "cpu":
            saved["state"][name] = {**state, "step": state["step"].cpu()}
