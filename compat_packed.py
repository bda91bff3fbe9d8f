"""The packed kernels of oneDNN for floats on CPUs: private names of PyTorch, all in one place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "convolution",
    "convolution_packed",
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
    "_reorder_convolution_transpose_weight", "_convolution_transpose_pointwise",
)  # fmt: skip

is_packed: Callable[[Tensor], bool] = cast("Any", Tensor).is_mkldnn.__get__
"""Say whether a tensor is in the form that oneDNN reads."""
_peek, _is_tracing, _modes, _functions = (
    _NATIVE._functorch.peek_interpreter_stack,
    _NATIVE._is_tracing,
    _NATIVE._len_torch_dispatch_stack,
    _NATIVE._len_torch_function_stack,
)
_forward_ad: Any = forward_ad
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
    """Say whether packed operators may run: eagerly, without autocast or tangents, and with nobody who looks on."""
    if _forward_ad._current_level >= 0:
        return False
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


class _Geometry(Protocol):
    """The settings of a convolution, as `layers.packed.Geometry` has them."""

    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def padding(self) -> tuple[int, ...]: ...
    @property
    def dilation(self) -> tuple[int, ...]: ...
    @property
    def groups(self) -> int: ...
    @property
    def output_padding(self) -> tuple[int, ...] | None: ...
    @property
    def size(self) -> tuple[int, ...] | None: ...


def convolution_packed(weight: Tensor, its: _Geometry) -> Tensor:
    """Return the weight of a convolution along two or three dimensions as oneDNN reads it."""
    rest = its.stride, its.dilation, its.groups, its.size
    if its.output_padding is None:
        return _OPERATORS._reorder_convolution_weight(weight, its.padding, *rest)
    return _OPERATORS._reorder_convolution_transpose_weight(weight, its.padding, its.output_padding, *rest)


@cache
def _convolutions() -> tuple[Any, Any]:
    return _OPERATORS._convolution_pointwise.default, _OPERATORS._convolution_transpose_pointwise.default


def convolution(
    x: Tensor, packed: Tensor, bias: Tensor | None, its: _Geometry, behind: tuple[str, list[float], str]
) -> Tensor:
    """Return a convolution with an activation behind it, channels last in memory."""
    plain, transposed = _convolutions()
    padding, stride, dilation, groups = its.padding, its.stride, its.dilation, its.groups
    name, scalars, kind = behind
    if its.output_padding is None:
        return plain(x, packed, bias, padding, stride, dilation, groups, name, scalars, kind)
    return transposed(x, packed, bias, padding, its.output_padding, stride, dilation, groups, name, scalars, kind)
