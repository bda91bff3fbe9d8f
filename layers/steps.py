"""Refuse steps of optimizers that look at whole tensors, over parameters that hold those of several members."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..compat import own_parameters
from ..errors import StateError
from ..runtime.state import steps_by_element

__all__ = ["watch_steps"]


class _Watch:
    """A hook on all steps in this process, as long as there are merged parameters (decision 031)."""

    def __init__(self) -> None:
        self.stores: WeakSet[nn.Module] = WeakSet()
        self.handle: Any = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stores = list(self.stores)
        if not stores and self.handle is not None:
            self.handle.remove()
            self.handle = None
        if not stores or steps_by_element(type(optimizer)):
            return
        merged = {id(parameter) for store in stores for parameter in own_parameters(store).values()}
        held = sum(id(parameter) in merged for group in optimizer.param_groups for parameter in group["params"])
        if held:
            kind = type(optimizer).__name__
            raise StateError(
                f"{kind} is not known to update each element by itself, and {held} of its parameters hold those of "
                f"several members; leave out the pass that merged them, or, if it does, call fxopt.element_wise({kind})"
            )


_watch = _Watch()


def watch_steps(store: nn.Module) -> None:
    """Let each step be asked whether it may step the merged parameters that a module holds."""
    _watch.stores.add(store)
    if _watch.handle is None:
        _watch.handle = register_optimizer_step_pre_hook(_watch)
