"""Give an optimizer another form of the same step, and take it back; checkpoints and copies do not know of it."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...compat.optimizers import leave_groups, reads_groups, watch_groups
from .gate import FLAGS, Gate

__all__ = ["forms_of", "reset_form", "set_form"]

_CHOSEN = "_fxopt_form"


class _Chosen(NamedTuple):
    """What an optimizer was given: the gate before its steps, and the hooks that close it."""

    gate: Gate
    hooks: tuple[RemovableHandle, ...]


def forms_of(optimizer: Optimizer) -> list[str]:
    """Return the forms that an optimizer has, torch's own choice, "", first."""
    return ["", *(flag for flag in FLAGS if flag in optimizer.defaults and reads_groups(type(optimizer)))]


def set_form(optimizer: Optimizer, form: str) -> None:
    """Let an optimizer take its steps in another form, in place, where it can; `reset_form` undoes it.

    Flags of its groups are set in a step alone: saved states and copies are what they would be without a form.
    """
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
