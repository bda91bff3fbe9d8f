"""What is known of a node's value without keeping it: shapes, dtypes and devices, nested as the value was."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, Union, cast

import torch
from torch import Tensor

from .plain_types import PLAIN_TYPES

__all__ = ["Meta", "TensorMeta", "meta_key", "meta_of"]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Describe one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


Meta: TypeAlias = Union[
    TensorMeta, "tuple[Meta, ...]", "list[Meta]", "dict[Any, Meta]", int, float, complex, bool, str, bytes,
    torch.dtype, torch.device, type, None,
]  # fmt: skip
"""A description: tensors as `TensorMeta`, containers nested, plain values as they are, other objects by their type."""


def meta_of(value: object) -> Meta:
    """Describe `value`; the description holds no tensor."""
    if isinstance(value, Tensor):
        return _tensor_meta(value.shape, value.dtype, value.device)
    if isinstance(value, PLAIN_TYPES):
        return cast("Meta", value)
    if isinstance(value, tuple):
        return tuple(meta_of(item) for item in cast("tuple[object, ...]", value))
    if isinstance(value, list):
        return [meta_of(item) for item in cast("list[object]", value)]
    if isinstance(value, Mapping):
        return {key: meta_of(item) for key, item in cast("Mapping[Any, object]", value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: meta_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return type(value)


@lru_cache(maxsize=4096)
def _tensor_meta(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> TensorMeta:
    return TensorMeta(tuple(shape), dtype, device)


def meta_key(meta: Meta) -> Hashable:
    """Return a description as something that can be a key; an object that only its type tells of is like no other."""
    if isinstance(meta, TensorMeta) or meta is None:
        return meta
    if isinstance(meta, tuple):
        return tuple(map(meta_key, meta))
    if isinstance(meta, list):
        return ("list", *map(meta_key, meta))
    if isinstance(meta, dict):
        return ("dict", *((key, meta_key(item)) for key, item in meta.items()))
    return object() if isinstance(meta, type) else (type(meta), meta)
