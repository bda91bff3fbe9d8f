"""Copies of module trees: like `copy.deepcopy`, three times as fast where modules are plain."""

from __future__ import annotations

import copy
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..compat import all_modules, copies_of_storages, own_buffers, own_parameters, storage_id, transient_buffers
from ..tracing.captured import Captured, capture_of
from ..tracing.names import all_tensors

__all__ = ["Outline", "copied_module", "twin"]

M = TypeVar("M", bound=nn.Module)

_ATOMS: frozenset[type] = frozenset(
    (bool, int, float, str, bytes, type(None), type, types.FunctionType, torch.dtype, torch.device)
)
_type_of: Callable[[object], Any] = type
_DICTIONARIES: frozenset[type] = frozenset((dict, OrderedDict))
_CONTAINERS: frozenset[type] = _DICTIONARIES | {set, list}
_IMMUTABLE: frozenset[type] = frozenset((tuple, torch.Size))


def copied_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return what `copy.deepcopy(module, memo)` would: a module whose class has its own way of copying is asked.

    Tensors that a forward left in attributes or buffers are copied without their history, where `deepcopy` raises.
    """
    return _Copier({} if memo is None else memo).module(module)


class _Unplain(Exception):
    """Something has, or may have, its own way of being copied."""


class _Copier:
    """Copy modules, and what they hold.

    Args:
        memo: id -> copy, as of `copy.deepcopy`.
        folded: takes the copies of modules with their classes, where they are to be folded up; see `Outline`.
        plain: raise `_Unplain` rather than hand what `memo` holds to any code that is not torch's.
    """

    def __init__(
        self, memo: dict[int, Any], folded: list[tuple[Any, type]] | None = None, *, plain: bool = False
    ) -> None:
        self._memo = memo
        self._folded = folded
        self._plain = plain
        self._left_out: Collection[str] = () if folded is None else _REGISTRIES

    def module(self, module: M) -> M:
        known = self._memo.get(id(module))
        if known is not None:
            return known
        cls = type(module)
        if not _copies_plainly(cls):
            return self._deeply(module)
        new: Any = _Folded() if self._folded is not None else object.__new__(cls)
        if self._folded is not None:
            self._folded.append((new, cls))
        self._memo[id(module)] = new
        attributes: dict[str, Any] = new.__dict__
        given: dict[str, Any] = module.__dict__
        for name, value in given.items():
            kind = _type_of(value)
            if kind in _ATOMS:
                attributes[name] = value
            elif kind not in _CONTAINERS:
                attributes[name] = self._value(value)
            elif value:
                attributes[name] = self._filled(value)
            elif name not in self._left_out:  # most entries are empty containers
                attributes[name] = kind()
        return new

    def _value(self, value: Any) -> Any:
        kind = _type_of(value)
        if kind in _ATOMS:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if kind is nn.Parameter:
            return value.__deepcopy__(self._memo)
        if kind in _CONTAINERS:
            return self._filled(value) if value else kind()
        return self._new(value, kind)

    def _new(self, value: Any, kind: Any) -> Any:
        """Copy what was not copied yet, and is neither parameter nor container."""
        if isinstance(value, nn.Module):
            return self.module(value)
        if kind is Tensor:
            return self._tensor(value)
        if kind in _IMMUTABLE and all(type(item) in _ATOMS for item in value):
            return value
        return self._deeply(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not tensor.is_leaf:  # a forward left it behind, with the graph that it came from
            self._memo[id(tensor)] = new = tensor.detach().clone()
            return new
        return _copied_tensor(tensor, self._memo) if _is_plain(tensor, self._memo) else self._deeply(tensor)

    def _filled(self, container: Any) -> Any:
        """Copy a container that is not empty."""
        known = self._memo.get(id(container))
        if known is not None:
            return known
        kind = _type_of(container)
        new: Any = kind()
        if kind is set and not all(type(item) in _ATOMS for item in container):
            return self._deeply(container)
        self._memo[id(container)] = new
        if kind is list:
            new.extend(map(self._value, container))
        elif kind is set:
            new.update(container)
        else:
            for key, item in container.items():
                new[key if type(key) in _ATOMS else self._deeply(key)] = self._value(item)
        return new

    def _deeply(self, value: Any) -> Any:
        if self._plain:
            raise _Unplain
        return copy.deepcopy(value, self._memo)


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
        like_any = cls.__basicsize__ == nn.Module.__basicsize__ and not issubclass(cls, torch.jit.ScriptModule)
        plain = _PLAIN[cls] = like_any and not overridden
    return plain


_PLAIN: dict[type, bool] = {}
_STANDARD = (nn.Module, object)


def twin(module: M) -> M:
    """Return a copy of the module tree as it runs now, on the same parameters and buffers.

    Later rewrites of `module` do not reach the copy; writes into its parameters do.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in all_tensors(all_modules(module))}
    for submodule in module.modules():
        capture = capture_of(submodule)
        if capture is not None:
            memo[id(capture)] = capture
    return copied_module(module, memo)


class _Folded:
    """A module in an outline that nobody has asked for yet."""


class Outline:
    """The structure of a module, with the tensors that a state dict holds on the meta device.

    Half of what a plain module consists of are empty registries of hooks. Hardly any outline is ever asked for its
    modules: they are folded up until it is, without these registries, and with sketches in the place of tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        saved: list[Tensor] = []
        modules = all_modules(module)
        for submodule in modules:
            parameters, buffers = own_parameters(submodule), own_buffers(submodule)
            transient = transient_buffers(submodule) if buffers else ()
            saved += [tensor for tensor in parameters.values() if tensor is not None]
            saved += [tensor for name, tensor in buffers.items() if tensor is not None and name not in transient]
        # What copies itself would be handed sketches for tensors, and for modules what is none yet.
        sketches = {id(tensor): _sketch(tensor) for tensor in saved}
        self._folded: list[tuple[Any, type]] = []
        self._sketches: list[Any] = [*sketches.values()]
        try:
            self._module = _Copier(sketches, self._folded, plain=True).module(module)
        except _Unplain:
            outlines = {id(tensor): _outline(tensor) for tensor in saved}
            self._sketches, self._folded = [], []
            folded = self._folded if all(map(_copies_plainly, map(type, modules))) else None
            self._module = _Copier(outlines, folded).module(module)

    def module(self) -> nn.Module:
        """Return the module; it is to be copied before it is changed."""
        with _UNFOLDING:
            while self._folded:
                module, cls = self._folded.pop()
                module.__class__ = cls
                attributes: dict[str, Any] = module.__dict__
                attributes.update({name: kind() for name, kind in _REGISTRIES.items() if name not in attributes})
            if self._sketches:
                drawn = {id(sketch): _drawn(sketch) for sketch in self._sketches}
                self._module = copied_module(self._module, drawn)
                self._sketches.clear()
        return self._module

    def has(self, path: str) -> bool:
        """Say whether there is a module of that name."""
        found: Any = self._module
        for name in path.split(".") if path else ():
            children: dict[str, Any] = found.__dict__.get("_modules", {})
            found = children.get(name)
            if found is None:
                return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        self.module()
        return self.__dict__


_UNFOLDING = threading.RLock()
_REGISTRIES: Mapping[str, Callable[[], Any]] = {
    name: cast("Any", type(value)) for name, value in vars(nn.Module()).items() if type(value) in _CONTAINERS
}
_META = torch.device("meta")


_Sketch = tuple[torch.Size, tuple[int, ...], torch.dtype, bool, bool]


def _sketch(tensor: Tensor) -> _Sketch | Tensor:
    """Return what is needed to make an outline of a tensor, at a tenth of its cost; of an unusual one its outline."""
    kind = type(tensor)
    if (kind is not nn.Parameter and kind is not Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        return _outline(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, kind is nn.Parameter


def _drawn(sketch: _Sketch | Tensor) -> Tensor:
    if isinstance(sketch, Tensor):
        return sketch
    shape, strides, dtype, requires_grad, is_parameter = sketch
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
    return _outline(nn.Parameter(tensor, requires_grad) if is_parameter else tensor)


def _outline(tensor: Tensor) -> Tensor:
    outline = torch.empty_like(tensor, device=_META, requires_grad=False)
    return nn.Parameter(outline, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else outline
