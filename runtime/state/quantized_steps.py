"""What quantization does to names and tensors: a weight becomes small numbers and scales."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ...errors import StateError
from ..values import DTYPES
from .state_steps import StateStep

__all__ = [
    "FORMATS", "QuantizeByData", "QuantizeSmoothed", "QuantizeTrained", "QuantizeWeight", "dequantized", "numbers_in",
    "powers_of", "quantized", "text_of_numbers",
]  # fmt: skip

FORMATS = {"int8": 127, "int7": 63, "int4": 7, "float8": 448}
"""How a weight is held -> the largest number; all are symmetric around zero. Numbers of 7 bits are in a byte each."""

_TINY = 2.0**-100
"""A row that is smaller than this is zero."""

_ROUNDS = 4


def _check_dtypes(name: str, *words: str) -> None:
    for word in words:
        if word not in DTYPES:
            raise StateError(f"'{name}' cannot be of the type {word!r}; there are {', '.join(DTYPES)}")


@dataclass(frozen=True)
class QuantizeWeight(StateStep):
    """The weight `old` is held as whole numbers or small floats, `new[0]`, times scales, `new[1]`.
    A weight that comes back is quantized to the same numbers and scales again.
    """

    old: str
    new: tuple[str, ...]
    format: str  # one of `FORMATS`; two numbers of 4 bits are in one byte
    dtype: str  # of the weight ("float32")
    dim: int  # which dimension of the weight is that of outputs; it is the first one of the numbers
    group: int  # how many numbers in a row have a scale in common; 0 is all, -1 is all of the tensor

    kind: ClassVar[str] = "quantize_weight"
    is_compact: ClassVar[bool] = True
    keeps_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_dtypes(self.old, self.dtype)

    @classmethod
    def of(cls, name: str, weight: Tensor, form: str, dim: int = 0, group: int = 0) -> QuantizeWeight:
        """Return the step of a weight of this name; the new names are made from it."""
        dtype = str(weight.dtype).removeprefix("torch.")
        return cls(name, (f"{name}_values", f"{name}_scales"), form, dtype, dim, group)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.old,)

    @property
    def targets(self) -> tuple[str, ...]:
        return self.new

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (weight,) = tensors
        if weight.ndim <= self.dim:
            raise StateError(f"'{self.old}' has shape {list(weight.shape)}; it has {self.dim + 1} dimensions or more")
        return quantized(weight.movedim(self.dim, 0).to(self.torch_dtype).contiguous(), self.format, self.group)

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        values, scales = tensors
        weight = dequantized(values, scales, self.format, self.torch_dtype)
        return (weight.movedim(0, self.dim).contiguous(),)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"quantize to {self.format}: {self.old} -> {self.new[0]}"


@dataclass(frozen=True)
class QuantizeSmoothed(QuantizeWeight):
    """The same of a weight whose inputs are scaled by powers of two before it is rounded.
    So the way there and back is exact but for the rounding to numbers.
    """

    exponents: str  # of each input, int8, as `text_of_numbers` writes them

    kind: ClassVar[str] = "quantize_smoothed"

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return super().forward([self._scaled(tensors[0], 1)])

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return (self._scaled(super().backward(tensors)[0], -1),)

    def _scaled(self, weight: Tensor, sign: int) -> Tensor:
        if weight.ndim != 2:
            raise StateError(f"'{self.old}' has shape {list(weight.shape)}; a weight with scaled inputs has two")
        factors = powers_of(self.exponents, weight.shape[1 - self.dim], sign).to(weight)
        return weight * (factors if self.dim == 0 else factors.unsqueeze(-1))


@dataclass(frozen=True)
class QuantizeByData(QuantizeWeight):
    """The same of a weight whose numbers calibration data have chosen; other weights are rounded to the nearest."""

    kind: ClassVar[str] = "quantize_by_data"
    by_data: ClassVar[bool] = True


def text_of_numbers(numbers: Tensor) -> str:
    """Return the bytes of numbers, [count], as text in base 64."""
    return base64.b64encode(numbers.cpu().view(torch.uint8).numpy().tobytes()).decode("ascii")


def numbers_in(text: str, count: int, dtype: torch.dtype, what: str) -> Tensor:
    """Return the numbers, [count], that `text_of_numbers` wrote; else a StateError says `what` cannot be read."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise StateError(f"the {what} cannot be read: {error}") from error
    if len(data) != count * dtype.itemsize:
        raise StateError(f"the {what} have {len(data)} bytes; {count} numbers have {count * dtype.itemsize}")
    return torch.frombuffer(bytearray(data), dtype=dtype)


def powers_of(text: str, count: int, sign: int = 1) -> Tensor:
    """Return two to each of the exponents in a text, times `sign`: float32, [count]; StateError as `numbers_in`."""
    exponents = numbers_in(text, count, torch.int8, "scales of inputs").numpy().astype(np.int32)
    return torch.from_numpy(np.ldexp(np.ones(count, dtype=np.float32), sign * exponents))


@dataclass(frozen=True)
class QuantizeTrained(StateStep):
    """A trained weight, `olds[0]`, as numbers, `new[0]`, and scales; the others are an observer's state."""

    olds: tuple[str, ...]
    new: tuple[str, ...]
    group: int
    dtype: str
    kinds: tuple[str, ...]
    values: tuple[float, ...]
    format: str = "int8"

    kind: ClassVar[str] = "quantize_trained"
    is_compact: ClassVar[bool] = True
    keeps_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_dtypes(self.olds[0], self.dtype, *self.kinds)

    @property
    def sources(self) -> tuple[str, ...]:
        return self.olds

    @property
    def targets(self) -> tuple[str, ...]:
        return self.new

    @property
    def _of_weight(self) -> QuantizeWeight:
        return QuantizeWeight(self.olds[0], self.new, self.format, self.dtype, 0, self.group)

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._of_weight.forward(tensors[:1])

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        device = tensors[0].device
        noted = [
            torch.full((1,) if kind != "int64" else (), value, dtype=DTYPES[kind], device=device)
            for kind, value in zip(self.kinds, self.values, strict=True)
        ]
        return (*self._of_weight.backward(tensors), *noted)

    def __str__(self) -> str:
        return f"quantize to {self.format}, as trained: {self.olds[0]} -> {self.new[0]}"


def quantized(weight: Tensor, form: str, group: int = 0) -> tuple[Tensor, Tensor]:
    """Return numbers [outputs, ...] and scales that hold a weight [outputs, ...], best where its largest elements are:
    int8, for 7 bits too, or bytes of float8_e4m3fn or two of 4 bits. Scales [outputs], [1] or
    [outputs, inputs / group] are float32, for int4 bfloat16.
    """
    rows = _rows(weight, group).float()
    scales = _scales(rows.abs().amax(-1), form, weight.dtype)
    whole = rows / scales.float().unsqueeze(-1)
    if form == "float8":
        return whole.to(torch.float8_e4m3fn).view(torch.uint8).view(weight.shape), scales
    whole = whole.round().clamp(-FORMATS[form], FORMATS[form]).to(torch.int8).view(weight.shape)
    return (_in_halves(whole) if form == "int4" else whole), scales


def dequantized(values: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """Return the weight that numbers and scales stand for; see `quantized`."""
    if form == "float8":
        values = values.view(torch.float8_e4m3fn)
    values = _whole(values) if form == "int4" else values
    rows = values.float().view(*scales.shape, -1)
    return (rows * scales.float().unsqueeze(-1)).view(values.shape).to(dtype)


def _rows(weight: Tensor, group: int) -> Tensor:
    """Return a weight with what has a scale in common in the last dimension."""
    if group < 0:
        return weight.reshape(1, -1)
    outputs = weight.shape[0]
    if not group:
        return weight.reshape(outputs, -1)
    if weight[0].numel() % group:
        raise StateError(f"rows of {weight[0].numel()} numbers cannot be divided into groups of {group}")
    return weight.reshape(outputs, -1, group)


def _scales(largest: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """Return scales that come out the same for the largest numbers that they stand for, rounded to a type."""
    kind = torch.bfloat16 if form == "int4" else torch.float32
    scales = _scale(largest, form, kind)
    for _ in range(_ROUNDS):
        largest = (scales.float() * FORMATS[form]).to(dtype).float() * (largest.float() > _TINY)
        scales = _scale(largest, form, kind)
    return scales


def _scale(largest: Tensor, form: str, kind: torch.dtype) -> Tensor:
    scales = (largest / FORMATS[form]).to(kind)
    return torch.where(largest > _TINY, scales, torch.ones((), dtype=kind, device=scales.device))


def _in_halves(whole: Tensor) -> Tensor:
    """Return numbers from -8 to 7 as bytes of two each, the first one in the lower half."""
    low, high = (whole.view(len(whole), -1, 2) + 8).to(torch.uint8).unbind(-1)
    return low | (high << 4)


def _whole(halves: Tensor) -> Tensor:
    return torch.stack([halves & 15, halves >> 4], -1).view(len(halves), -1).to(torch.int8) - 8
