"""The module tree of a flat model: made from its description, then filled with tensors."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, own_buffers, own_children, own_parameters
from ..errors import ArchiveError
from ..layers.ensemble import VectorizedMembers
from .held_members import HeldMember
from .nn_modules import build_module

__all__ = ["VECTORIZED", "HeldModule", "HeldTensor", "furnish", "grow", "strides_of"]

VECTORIZED = "fxopt.layers.ensemble.VectorizedMembers"
DEEPEST = 100
_EMPTY = nn.Module()


@dataclass(frozen=True)
class HeldModule:
    """One module of the tree.

    Attributes:
        name: qualified; "" is the model itself.
        same: the name of the module that this one is too, or None.
        kind: the class of a module that is called ("torch.nn.Linear"), or None for one that only holds others.
        settings: what builds it.
        member: what one member computes, where `kind` is that of members under `vmap`.
    """

    name: str
    same: str | None = None
    kind: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    member: HeldMember | None = None


@dataclass(frozen=True)
class HeldTensor:
    """One parameter or buffer.

    Attributes:
        name: qualified.
        same: the name of the tensor that this one is too, or None.
        is_parameter: or else it is a buffer.
        flag: of a parameter, whether it requires a gradient; of a buffer, whether state dicts hold it.
        strides: of one that is not contiguous but dense, as with `torch.channels_last`; None for the others.
    """

    name: str
    same: str | None = None
    is_parameter: bool = True
    flag: bool = True
    strides: tuple[int, ...] | None = None


def grow(root: nn.Module, modules: Iterable[HeldModule]) -> None:
    """Put the modules of a tree into `root`; their tensors are on the meta device.

    Raises:
        ArchiveError: if the description makes no tree.
    """
    homes: dict[str, nn.Module] = {"": root}
    found: dict[str, nn.Module] = {}
    for held in modules:
        if held.name in found:
            raise ArchiveError(f"there are two modules called {held.name!r}")
        if not held.name:
            found[""] = root
            continue
        home, _, last = held.name.rpartition(".")
        if home not in homes or not _is_free(last) or held.name.count(".") > DEEPEST:
            raise ArchiveError(f"there is no place for a module called {held.name!r}")
        module = found[held.name] = _module(held, found)
        setattr(homes[home], last, module)
        if held.same is None and held.kind is None:
            homes[held.name] = module


def _is_free(name: str) -> bool:
    """Say whether a name is neither a module's own attribute nor one of those that fxopt keeps there.

    Python folds the letters of names (`ﬁ` to `fi`), so generated code would read another attribute than that of a name
    with letters to fold.
    """
    reserved = hasattr(_EMPTY, name) or name.startswith("_fxopt_")
    return bool(name) and not reserved and unicodedata.normalize("NFKC", name) == name


def _module(held: HeldModule, found: Mapping[str, nn.Module]) -> nn.Module:
    if held.same is not None:
        if not held.same or held.same not in found:
            raise ArchiveError(f"{held.name!r} is said to be {held.same!r}, which is not there")
        return found[held.same]
    if held.kind is None:
        return nn.Module()
    if held.kind != VECTORIZED:
        return build_module(held.kind, held.settings)
    in_dims, structured = held.settings.get("in_dims"), held.settings.get("structured", False)
    if held.member is None or not isinstance(in_dims, tuple) or not set(cast("tuple[Any, ...]", in_dims)) <= {0, None}:
        raise ArchiveError(f"the members of {held.name!r} are malformed")
    return VectorizedMembers(held.member.module(), cast("tuple[int | None, ...]", in_dims), structured is True)


def furnish(root: nn.Module, held: Iterable[HeldTensor], tensors: Mapping[str, Tensor]) -> None:
    """Put parameters and buffers into a tree.

    Args:
        root: the tree.
        held: where they go.
        tensors: their values, by name.

    Raises:
        ArchiveError: if one is missing, has no place or does not fit.
    """
    placed: dict[str, Tensor] = {}
    for entry in held:
        if entry.name in placed:
            raise ArchiveError(f"there are two tensors called {entry.name!r}")
        tensor = placed[entry.name] = _tensor(entry, placed, tensors)
        home, _, last = entry.name.rpartition(".")
        module = _found(root, home)
        if module is None or not _is_free(last):
            raise ArchiveError(f"there is no place for a tensor called {entry.name!r}")
        _place(module, last, entry, tensor)
    unknown = sorted(tensors.keys() - placed.keys())
    if unknown:
        raise ArchiveError(f"it does not say what the tensor {unknown[0]!r} is")
    for name, module in modules_by_name(root).items():
        for key, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            if tensor is not None and tensor.is_meta and (f"{name}.{key}" if name else key) not in placed:
                raise ArchiveError(f"the tensor {key!r} of {name!r} is missing")


def _tensor(entry: HeldTensor, placed: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
    if entry.same is not None:
        tensor = placed.get(entry.same)
        if tensor is None or isinstance(tensor, nn.Parameter) is not entry.is_parameter:
            raise ArchiveError(f"{entry.name!r} is said to be tied to {entry.same!r}, which is not there")
        return tensor
    if entry.name not in tensors:
        raise ArchiveError(f"the tensor {entry.name!r} is missing")
    tensor = tensors[entry.name]
    if entry.strides is not None:
        tensor = _laid_out(entry, tensor)
    if not entry.is_parameter:
        return tensor
    if entry.flag and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ArchiveError(f"the parameter {entry.name!r} cannot require a gradient: it is of {tensor.dtype}")
    return nn.Parameter(tensor, entry.flag)


def strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor whose elements fill its memory once, in some order; of any other, None."""
    strides = tuple(tensor.stride())
    return strides if _are_dense(tuple(tensor.shape), strides) else None


def _are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return math.prod(shape) > 0 and min(strides, default=1) > 0


def _laid_out(entry: HeldTensor, tensor: Tensor) -> Tensor:
    """Return a tensor with its elements in another order in memory."""
    strides = entry.strides or ()
    if len(strides) != tensor.ndim or not _are_dense(tuple(tensor.shape), strides):
        raise ArchiveError(f"{entry.name!r} cannot have the strides {list(strides)} with shape {list(tensor.shape)}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _found(root: nn.Module, name: str) -> nn.Module | None:
    module: nn.Module | None = root
    for part in name.split(".") if name else ():
        module = own_children(module).get(part) if module is not None else None
    return module


def _place(module: nn.Module, name: str, entry: HeldTensor, tensor: Tensor) -> None:
    registry = cast("dict[str, Tensor | None]", own_parameters(module) if entry.is_parameter else own_buffers(module))
    present = registry.get(name)
    if present is not None and present.shape != tensor.shape:
        raise ArchiveError(f"{entry.name!r} has shape {list(tensor.shape)}, where {list(present.shape)} belongs")
    try:
        if present is not None:
            setattr(module, name, tensor)  # recurrent modules keep a second list, which they update here
        elif entry.is_parameter:
            module.register_parameter(name, cast("nn.Parameter", tensor))
        else:
            module.register_buffer(name, tensor, persistent=entry.flag)
    except (KeyError, TypeError) as error:
        raise ArchiveError(f"there is no place for a tensor called {entry.name!r}: {error}") from error
