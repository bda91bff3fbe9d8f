"""Where tracing steps in between a forward and what no graph can say: private names of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.utils as functorch_utils  # pyright: ignore[reportPrivateUsage]
from torch.autograd.function import _SingleLevelFunction  # pyright: ignore[reportPrivateUsage]
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["function_entries", "untraceable_entries"]


def function_entries() -> tuple[tuple[Any, str], tuple[Any, str]]:
    """Return owner and name of what applies a custom autograd function, and of what treats its arguments first.
    `Function.apply` itself is no place to step in: users' modules keep bound methods of it.
    """
    return (_SingleLevelFunction, "apply"), (functorch_utils, "unwrap_dead_wrappers")


def untraceable_entries() -> list[tuple[Any, str, str]]:
    """Return owner, name and description of each function behind which a forward does what no graph can say."""
    kernels = [(*setter, "it chooses the kernels of attention") for setter in _setters("sdp_", "math_sdp_")]
    settings = [(*setter, f"it changes a setting of torch ({setter[1]})") for setter in _setters(*_SETTINGS)]
    modes = ("set_autocast_enabled", "set_autocast_dtype", "set_autocast_cache_enabled")
    autocast = [(torch, name, "it switches autocast by hand") for name in modes]
    return [
        *kernels,
        *settings,
        *autocast,
        (TorchFunctionMode, "__enter__", "it enters a torch function mode"),
        (TorchDispatchMode, "__enter__", "it enters a torch dispatch mode"),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__", "it sets hooks on the tensors that autograd saves"),
        (torch.cuda.StreamContext, "__enter__", "it chooses another CUDA stream"),
        (torch.cuda.device, "__enter__", "it chooses another CUDA device"),
    ]


def _setters(*prefixes: str) -> list[tuple[Any, str]]:
    """Return owner and name of the functions that change those settings of torch by which operators differ."""
    owner: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    starts = tuple(f"_set_{prefix}" for prefix in prefixes)
    return [(owner, name) for name in dir(owner) if name.startswith(starts)]


_SETTINGS = (
    "blas", "cpu_allow", "cublas", "cudnn", "default", "deterministic", "float32", "fp32", "linalg", "miopen",
    "mkldnn", "nnpack", "onednn", "qengine", "rocm",
)  # fmt: skip
