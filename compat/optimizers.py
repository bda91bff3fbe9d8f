"""Where a step of torch's optimizers reads a group: private names of torch.optim."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Columns", "carry_hooks_of_steps", "leave_groups", "reads_groups", "watch_groups"]

Columns = Sequence[list[Tensor | None]]
"""What a step reads of a group: its parameters that have a gradient, these gradients, and one list for each moment."""

_READ = "_init_group"


def reads_groups(kind: type[Optimizer]) -> bool:
    """Say whether steps read groups as torch's own do, and copies leave behind what is set on the instance."""
    read: Any = getattr(kind, _READ, None)
    return getattr(read, "__module__", "").startswith("torch.optim.") and kind.__getstate__ is Optimizer.__getstate__


def watch_groups(optimizer: Optimizer, act: Callable[[Optimizer, dict[str, Any], Columns], None]) -> None:
    """Call a function each time that a step has read a group: after closures and hooks, before it looks at the flags.

    It is set on the instance, which neither schedulers nor wrappers of `step` get past, and copies do not have it.
    """
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
    """Give the copy of an optimizer the hooks that `copy.deepcopy` leaves behind.

    Args:
        source: the optimizer that was copied.
        copied: its copy.
        instead: id of an object -> the one whose methods the hooks are then; methods of others stay theirs.
    """
    for name in _HOOKS:
        hooks: dict[int, Any] = getattr(copied, name)
        hooks.update({key: _rebound(hook, instead) for key, hook in getattr(source, name).items()})


def _rebound(hook: Any, instead: Mapping[int, Any]) -> Any:
    if isinstance(hook, types.MethodType) and id(hook.__self__) in instead:
        return types.MethodType(hook.__func__, instead[id(hook.__self__)])
    return hook
