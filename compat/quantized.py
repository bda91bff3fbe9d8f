"""The packed kernels of PyTorch for small integers on CPUs: private names, all in one place."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from .logs import unheard

__all__ = [
    "INT8_STEPS", "OBSERVERS", "Int8Result", "Observer", "dequantized_by_pattern", "empty_tensor", "exports_pattern",
    "float8_product", "has_float8", "int4_packed", "int4_product", "int8_cells", "int8_convolution",
    "int8_convolution_packed", "int8_lstm", "int8_numbers", "int8_packed", "int8_product_by_rows",
    "int8_product_of_few_rows", "int8_product_of_weights", "int8_product_static", "int8_rows_packed",
    "int8_static_packed", "int8_takes_few_rows", "int8_weight_packed", "is_simulating", "load_pattern",
    "needs_reduced_range", "quantized_by_pattern", "rounded_with_learned_scale", "runs_simulation", "simulating",
    "static_format", "weight_by_pattern", "why_no_int8", "why_no_static_int8", "why_overflow", "without_torch_function",
    "writes_fake_quantization",
]  # fmt: skip

_TORCH: Any = torch
_OPERATORS: Any = cast("Any", torch.ops).quantized
_ONEDNN: Any = cast("Any", torch.ops).onednn
OBSERVERS = {
    "histogram": "HistogramObserver",
    "minmax": "MinMaxObserver",
    "moving_average": "MovingAverageMinMaxObserver",
}
"""What options call observers -> torchao's class."""

_TALKING = ("torchao", "torch.utils._pytree")
"""Torchao tells at length which of its CUDA libraries are not there, and torch what torchao should have done."""
_NO_TORCHAO = 'calibration needs torchao; install it with: pip install "fxopt[quantization]"'

_FEW_ROWS = 128
_FLOAT8_CAPABILITY = (8, 9)
_INPUTS = 16
"""The kernel for a weight of int8 takes inputs in blocks of so many."""

_ENGINES = ("x86", "fbgemm", "onednn")


class _Switch(threading.local):
    on = False


_simulating = _Switch()


@contextmanager
def simulating(on: bool = True) -> Generator[None]:
    """Let quantized layers compute on this thread what compilers and exporters get of them, or not any more."""
    before, _simulating.on = _simulating.on, on
    try:
        yield
    finally:
        _simulating.on = before


def is_simulating() -> bool:
    """Say whether this thread asked for the simulation."""
    return _simulating.on


def runs_simulation() -> bool:
    """Say whether quantized layers compute in plain operators, as graphs of compilers take no packed objects."""
    return torch.compiler.is_compiling() or cast("Any", torch.jit).is_tracing() or _simulating.on


def writes_fake_quantization() -> bool:
    """Say whether torch traces for others: their compilers know torch's fake quantization, and compute in 8 bits."""
    return cast("Any", torch.jit).is_tracing()


def exports_pattern(x: Tensor) -> bool:
    """Say whether an activation is rounded by the operators that runtimes know as quantized: exporters get these."""
    return x.dtype in (torch.float32, torch.uint8) and (torch.compiler.is_exporting() or _simulating.on)


def quantized_by_pattern(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return activations as uint8, by the operator of PT2E, which ONNX calls QuantizeLinear."""
    return _pattern().quantize_per_tensor.default(x.detach(), scale, zero_point, 0, 255, torch.uint8)


def dequantized_by_pattern(numbers: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return what numbers of uint8 stand for, in float32."""
    return _pattern().dequantize_per_tensor.default(numbers, scale, zero_point, 0, 255, torch.uint8)


def weight_by_pattern(values: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 weight that int8 numbers, [outputs, ...], and one scale for each output stand for."""
    wide = scales.detach().float().reshape(-1).expand(len(values))
    zeros = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    return _pattern().dequantize_per_channel.default(values, wide, zeros, 0, -128, 127, torch.int8)


@cache
def _pattern() -> Any:
    load_pattern()
    return _TORCH.ops.quantized_decomposed


def load_pattern() -> None:
    """Let torch know the operators of the pattern; it registers them with this module only."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")


def empty_tensor(cls: type[Any], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of a class of tensors that has no memory."""
    return cast("Any", Tensor)._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def without_torch_function() -> Any:
    """Let `__torch_function__` of classes of tensors rest for a while."""
    return cast("Any", torch)._C.DisableTorchFunctionSubclass()


def why_no_int8() -> str:
    """Return why int8 products cannot be computed here, or ""."""
    engine = str(torch.backends.quantized.engine)
    if engine in _ENGINES:
        return ""
    able = [name for name in torch.backends.quantized.supported_engines if name in _ENGINES]
    if able:
        return f"the engine of quantized operators is {engine!r}; set torch.backends.quantized.engine = {able[0]!r}"
    return "this PyTorch has no engine for int8 on this CPU (x86, fbgemm or onednn)"


@cache
def needs_reduced_range() -> bool:
    """Say whether activations must be held in 7 bits, since products of 8 bits overflow in the CPU's 16."""
    return not torch.cpu._is_vnni_supported()  # pyright: ignore[reportPrivateUsage]


_SEVEN_BITS = 63
"""The largest number of one side whose product with the largest of the other fits into 16 bits twice."""

INT8_STEPS = _SEVEN_BITS if needs_reduced_range() else 127
"""From 0 to the largest number of a row; without VNNI, sums of products of 8 bits overflow."""


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
    """Let PyTorch say now, unheard, what it says once: that it will replace these packed tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _TORCH._make_per_tensor_quantized_tensor(torch.zeros(1, dtype=torch.int8), 1.0, 0)


def int8_rows_packed(values: Tensor, scales: Tensor) -> Any:
    """Return a weight, [outputs, inputs] of int8 with one scale or one for each output, for products by rows.
    FBGEMM's kernels do not use AMX; those of oneDNN do, and take longer to call.
    """
    return int8_static_packed(values, scales, None) if _has_amx() else int8_packed(values, scales, None)


def int8_product_by_rows(rows: Tensor, scales: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
    """Return the product of activations and a weight, plus a bias, in float32.
    `rows`: float32, [rows, inputs]; `scales`: the step of each row, [rows, 1], of which its largest has `INT8_STEPS`.
    """
    steps, zero = rows / scales, INT8_STEPS + 1
    if isinstance(packed, tuple):
        numbers = steps.add_(zero + 0.5).to(torch.uint8)
        result = int8_product_static(numbers, 1.0, zero, cast("tuple[Any, ...]", packed), _FLOATS)
    else:
        result = _by_rows()(steps, 1.0, zero, packed)
    return result.mul_(scales) if bias is None else torch.addcmul(bias.detach(), result, scales, out=result)


@cache
def _by_rows() -> Any:
    return _OPERATORS.linear_with_input_q_dq_qweight_dq_output_fp32.default


@cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported() and not why_no_static_int8()  # pyright: ignore[reportPrivateUsage]


def int8_weight_packed(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight, [outputs, inputs] of int8, and one scale for each output, as the kernel reads them.
    The kernel takes blocks of 16 inputs; without zeros behind the last one it reads past the end of a weight.
    """
    wide = F.pad(values, (0, -values.shape[1] % _INPUTS)).contiguous()
    return wide, scales.bfloat16().expand(len(values)).contiguous()


def int8_product_of_weights(x: Tensor, packed: tuple[Tensor, Tensor]) -> Tensor:
    """Return the product of bfloat16 activations, [rows, inputs], and a weight of int8 that is packed."""
    missing = packed[0].shape[1] - x.shape[1]
    return _TORCH._weight_int8pack_mm((F.pad(x, (0, missing)) if missing else x).contiguous(), *packed)


def int4_packed(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers from -8 to 7, [outputs, inputs], and scales, [outputs, groups], as the kernel reads them."""
    packed = _TORCH._convert_weight_to_int4pack_for_cpu((values.int() + 8), 1)
    both = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()
    return packed, both


def int4_product(x: Tensor, packed: tuple[Tensor, Tensor], group: int) -> Tensor:
    """Return the product of bfloat16 activations, [rows, inputs], and a packed weight of int4."""
    return _TORCH._weight_int4pack_mm_for_cpu(x.contiguous(), packed[0], group, packed[1])


def has_float8(device: torch.device) -> bool:
    """Say whether a device multiplies float8: GPUs of NVIDIA since Ada and Hopper."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY


def float8_product(rows: Tensor, of_rows: Tensor, weight: Tensor, of_outputs: Tensor) -> Tensor:
    """Return rows [rows, inputs] times weight [outputs, inputs], both of float8_e4m3fn, in bfloat16, summed in float32.
    Scales are float32, [rows, 1] and [outputs]; both sizes of a weight are multiples of 16.
    """
    scales = of_rows, of_outputs.view(1, -1)
    return _TORCH._scaled_mm(rows, weight.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def int8_cells(halves: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Any]:
    """Return the cells of an LSTM as its kernel reads them, from numbers, scales and bias of their halves."""
    packed: list[tuple[Any, Tensor]] = []
    for values, scales, bias in halves:
        bias = torch.zeros(len(values)) if bias is None else bias.detach().float()
        packed.append((int8_packed(values, scales, bias), bias))
    pairs = zip(packed[::2], packed[1::2], strict=True)
    make = _OPERATORS.make_quantized_cell_params_dynamic
    return [make(x[0], h[0], x[1], h[1], needs_reduced_range()) for x, h in pairs]


def int8_lstm(x: Tensor, state: Sequence[Tensor], cells: Sequence[Any], like: nn.LSTM) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, hidden state and cell state for float32 activations and cells that `int8_cells` packed."""
    return _TORCH.quantized_lstm(
        x, list(state), list(cells), True, like.num_layers, 0.0, False, like.bidirectional, like.batch_first,
        dtype=torch.int8, use_dynamic=True,
    )  # fmt: skip


class Observer:
    """torchao's observer of activations in 8 bits: "histogram", "minmax" or "moving_average"."""

    def __init__(self, kind: str) -> None:
        with unheard(*_TALKING):
            try:
                module = importlib.import_module("torchao.quantization.pt2e.observer")
            except ImportError as error:
                raise UsageError(_NO_TORCHAO) from error
            make = getattr(module, OBSERVERS[kind])
            self._observer: Any = make(dtype=torch.uint8, qscheme=torch.per_tensor_affine, quant_min=0, quant_max=255)

    def see(self, x: Tensor) -> None:
        """Take note of an activation."""
        with unheard(*_TALKING):
            self._observer(x)

    def scale_and_zero_point(self) -> tuple[float, int]:
        """Return what stands for the range of all that was seen."""
        with unheard(*_TALKING):
            scale, zero_point = self._observer.calculate_qparams()
        return float(scale), int(zero_point)


Int8Result = tuple[float, int, torch.dtype, str]
"""What a kernel returns: scale and zero point of the numbers (1.0 and 0 of floats), type, and the activation behind."""
_FLOATS: Int8Result = 1.0, 0, torch.float32, "none"


@cache
def why_no_static_int8() -> str:
    """Return why products of small integers cannot be computed exactly here, or ""."""
    if not torch.backends.mkldnn.is_available() or not hasattr(_ONEDNN, "qlinear_pointwise"):
        return "this build of PyTorch has no oneDNN, whose kernels it needs"
    return "" if _sums_exactly(_SEVEN_BITS) else "oneDNN's sums of products of 8 and 7 bits overflow on this CPU"


@cache
def static_format() -> str:
    """Return how weights are held for products with 8-bit activations: "int8"; "int7" where those of 8 bits overflow.

    Without VNNI two products are added in 16 bits, which hold 2 * 255 * 63 but not 2 * 255 * 127.
    """
    return "int8" if why_no_static_int8() or _sums_exactly(127) else "int7"


def why_overflow(values: Tensor) -> str:
    """Return why sums of products of a weight's numbers, int8, and 8-bit activations may be wrong here, or ""."""
    if static_format() == "int8" or not values.numel() or int(values.int().abs().max()) <= _SEVEN_BITS:
        return why_no_static_int8()
    return "its weight has 8 bits, whose sums overflow on this CPU without VNNI"


def _sums_exactly(largest: int) -> bool:
    """Say whether the largest activations times a weight of this number give the exact sum."""
    numbers = torch.full((2, 64), 255, dtype=torch.uint8)
    packed = int8_static_packed(torch.full((16, 64), largest, dtype=torch.int8), torch.ones(16), None)
    return bool((int8_product_static(numbers, 1.0, 0, packed, _FLOATS) == 64 * 255 * largest).all())


def int8_numbers(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return activations of float32 as uint8, x / scale + zero_point rounded, in one pass over them."""
    _warn_now()
    return torch.quantize_per_tensor(x, scale, zero_point, torch.quint8).int_repr()


def int8_static_packed(values: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """Return a linear's weight, [outputs, inputs] of int8, with its scales and bias, as the kernel reads them."""
    return (_ONEDNN.qlinear_prepack(values, None), *_per_output(values, scales, bias))


def int8_product_static(
    numbers: Tensor, scale: float, zero_point: int, weight: tuple[Any, ...], result: Int8Result
) -> Tensor:
    """Return the product of activations, [..., inputs] of uint8, and a weight."""
    *form, activation = result
    return _ONEDNN.qlinear_pointwise(numbers, scale, zero_point, *weight, *form, activation, [], "")


def int8_takes_few_rows(rows: int) -> bool:
    """Say whether FBGEMM's kernel, for a weight that `int8_packed` packed, takes a linear layer with static ranges:
    where there is no VNNI it is up to 6 times as fast as oneDNN's with few rows, and no faster with many.
    """
    return rows <= _FEW_ROWS and _has_kernel_of_few_rows()


@cache
def _has_kernel_of_few_rows() -> bool:
    return static_format() == "int7" and not why_no_int8()


def int8_product_of_few_rows(x: Tensor, scale: float, zero_point: int, packed: Any, result: Int8Result) -> Tensor:
    """Return the product of activations, [..., inputs] of uint8, or of float32 that the kernel rounds, and a weight."""
    of_result, zero_of_result, dtype, activation = result
    shape, rows, suffix = x.shape[:-1], x.reshape(-1, x.shape[-1]), "_relu" if activation == "relu" else ""
    if dtype is torch.uint8:
        given = _TORCH._make_per_tensor_quantized_tensor(rows, scale, zero_point)
        found = getattr(_OPERATORS, f"linear{suffix}")(given, packed, of_result, zero_of_result).int_repr()
    else:
        floats = rows if rows.dtype is torch.float32 else (rows.float() - zero_point) * scale
        product = getattr(_OPERATORS, f"linear_with_input_q_dq_qweight_dq{suffix}_output_fp32")
        found = product.default(floats, scale, zero_point, packed).to(dtype)
    return found.view(*shape, found.shape[-1])


def int8_convolution_packed(
    values: Tensor, scales: Tensor, bias: Tensor | None, scale: float, zero_point: int, geometry: Sequence[Any],
    shape: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    """Return a convolution's weight, [outputs, inputs / groups, ...] of int8, with its scales and bias, packed.
    `scale`, `zero_point` and `shape` are of the activations, `geometry` stride, padding, dilation and groups.
    """
    per_output = _per_output(values, scales, bias)
    return (_ONEDNN.qconv_prepack(values, per_output[0], scale, zero_point, *geometry, list(shape)), *per_output)


def int8_convolution(
    numbers: Tensor, scale: float, zero_point: int, weight: tuple[Any, ...], geometry: Sequence[Any], result: Int8Result
) -> Tensor:
    """Return the convolution of activations, [rows, inputs, ...] of uint8; it lies in memory with the channels last."""
    *form, activation = result
    return _ONEDNN.qconv_pointwise(numbers, scale, zero_point, *weight, *geometry, *form, activation, [], "")


def _per_output(values: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return scales and zero points of a weight, one for each output, and the bias in float32."""
    wide = scales.detach().float().expand(len(values)).contiguous()
    return wide, torch.zeros(len(values), dtype=torch.long), None if bias is None else bias.detach().float()


def rounded_with_learned_scale(x: Tensor, scale: Tensor, zero_point: Tensor, largest: int) -> Tensor:
    """Return an activation rounded to numbers from 0 to the largest, with gradients for its scale and zero point.
    They are scaled as in Esser et al., Learned Step Size Quantization (ICLR 2020), section 2.2.
    """
    factor = (max(1, x.numel()) * largest) ** -0.5
    return _TORCH._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, 0, largest, factor)
