"""Kernels for GPUs: found when they are first called; where they cannot be had, the reference computes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import one_line

__all__ = ["kernels_compute_on", "kernels_in_use", "on_gpu"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What kernels read and write; they compute in float32. Float64 is computed by the reference: it is what others are
compared with.
"""
_broken: dict[str, str] = {}
"""Kernels that could not be built in this process, with the reason."""


def kernels_in_use() -> str:
    """Say what computes fxopt's operators here, and why it is not a kernel."""
    if not _has_triton():
        return "CPU reference: triton is not installed"
    if not torch.cuda.is_available():
        return "CPU reference: no CUDA device"
    broken = f"; reference for {', '.join(_broken)}, which could not be built" if _broken else ""
    return f"triton {importlib.metadata.version('triton')}{broken}"


def kernels_compute_on(device: torch.device) -> bool:
    """Say whether kernels, and no references, compute fxopt's operators on a device."""
    return device.type == "cuda" and _has_triton()


def on_gpu(place: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes an operator on a GPU: its kernel at "module:function", or the reference without one."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        fits = all(tensor.dtype in _DTYPES for tensor in tensors if tensor.is_floating_point())
        # Kernels in CUDA C++ say what they lack when they are called.
        if not fits or place in _broken or ("triton_kernel:" in place and not _has_triton()):
            return reference(*args, **kwargs)
        try:
            with torch.cuda.device(tensors[0].device):
                return _kernel(place)(*args, **kwargs)
        except _build_errors() as error:
            _broken[place] = one_line(error)
            text = f"the kernel of {name} could not be built, so its reference computes: {_broken[place]}"
            warnings.warn(text, stacklevel=2)
            return reference(*args, **kwargs)

    return compute


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _kernel(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)


@cache
def _build_errors() -> tuple[type[Exception], ...]:
    """Return what a broken compiler, or a cache that cannot be written, raises; errors of a launch are not among it."""
    own: tuple[Any, ...] = (importlib.import_module("triton.errors").TritonError,) if _has_triton() else ()
    return ImportError, OSError, subprocess.SubprocessError, *own
