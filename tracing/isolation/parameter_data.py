"""Keep what parameters hold where code reaches past their count of changes, or writes to them in a forward.

The first do `.data` and `.numpy()`, the second an `nn.Embedding` with `max_norm`.

Copies are made when that happens, not before, so that models which do no such thing pay nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat import storage_id
from ...runtime.values import ContextFlag

__all__ = ["ParameterData", "data_of", "storage_of", "trusted"]

_TENSOR: Any = Tensor
_DATA, _NUMPY = _TENSOR.data, _TENSOR.numpy
"""Torch's own, which its base class has."""

_TORCH: Any = torch
_RENORM = _TORCH.embedding_renorm_


class _Kept(NamedTuple):
    """A parameter, the memory that it had, and what was in it."""

    parameter: Tensor
    memory: Tensor
    contents: Tensor

    def is_changed(self) -> bool:
        now = data_of(self.parameter)
        if not _is_same_memory(now, self.memory):
            return True
        return not now.is_meta and not torch.equal(now, self.contents)

    def restore(self) -> None:
        if not _is_same_memory(data_of(self.parameter), self.memory):
            _DATA.__set__(self.parameter, self.memory)
        if self.is_changed():  # an expanded tensor cannot be written to, even if with what it holds
            self.memory.copy_(self.contents)


class ParameterData:
    """Notice when the data of parameters is reached for, and put it back."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = parameters
        self._by_storage: dict[int, list[Tensor]] | None = None
        self._kept: dict[int, _Kept] = {}

    @contextmanager
    def watched(self) -> Generator[None]:
        """Notice what is reached for inside, in any thread."""
        with _changing:
            if not _watching:
                _patch()
            _watching.append(self)
        try:
            yield
        finally:
            with _changing:
                _watching.remove(self)
                if not _watching:
                    _unpatch()

    @contextmanager
    def preserved(self) -> Generator[None]:
        """Put back, on leaving, what is changed inside."""
        try:
            with self.watched():
                yield
        finally:
            self.restore()

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Note what parameters hold now, unless that was noted before."""
        for parameter in parameters:
            if id(parameter) not in self._kept:
                memory = data_of(parameter)
                self._kept[id(parameter)] = _Kept(parameter, memory, memory.clone())

    def keep_memory(self, tensor: Tensor) -> None:
        """Note what the parameters hold that share memory with a tensor."""
        storage = storage_of(tensor)
        if storage is None:
            return
        if self._by_storage is None:
            self._by_storage = {}
            for parameter in self._parameters:
                self._by_storage.setdefault(storage_of(parameter) or 0, []).append(parameter)
        with torch.no_grad():
            self.keep(self._by_storage.get(storage, ()))

    @property
    def reached(self) -> list[Tensor]:
        """Return the parameters whose data was reached for."""
        return [kept.parameter for kept in self._kept.values()]

    def changed(self) -> set[int]:
        """Return the ids of the parameters that hold something else than before."""
        return {key for key, kept in self._kept.items() if kept.is_changed()}

    def restore(self) -> None:
        """Put back what was there."""
        with torch.no_grad():
            for kept in self._kept.values():
                kept.restore()


trusted = ContextFlag("trusted")
"""Code reaches for the data of parameters unnoticed: it only reads them, and copies of all would take long."""

_watching: list[ParameterData] = []
_patched: dict[str, Any] = {}
_changing = threading.Lock()


def _patch() -> None:
    _patched.update({name: vars(Tensor)[name] for name in ("data", "numpy") if name in vars(Tensor)})
    _TENSOR.data = property(_noticed(_DATA.__get__), _noticed(_DATA.__set__))
    _TENSOR.numpy, _TORCH.embedding_renorm_ = _noticed(_NUMPY), _noticed(_RENORM)


def _unpatch() -> None:
    """Put back those of torch's base class, or what somebody else had put there."""
    del _TENSOR.data, _TENSOR.numpy
    _TORCH.embedding_renorm_ = _RENORM
    for name, value in _patched.items():
        setattr(Tensor, name, value)
    _patched.clear()


def _noticed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that first tells those who watch which tensor it is given."""

    def noticed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        for watch in () if trusted else _watching:
            watch.keep_memory(tensor)
        return function(tensor, *args, **kwargs)

    return noticed


def data_of(tensor: Tensor) -> Tensor:
    """Return the data of a tensor without telling those who watch."""
    return _DATA.__get__(tensor)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return storage_of(one) == storage_of(other) and one.storage_offset() == other.storage_offset()


def storage_of(tensor: Tensor) -> int | None:
    """Return what tells a tensor's memory from others', or None for one that has none of its own, as sparse ones."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return None
