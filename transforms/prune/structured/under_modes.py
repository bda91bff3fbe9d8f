"""Modules whose calls run under modes that change what functions compute."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["under_mode"]

_MODES = "_fxopt_modes"


def under_mode(module: nn.Module, mode: TorchFunctionMode) -> None:
    """Let the calls of a module run under a mode, too; those in it are not asked."""
    known: tuple[TorchFunctionMode, ...] = vars(module).get(_MODES, ())
    vars(module)[_MODES] = (*known, mode)
    if not known:
        base = type(module)
        watched = type(base.__name__, (base,), {"__call__": _call, "__module__": base.__module__})
        object.__setattr__(module, "__class__", watched)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for mode in vars(self)[_MODES]:
            stack.enter_context(mode)
        return nn.Module.__call__(self, *args, **kwargs)
