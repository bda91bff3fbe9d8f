"""Attributes of known modules that say how wide their tensors are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from .index_classes import Array

__all__ = ["Width", "widths"]


@dataclass(frozen=True)
class Width:
    """An attribute, and the units of what it counts."""

    name: str
    index: int | None
    units: Array


_PLAIN: Mapping[type[nn.Module], tuple[tuple[str, str, int], ...]] = {
    nn.Linear: (("in_features", "weight", 1), ("out_features", "weight", 0)),
    nn.Bilinear: (("out_features", "weight", 0), ("in1_features", "weight", 1), ("in2_features", "weight", 2)),
    nn.Embedding: (("embedding_dim", "weight", 1),),
    nn.EmbeddingBag: (("embedding_dim", "weight", 1),),
    nn.GroupNorm: (("num_channels", "weight", 0),),
    nn.modules.batchnorm._NormBase: (("num_features", "weight", 0), ("num_features", "running_mean", 0)),  # pyright: ignore[reportPrivateUsage]
    nn.RNNBase: (
        ("input_size", "weight_ih_l0", 1), ("proj_size", "weight_hr_l0", 0), ("hidden_size", "weight_hr_l0", 1),
        ("hidden_size", "weight_hh_l0", 1),
    ),
    nn.RNNCellBase: (("input_size", "weight_ih", 1), ("hidden_size", "weight_hh", 1)),
    nn.PReLU: (("num_parameters", "weight", 0),),
}  # fmt: skip
"""Class -> attribute, tensor and dimension; the first tensor that is there counts."""


def widths(module: nn.Module, name: str, units: Mapping[tuple[str, int], Array]) -> Iterator[Width]:
    """Yield the attributes of a module that count indices of its tensors.

    Args:
        module: the module.
        name: its name.
        units: tensor and dimension -> the units along it.
    """
    prefix = f"{name}." if name else ""
    done: set[str] = set()
    for kind, attributes in _PLAIN.items():
        for attribute, tensor, dim in attributes if isinstance(module, kind) else ():
            found = units.get((prefix + tensor, dim))
            if found is not None and attribute not in done and getattr(module, attribute) == len(found):
                done.add(attribute)
                yield Width(attribute, None, found)
    if isinstance(module, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
        yield from _of_convolution(module, prefix, units)


def _of_convolution(module: Any, prefix: str, units: Mapping[tuple[str, int], Array]) -> Iterator[Width]:
    """Yield the channels of a convolution: the weight has those of one group along one of its dimensions."""
    first, second = (units.get((f"{prefix}weight", dim)) for dim in (0, 1))
    groups = module.groups
    if first is not None:
        yield Width("in_channels" if module.transposed else "out_channels", None, first)
    name = "out_channels" if module.transposed else "in_channels"
    if second is not None:
        yield Width(name, None, np.tile(second, groups))
    elif first is not None and groups > 1 and getattr(module, name) % groups == 0:
        times = max(len(first) // groups, 1)
        yield Width(name, None, first[::times])
