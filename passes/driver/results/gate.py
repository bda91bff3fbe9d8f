"""Give an optimizer another form of the same step, and take it back; checkpoints and copies do not know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ....compat.optimizers import Columns, leave_groups, reads_groups, watch_groups
from ....operators import is_dense

__all__ = ["FLAGS", "Gate", "forms_of", "has_flags", "has_plain_options", "reset_form", "set_form"]

FLAGS = ("foreach", "fused")
"""Options of a group, each of which is a form of its steps; where all are None, torch chooses."""
_TYPES = frozenset((Tensor, nn.Parameter))


class Gate:
    """Sets the flag of a form for the step of a group whose tensors are all alike, and takes it back.

    Fused CPU kernels read parameters, gradients and moments in one memory order, unchecked (torch 2.13); else no form.
    """

    def __init__(self, optimizer: Optimizer, form: str) -> None:
        """Let a form be taken for parameters on the devices, and with the dtypes, of those that are there now."""
        self.form = form
        parameters: list[Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        self._kinds = {(each.device, each.dtype) for each in parameters}
        self._open: dict[str, Any] | None = None

    def __call__(self, optimizer: Optimizer, group: dict[str, Any], columns: Columns) -> None:
        """Set the flag of a group if its step, of which `columns` are the tensors, can be taken in the form."""
        self.close()
        columns = [column for column in columns if column]
        if not columns or torch.compiler.is_compiling() or has_flags(group) or not has_plain_options(group):
            return
        parameters: Any = columns[0]
        steps: Any = optimizer.state.get(parameters[0], {}).get("step", self)
        rows = zip(*(column for column in columns if column[0] is not steps), strict=True)
        if len(set(parameters)) == len(parameters) and all(self._takes(*row) for row in rows):
            if self.form == "fused" and steps is not self:
                _place_steps(optimizer, parameters, columns[-1])
            group[self.form], self._open = True, group

    def close(self, *_: object) -> None:
        """Take back the flag that was set."""
        if self._open is not None:
            self._open[self.form], self._open = None, None

    def _takes(self, parameter: Tensor, *others: Any) -> bool:
        """Say whether gradient and moments are numbers of the kind of their parameter, and lie in memory as it does."""
        device, dtype = kind = parameter.device, parameter.dtype
        return (
            kind in self._kinds
            and type(parameter) in _TYPES
            and all(
                type(each) in _TYPES
                and each.layout is torch.strided
                and each.dtype is dtype
                and each.device == device
                and _lie_alike(parameter, each)
                for each in others
            )
            and (parameter.is_contiguous() or is_dense(parameter))
        )


def has_flags(group: Mapping[str, Any]) -> bool:
    """Say whether a user has set a flag, to true or to false."""
    return any(group.get(flag) is not None for flag in FLAGS)


def has_plain_options(group: Mapping[str, Any]) -> bool:
    """Say whether the options of a group are numbers, and nothing is captured or differentiated."""
    if group.get("differentiable") or group.get("capturable"):
        return False
    values = [value for name, value in group.items() if name != "params"]
    return not any(isinstance(each, Tensor) for value in values for each in (value, *_parts(value)))


def _parts(value: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return (one.is_contiguous() and other.is_contiguous()) or _steps_of(one) == _steps_of(other)


def _steps_of(tensor: Tensor) -> list[int]:
    """Return the strides that matter: of dimensions with more than one place."""
    return [stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True) if count > 1]


def _place_steps(optimizer: Optimizer, parameters: Sequence[Tensor], steps: list[Tensor | None]) -> None:
    """Put the numbers of steps where fused kernels read them: in float32, beside the parameters."""
    for place, parameter in enumerate(parameters):
        step: Any = steps[place]
        if step.device != parameter.device or step.dtype is not torch.float32:
            steps[place] = optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)


_CHOSEN = "_fxopt_form"


class _Chosen(NamedTuple):
    """What an optimizer was given: the gate before its steps, and the hooks that close it."""

    gate: Gate
    hooks: tuple[RemovableHandle, ...]


def forms_of(optimizer: Optimizer) -> list[str]:
    """Return the forms that an optimizer has, torch's own choice, "", first."""
    return ["", *(flag for flag in FLAGS if flag in optimizer.defaults and reads_groups(type(optimizer)))]


def set_form(optimizer: Optimizer, form: str) -> None:
    """Let an optimizer, in place, take its steps in another form where it can; its saved states do not show it."""
    reset_form(optimizer)
    if form:
        gate = Gate(optimizer, form)
        watch_groups(optimizer, gate)
        hooks = (
            optimizer.register_step_post_hook(gate.close),
            optimizer.register_state_dict_pre_hook(gate.close),  # after a step that failed
            optimizer.register_state_dict_post_hook(_as_given),
        )
        vars(optimizer)[_CHOSEN] = _Chosen(gate, hooks)


def reset_form(optimizer: Optimizer) -> None:
    """Take back a form that was chosen here; what a user has set stays."""
    chosen: _Chosen | None = vars(optimizer).pop(_CHOSEN, None)
    if chosen is not None:
        leave_groups(optimizer)
        chosen.gate.close()
        for hook in chosen.hooks:
            hook.remove()
        for state in optimizer.state.values():
            if moved := _moved(state):
                state.update(moved)


def _as_given(_: Optimizer, saved: dict[str, Any]) -> None:
    """Write a saved state as the optimizer would without the form that was chosen."""
    saved["state"].update(
        {name: {**state, **moved} for name, state in saved["state"].items() if (moved := _moved(state))}
    )


def _moved(state: Any) -> dict[str, Tensor]:
    """Return the number of steps where torch's loop reads it, if a fused step has it elsewhere."""
    step: Any = cast("dict[str, Any]", state).get("step") if isinstance(state, dict) else None
    return {"step": step.cpu()} if isinstance(step, Tensor) and step.device.type != "cpu" else {}
