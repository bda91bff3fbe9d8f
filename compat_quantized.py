"""The packed kernels of PyTorch for small integers on CPUs: private names, all in one place."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

__all__ = [
    "int4_packed",
    "int4_product",
    "int8_packed",
    "int8_product_dynamic",
    "int8_product_of_weights",
    "needs_reduced_range",
    "why_no_int8",
]

_TORCH: Any = torch
_OPERATORS: Any = cast("Any", torch.ops).quantized
_ENGINES = ("x86", "fbgemm", "onednn")


def why_no_int8() -> str:
    """Return why int8 products cannot be computed here, or ""."""
    engine = str(torch.backends.quantized.engine)
    if engine in _ENGINES:
        return ""
    able = [name for name in torch.backends.quantized.supported_engines if name in _ENGINES]
    if able:
        return f"the engine of quantized operators is {engine!r}; set torch.backends.quantized.engine = {able[0]!r}"
    return "this PyTorch has no engine for int8 on this CPU (x86, fbgemm or onednn)"


def needs_reduced_range() -> bool:
    """Say whether activations must be held in 7 bits, since products of 8 bits overflow in the CPU's 16."""
    return not torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage]


def int8_packed(values: Tensor, scales: Tensor, bias: Tensor | None) -> Any:
    """Return a weight, [outputs, inputs] of int8 with one scale or one for each output, as the kernel reads it."""
    _warn_now()
    if scales.numel() == len(values):
        zeros = torch.zeros(len(values), dtype=torch.long)
        weight = _TORCH._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)
    else:
        weight = _TORCH._make_per_tensor_quantized_tensor(values, float(scales), 0)
    return _OPERATORS.linear_prepack(weight, None if bias is None else bias.detach().float())


@cache
def _warn_now() -> None:
    """Let PyTorch say now, unheard, what it says once: that it will replace the tensors which kernels are packed by.

    `fxopt` goes with versions of PyTorch that have them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _TORCH._make_per_tensor_quantized_tensor(torch.zeros(1, dtype=torch.int8), 1.0, 0)


def int8_product_dynamic(x: Tensor, packed: Any) -> Tensor:
    """Return the product of float32 activations, quantized on the way with one scale, and a packed weight."""
    return _OPERATORS.linear_dynamic(x, packed, needs_reduced_range())


def int8_product_of_weights(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Return the product of bfloat16 activations, [rows, inputs], and a weight of int8, scales in bfloat16."""
    return _TORCH._weight_int8pack_mm(x, values, scales)


def int4_packed(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers from -8 to 7, [outputs, inputs], and scales, [outputs, groups], as the kernel reads them."""
    packed = _TORCH._convert_weight_to_int4pack_for_cpu((values.int() + 8), 1)
    both = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    return packed, both


def int4_product(x: Tensor, packed: tuple[Tensor, Tensor], group: int) -> Tensor:
    """Return the product of bfloat16 activations, [rows, inputs], and a packed weight of int4."""
    return _TORCH._weight_int4pack_mm_for_cpu(x, packed[0], group, packed[1])
