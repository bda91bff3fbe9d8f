"""What optimizers' steps are watched for: whole tensors of merged parameters, and zeros that are written over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..compat import own_parameters
from ..errors import StateError
from ..runtime.state import steps_by_element

__all__ = ["after_steps", "watch_steps"]


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


class _Settling:
    """A hook behind all steps in this process, as long as there are modules whose parameters it puts right."""

    def __init__(self) -> None:
        self.modules: WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]] = WeakKeyDictionary()
        self.handle: Any = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        modules = list(self.modules.items())
        if not modules and self.handle is not None:
            self.handle.remove()
            self.handle = None
        if not modules or torch.compiler.is_compiling():
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module, settle in modules:
            if any(id(parameter) in stepped for parameter in own_parameters(module).values()):
                settle(module)


_settling = _Settling()


def after_steps(module: nn.Module, settle: Callable[[nn.Module], None]) -> None:
    """Let `settle` put a module's parameters right behind each step of an optimizer that has some of them."""
    _settling.modules[module] = settle
    if _settling.handle is None:
        _settling.handle = register_optimizer_step_post_hook(_settling)
