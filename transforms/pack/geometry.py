"""The settings of convolutions, as modules and as calls have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from ...layers.packed import Geometry

__all__ = ["CONVOLUTIONS", "NAMES", "geometry_of_call", "geometry_of_module", "padded"]

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Those that oneDNN packs."""

NAMES = {"conv2d": 2, "conv3d": 3, "conv_transpose2d": 2, "conv_transpose3d": 3}
"""What their operators are called, and along how many dimensions they move."""


def geometry_of_module(conv: nn.Module, size: tuple[int, ...] | None) -> Geometry | None:
    """Return the settings of a convolution; None where it pads otherwise than with zeros."""
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


def padded(geometry: Geometry, zeros: object, kernel: Sequence[int]) -> Geometry | None:
    """Return the settings of a convolution behind a pad; None where these are no settings of a convolution.

    Args:
        geometry: of the convolution.
        zeros: before and behind each dimension, the last one first, as `F.pad` has them.
        kernel: the size of its weight, along the dimensions that it moves along.
    """
    given = _numbers(zeros, 0)
    if given is None or len(given) % 2 or len(given) > 2 * geometry.rank or min(given, default=0) < 0:
        return None
    pairs = [(given[at], given[at + 1]) for at in range(0, len(given), 2)][::-1]
    pairs = [(0, 0)] * (geometry.rank - len(pairs)) + pairs
    own = zip(geometry.padding, geometry.padding_after or geometry.padding, strict=True)
    both = [(before + b, after + a) for (before, after), (b, a) in zip(own, pairs, strict=True)]
    return None if geometry.output_padding is not None else _with_padding(geometry, both, kernel)


def _with_padding(geometry: Geometry, both: Sequence[tuple[int, int]], kernel: Sequence[int]) -> Geometry | None:
    """Return settings with other padding; None where kernels would start in nothing but zeros."""
    before, after = tuple(each[0] for each in both), tuple(each[1] for each in both)
    its = dataclasses.replace(geometry, padding=before, padding_after=None if before == after else after)
    if its.padding_after is None:
        return its
    spans = (d * (k - 1) for d, k in zip(its.dilation, kernel, strict=True))
    return its if all(zeros <= span for zeros, span in zip(its.even.padding, spans, strict=True)) else None


def _geometry(
    named: Mapping[str, Any], kernel: Sequence[int], rank: int, size: tuple[int, ...] | None
) -> Geometry | None:
    stride, dilation = (_numbers(named.get(name, 1), rank) for name in ("stride", "dilation"))
    groups = named.get("groups", 1)
    output_padding = _numbers(named["output_padding"], rank) if "output_padding" in named else None
    if stride is None or dilation is None or type(groups) is not int:
        return None
    if "output_padding" in named and output_padding is None:
        return None
    both = _padding(named.get("padding", 0), kernel, dilation, rank)
    its = Geometry(stride, (0,) * rank, dilation, groups, output_padding, size)
    return None if both is None else _with_padding(its, both, kernel)


def _padding(
    given: object, kernel: Sequence[int], dilation: tuple[int, ...], rank: int
) -> list[tuple[int, int]] | None:
    """Return how many zeros stand before and behind each dimension."""
    if not isinstance(given, str):
        numbers = _numbers(given, rank)
        return None if numbers is None else [(zeros, zeros) for zeros in numbers]
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=False)] if given == "same" else [0] * rank
    return [(total // 2, total - total // 2) for total in spans]


def _numbers(given: object, rank: int) -> tuple[int, ...] | None:
    """Return a setting as one number for each dimension; None where it is no plain number. A rank of 0 is any."""
    values = list(cast("Sequence[object]", given)) if isinstance(given, (tuple, list)) else [given]
    if not all(type(value) is int for value in values) or (rank and len(values) not in (1, rank)):
        return None
    numbers = cast("list[int]", values)
    return tuple(numbers * (rank if len(numbers) == 1 and rank else 1))
