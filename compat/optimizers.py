"""Where a step of torch's optimizers reads a group: private names of torch.optim."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Columns", "carry_hooks_of_steps", "leave_groups", "reads_groups", "rebind_hooks_of_steps", "watch_groups"]

Columns = Sequence[list[Tensor | None]]
"""What a step reads of a group: its parameters that have a gradient, these gradients, and one list for each moment."""

_READ = "_init_group"


def reads_groups(kind: type[Optimizer]) -> bool:
    """Say whether steps read groups as torch's own do, and copies leave behind what is set on the instance."""
    read: Any = getattr(kind, _READ, None)
    return getattr(read, "__module__", "").startswith("torch.optim.") and kind.__getstate__ is Optimizer.__getstate__


def watch_groups(optimizer: Optimizer, act: Callable[[Optimizer, dict[str, Any], Columns], None]) -> None:
    """Call a function each time that a step has read a group: after closures and hooks, on this instance only."""
    here = weakref.ref(optimizer)  # without a cycle moments go as soon as nobody needs the optimizer

    def read(group: dict[str, Any], *columns: list[Tensor | None]) -> Any:
        optimizer: Any = here()
        kind: type[Any] = optimizer.__class__
        found = getattr(kind, _READ)(optimizer, group, *columns)
        act(optimizer, group, columns)
        return found

    vars(optimizer)[_READ] = read


def leave_groups(optimizer: Optimizer) -> None:
    """Undo `watch_groups`."""
    vars(optimizer).pop(_READ, None)


_HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip


def carry_hooks_of_steps(source: Optimizer, copied: Optimizer, instead: Mapping[int, Any]) -> None:
    """Give the copy of an optimizer the hooks that `copy.deepcopy` leaves behind; see `rebind_hooks_of_steps`."""
    for name in _HOOKS:
        hooks: dict[int, Any] = getattr(copied, name)
        hooks.update({key: _rebound(hook, instead) for key, hook in getattr(source, name).items()})


def rebind_hooks_of_steps(optimizer: Optimizer, instead: Mapping[int, Any]) -> None:
    """Let an optimizer's hooks reach other objects; `instead` is by the id of a hook or of what it holds."""
    for name in _HOOKS:
        hooks: dict[int, Any] = getattr(optimizer, name)
        for key, hook in list(hooks.items()):
            hooks[key] = _rebound(hook, instead)


def _rebound(hook: Any, instead: Mapping[int, Any]) -> Any:
    if id(hook) in instead:
        return instead[id(hook)]
    if isinstance(hook, types.MethodType):
        return types.MethodType(_rebound(hook.__func__, instead), _rebound(hook.__self__, instead))
    if type(hook) is functools.partial:
        part = cast("functools.partial[Any]", hook)
        args = [_rebound(each, instead) for each in part.args]
        keywords = {name: _rebound(each, instead) for name, each in part.keywords.items()}
        return functools.partial(_rebound(part.func, instead), *args, **keywords)
    if isinstance(hook, types.FunctionType):
        return _with_other_closure(hook, instead)
    return hook


def _with_other_closure(function: types.FunctionType, instead: Mapping[int, Any]) -> types.FunctionType:
    """Return a function that sees other objects in its closure; the same function where it sees none of them."""
    cells = tuple(_other_cell(cell, instead) for cell in function.__closure__ or ())
    if cells == (function.__closure__ or ()):
        return function
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


def _other_cell(cell: types.CellType, instead: Mapping[int, Any]) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # nothing is in it yet
        return cell
    other = held if isinstance(held, types.FunctionType) else _rebound(held, instead)
    return cell if other is held or type(held) in (types.MethodType, functools.partial) else types.CellType(other)
