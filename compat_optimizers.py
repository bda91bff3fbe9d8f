"""Where a step of torch's optimizers reads a group: private names of torch.optim."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Columns", "leave_groups", "reads_groups", "watch_groups"]

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
