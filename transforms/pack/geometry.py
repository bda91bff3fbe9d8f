"""The settings of convolutions, as modules and as calls have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from ...layers.packed import Geometry

__all__ = ["CONVOLUTIONS", "NAMES", "geometry_of_call", "geometry_of_module"]

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Those that oneDNN packs."""

NAMES = {"conv2d": 2, "conv3d": 3, "conv_transpose2d": 2, "conv_transpose3d": 3}
"""What their operators are called, and along how many dimensions they move."""


def geometry_of_module(conv: nn.Module, size: tuple[int, ...] | None) -> Geometry | None:
    """Return the settings of a convolution; None where it pads otherwise than with as many zeros on both sides."""
    own = cast("Any", conv)
    if own.padding_mode != "zeros":
        return None
    names = ("stride", "padding", "dilation", "groups", "output_padding")
    named = {name: getattr(own, name) for name in names if name != "output_padding" or own.transposed}
    return _geometry(named, own.kernel_size, len(own.kernel_size), size)


def geometry_of_call(
    operator: str, named: Mapping[str, Any], shape: Sequence[int], size: tuple[int, ...] | None
) -> Geometry | None:
    """Return the settings of a call of a convolution, with a weight of some shape; None where they are no numbers."""
    return _geometry(named, shape[2:], NAMES[operator], size)


def _geometry(
    named: Mapping[str, Any], kernel: Sequence[int], rank: int, size: tuple[int, ...] | None
) -> Geometry | None:
    stride, dilation = (_numbers(named.get(name, 1), rank) for name in ("stride", "dilation"))
    padding, groups = _padding(named.get("padding", 0), kernel, dilation, rank), named.get("groups", 1)
    output_padding = _numbers(named["output_padding"], rank) if "output_padding" in named else None
    if stride is None or dilation is None or padding is None or type(groups) is not int:
        return None
    if "output_padding" in named and output_padding is None:
        return None
    return Geometry(stride, padding, dilation, groups, output_padding, size)


def _padding(
    given: object, kernel: Sequence[int], dilation: tuple[int, ...] | None, rank: int
) -> tuple[int, ...] | None:
    if not isinstance(given, str):
        return _numbers(given, rank)
    spans = [d * (k - 1) for d, k in zip(dilation or (), kernel, strict=False)]
    around = spans if given == "same" else [0] * rank
    return None if any(total % 2 for total in around) else tuple(total // 2 for total in around)


def _numbers(given: object, rank: int) -> tuple[int, ...] | None:
    """Return a setting as one number for each dimension; None where it is no plain number."""
    values = list(cast("Sequence[object]", given)) if isinstance(given, (tuple, list)) else [given]
    if not all(type(value) is int for value in values) or len(values) not in (1, rank):
        return None
    numbers = cast("list[int]", values)
    return tuple(numbers * (rank if len(numbers) == 1 else 1))
