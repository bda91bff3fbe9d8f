"""What optimizers' steps are watched for: whole tensors of merged parameters, and zeros that are written over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..compat import own_parameters
from ..errors import StateError
from ..runtime.state import steps_by_element

__all__ = ["after_steps", "watch_steps"]

_Modules = Mapping[nn.Module, Any]


class _StepHook:
    """A hook on all steps in this process, registered as long as there are modules that it is for (decision 031)."""

    def __init__(self, register: Callable[[Any], Any], act: Callable[[Optimizer, _Modules], None]) -> None:
        self._modules: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self._register, self._act = register, act
        self._handle: Any = None

    def add(self, module: nn.Module, value: Any = None) -> None:
        self._modules[module] = value
        if self._handle is None:
            self._handle = self._register(self)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        modules = dict(self._modules.items())
        if modules:
            self._act(optimizer, modules)
        elif self._handle is not None:
            self._handle.remove()
            self._handle = None


def _check(optimizer: Optimizer, stores: _Modules) -> None:
    if steps_by_element(type(optimizer)):
        return
    merged = {id(parameter) for store in stores for parameter in own_parameters(store).values()}
    held = sum(id(parameter) in merged for group in optimizer.param_groups for parameter in group["params"])
    if held:
        kind = type(optimizer).__name__
        raise StateError(
            f"{kind} is not known to update each element by itself, and {held} of its parameters hold those of "
            f"several members; leave out the pass that merged them, or, if it does, call fxopt.element_wise({kind})"
        )


def _settle(optimizer: Optimizer, modules: _Modules) -> None:
    if torch.compiler.is_compiling():
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module, settle in modules.items():
        if any(id(parameter) in stepped for parameter in own_parameters(module).values()):
            settle(module)


_before = _StepHook(register_optimizer_step_pre_hook, _check)
_after = _StepHook(register_optimizer_step_post_hook, _settle)


def watch_steps(store: nn.Module) -> None:
    """Let each step be asked whether it may step the merged parameters that a module holds."""
    _before.add(store)


def after_steps(module: nn.Module, settle: Callable[[nn.Module], None]) -> None:
    """Let `settle` put a module's parameters right behind each step of an optimizer that has some of them."""
    _after.add(module, settle)
