"""Copies of module trees: like `copy.deepcopy`, three times as fast where modules are plain."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..compat import copies_of_storages, own_buffers, own_parameters, storage_id, transient_buffers
from ..tracing.captured import Captured, capture_of
from ..tracing.names import all_modules

__all__ = ["copied_module", "skeleton", "twin"]

M = TypeVar("M", bound=nn.Module)

_ATOMS: frozenset[type] = frozenset(
    (bool, int, float, str, bytes, type(None), type, types.FunctionType, torch.dtype, torch.device)
)
_DICTIONARIES: frozenset[type] = frozenset((dict, OrderedDict))
_CONTAINERS: frozenset[type] = _DICTIONARIES | {set, list}


def copied_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return what `copy.deepcopy(module, memo)` would: a module whose class has its own way of copying is asked."""
    memo = {} if memo is None else memo
    known = memo.get(id(module))
    if known is not None:
        return known
    if not _copies_plainly(type(module)):
        return copy.deepcopy(module, memo)
    new = object.__new__(type(module))
    memo[id(module)] = new
    attributes = new.__dict__
    given: dict[str, object] = module.__dict__
    for name, value in given.items():
        kind = type(value)
        if kind in _ATOMS:
            attributes[name] = value
        elif kind in _CONTAINERS and not value:  # as most entries are
            attributes[name] = kind()
        else:
            attributes[name] = _copied_value(value, memo)
    return new


def _copied_value(value: Any, memo: dict[int, Any]) -> Any:
    kind = cast("type[Any]", type(value))
    if kind in _ATOMS:
        return value
    if kind in _CONTAINERS and not value:
        return kind()
    if kind is nn.Parameter:
        return value.__deepcopy__(memo)
    if isinstance(value, nn.Module):
        return copied_module(value, memo)
    if kind in _DICTIONARIES and id(value) not in memo:
        new: dict[Any, Any] = kind()
        memo[id(value)] = new
        for key, item in value.items():
            new[key if type(key) in _ATOMS else copy.deepcopy(key, memo)] = _copied_value(item, memo)
        return new
    if kind is Tensor and id(value) not in memo and _is_plain(value, memo):
        return _copied_tensor(value, memo)
    return copy.deepcopy(value, memo)


def _is_plain(tensor: Tensor, memo: dict[int, Any]) -> bool:
    """Say whether copying a tensor means copying its numbers, for it has its memory for itself, as far as is known."""
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.__dict__ or not tensor.is_contiguous():
        return False
    return tensor.untyped_storage().nbytes() == tensor.nbytes and storage_id(tensor) not in copies_of_storages(memo)


def _copied_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a plain tensor in less time than torch; others on the same memory will share the copy."""
    memo[id(tensor)] = new = tensor.detach().clone()
    copies_of_storages(memo)[storage_id(tensor)] = new.untyped_storage()
    return new


def _copies_plainly(cls: type[nn.Module]) -> bool:
    """Say whether copying an instance means copying its `__dict__`, and nothing else."""
    plain = _PLAIN.get(cls)
    if plain is None:
        own = cls.__bases__[-1] if issubclass(cls, Captured) else cls
        names = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__new__", "__slots__")
        overridden = [name for k in own.__mro__ if k not in _STANDARD for name in names if name in vars(k)]
        plain = _PLAIN[cls] = not overridden and not issubclass(cls, torch.jit.ScriptModule)
    return plain


_PLAIN: dict[type, bool] = {}
_STANDARD = (nn.Module, object)


def twin(module: M) -> M:
    """Return a copy of the module tree as it runs now, on the same parameters and buffers.

    Later rewrites of `module` do not reach the copy; writes into its parameters do.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for submodule in module.modules():
        capture = capture_of(submodule)
        if capture is not None:
            memo[id(capture)] = capture
    return copied_module(module, memo)


def skeleton(module: M) -> M:
    """Return the module's structure, with the tensors that a state dict holds on the meta device."""
    memo: dict[int, Any] = {}
    for submodule in all_modules(module):
        transient = transient_buffers(submodule)
        kept = [tensor for name, tensor in own_buffers(submodule).items() if name not in transient]
        for tensor in (*own_parameters(submodule).values(), *kept):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _outline(tensor)
    return copied_module(module, memo)


_META = torch.device("meta")


def _outline(tensor: Tensor) -> Tensor:
    outline = torch.empty_like(tensor, device=_META, requires_grad=False)
    return nn.Parameter(outline, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else outline
