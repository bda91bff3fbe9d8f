"""The packed kernels of oneDNN for floats on CPUs: private names of PyTorch, all in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

__all__ = [
    "is_packed",
    "linear_packed",
    "linear_product",
    "runs_kernels",
    "why_no_packing",
]

_OPERATORS: Any = cast("Any", torch.ops).mkldnn
_NATIVE: Any = cast("Any", torch)._C
_NEEDED = (
    "_reorder_linear_weight", "_linear_pointwise", "_reorder_convolution_weight", "_convolution_pointwise",
)  # fmt: skip

is_packed: Callable[[Tensor], bool] = cast("Any", Tensor).is_mkldnn.__get__
"""Say whether a tensor is in the form that oneDNN reads."""
_peek, _is_tracing, _modes, _functions = (
    _NATIVE._functorch.peek_interpreter_stack,
    _NATIVE._is_tracing,
    _NATIVE._len_torch_dispatch_stack,
    _NATIVE._len_torch_function_stack,
)
_is_cast, _is_compiling = _NATIVE._is_any_autocast_enabled, torch.compiler.is_compiling


@cache
def why_no_packing(dtype: torch.dtype) -> str:
    """Return why this machine or this PyTorch cannot compute with packed weights of a dtype, or ""."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    missing = next((name for name in _NEEDED if not hasattr(_OPERATORS, name)), None)
    if missing is not None:
        return f"this PyTorch lacks torch.ops.mkldnn.{missing}"
    if dtype is torch.bfloat16 and not _OPERATORS._is_mkldnn_bf16_supported():
        return "this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16 or the like), so it would be slower"
    return ""


def runs_kernels() -> bool:
    """Say whether packed operators may run here: eagerly, without autocast, and with nobody who looks on."""
    return not (_is_cast() or _is_compiling() or _modes() or _functions() or _is_tracing() or _peek() is not None)


def linear_packed(weight: Tensor) -> Tensor:
    """Return a weight, [outputs, inputs], as oneDNN reads it."""
    return _OPERATORS._reorder_linear_weight(weight)


@cache
def _linear() -> Any:
    return _OPERATORS._linear_pointwise.default


def linear_product(x: Tensor, packed: Tensor, bias: Tensor | None, behind: tuple[str, list[float], str]) -> Tensor:
    """Return `x @ weight.T + bias` with an activation behind it: its name there, its numbers, and its kind."""
    name, scalars, kind = behind
    return _linear()(x, packed, bias, name, scalars, kind)
