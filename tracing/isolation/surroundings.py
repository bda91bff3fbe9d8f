"""What is on around a call: autocast, inference mode, `torch.compile`, and other code in the place of a function."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...compat import all_modules

__all__ = [
    "AutocastState", "autocast_state_now", "compiles", "eagerly", "is_in_compiled", "outside_inference_mode",
    "patching", "redirect", "rewrite_lock",
]  # fmt: skip


_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class AutocastState:
    """Hold the device types that autocast is on for, with their dtypes."""

    autocast: tuple[tuple[str, torch.dtype], ...]

    @contextmanager
    def entered(self) -> Generator[None]:
        """Switch the same autocast on."""
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


def autocast_state_now() -> AutocastState | None:
    """Return the autocast that is on now, or None."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return None
    return AutocastState(tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)))


@contextmanager
def outside_inference_mode() -> Generator[None]:
    """Leave inference mode for a while, without gradients as in it: what is made in it can never have any."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


_ORIGINAL = "_orig_mod"
"""Where the module that `torch.compile` returns keeps the one that it compiles."""


def compiles(module: nn.Module) -> bool:
    """Tell whether a module is what `torch.compile` returned for another one."""
    return isinstance(getattr(module, _ORIGINAL, None), nn.Module)


def is_in_compiled(name: str) -> bool:
    """Tell by its name whether a module is, or is inside, one that `torch.compile` compiles."""
    return _ORIGINAL in name.split(".")


@contextmanager
def eagerly(model: object) -> Generator[None]:
    """Run what is compiled in a model eagerly for a while: compiling a recorded run would compile the recorder, too."""
    if not isinstance(model, nn.Module) or not any(map(compiles, all_modules(model))):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


patching = threading.RLock()
"""Held by the thread that patches torch, in `capture` and `optimize` alone; a thread may take it several times."""
_rewriting = threading.RLock()


def rewrite_lock() -> threading.RLock:
    """Return what a thread holds while it rewrites, checks or times: what it sets belongs to the whole process."""
    return _rewriting


def _entry(*args: Any, fxopt_handler: Callable[..., Any], **kwargs: Any) -> Any:
    return fxopt_handler(*args, **kwargs)


def redirect(function: types.FunctionType, handler: Callable[..., Any]) -> Callable[[], None]:
    """Let calls of `function`, whoever holds it, run `handler(original, ...)`; return what ends it. The function is
    lent other code: to set `nn.Module.__getattr__` updates hundreds of subclasses, 0.25 ms each time.
    """
    code, named = function.__code__, function.__kwdefaults__
    original = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = named

    def end() -> None:
        function.__code__ = code
        function.__kwdefaults__ = named

    # In this order, and back: what other threads call in between is whole at every moment.
    function.__kwdefaults__ = {**(named or {}), "fxopt_handler": functools.partial(handler, original)}
    function.__code__ = _entry.__code__.replace(co_freevars=code.co_freevars)
    return end
