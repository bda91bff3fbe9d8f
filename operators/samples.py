"""Samples of a tensor's contents: they show writes that torch does not count."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

__all__ = ["is_dense", "sample_of"]

_COUNT = 16
_INTEGERS: Mapping[int, Literal["b", "h", "i", "q"]] = {1: "b", 2: "h", 4: "i", 8: "q"}
"""Formats of `memoryview`, by the width of an element: NaN equals itself there."""


def sample_of(tensor: Tensor) -> tuple[memoryview | None, memoryview | None]:
    """Return a view of a few elements of a tensor, spread over its rows and columns, and what they hold now.

    The view may be read while the tensor has this memory, size and strides; it goes by the address, since torch cannot
    resize memory that it has given to numpy, as FSDP does. Both are None for other devices.
    """
    width = tensor.dtype.itemsize
    letter, place = _INTEGERS.get(width), tensor.data_ptr()
    if not tensor.is_cpu or not tensor.numel() or not place or letter is None or tensor.is_conj() or tensor.is_neg():
        return None, None
    count, step = _walk(tensor)
    memory = (ctypes.c_byte * (width * ((count - 1) * step + 1))).from_address(place)
    elements = memoryview(memory).cast("B").cast(letter)[:: max(step, 1)]
    return elements, memoryview(elements.tobytes()).cast(letter)


def _walk(tensor: Tensor) -> tuple[int, int]:
    """Return how many elements are read, and how far one lies behind the other in memory."""
    number, lengths = tensor.numel(), [length for length in tensor.shape if length > 1]
    if number <= _COUNT and is_dense(tensor):
        return number, 1
    if is_dense(tensor):
        step = (number - 1) // (_COUNT - 1)
        while math.gcd(step, number) > 1:  # each lies in another row and in another column
            step -= 1
        return _COUNT, step
    count = min(_COUNT, *lengths)  # along the diagonal
    steps = ((length - 1) // (count - 1) for length in tensor.shape)
    return count, sum(step * stride for step, stride in zip(steps, tensor.stride(), strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Say whether the elements fill their memory, in whatever order of the dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
