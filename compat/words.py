"""Words of memory that tell whether tensors, dictionaries and modules are what they were, thousands read in one call.

Asked one by one behind a computation that has emptied the caches, each object costs several misses, one after another;
a gather has many of them under way at a time. Where words lie in objects of torch and Python is found by trying it out
(`layout`), and where that fails, nothing here is used.
"""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tensors import dispatch_modes_off, storage_id, torch_functions_off

__all__ = ["Layout", "Words", "identities", "layout"]

_WORD = 8
_FIRST, _END = 1 << 12, 1 << 56
"""Addresses of memory that processes have."""

_BEFORE, _IN_PYTHON, _IN_TENSOR, _IN_STORAGE, _IN_COUNTER, _IN_DICTIONARY = 4, 8, 23, 8, 3, 6
"""So many words of an object are looked at; before one is what Python manages it by."""


class Words:
    """Notes what memory holds at addresses; who compares sees to it that the memory is still there."""

    __slots__ = ("_held", "_memory", "_places")

    def __init__(self, addresses: Iterable[int], width: int = _WORD) -> None:
        self._memory = _memory(width)
        self._places = (np.unique(np.fromiter(addresses, np.int64)) - _FIRST) // width  # neighbours one after the other
        self._held: bytes = self._memory.take(self._places).tobytes()

    def same(self) -> bool:
        """Say whether all words are what they were."""
        return self._memory.take(self._places).tobytes() == self._held


@cache
def _memory(width: int) -> Any:
    """Return all memory of the process as an array; nothing is read before its places are."""
    kind = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[width]
    memory: Any = (ctypes.c_byte * (_END - _FIRST)).from_address(_FIRST)
    return np.frombuffer(memory, kind)


def identities(values: tuple[object, ...]) -> bytes:
    """Return the identities of objects, none of which is looked at."""
    return ctypes.string_at(id(values) + tuple.__basicsize__, len(values) * _WORD)


@dataclass(frozen=True)
class Layout:
    """In which words of an object, counted from 0, what stands.

    Attributes:
        tensor: in the Python object of a tensor: the address of the tensor in C++.
        storage: in a tensor: the address of its storage.
        counter: in a tensor: the address of what counts writes.
        sizes, strides: in a tensor: the first of those, of as many as `dimensions`; before sizes is how many there are.
        number, offset: in a tensor: how many elements it has, and where in its storage they begin.
        writes: in a counter: how many writes there were.
        data: in a storage: the address of its memory.
        length: in a dictionary: of how many items it is.
        changes: in a dictionary: a number that each change changes; None where there is none.
    """

    tensor: int
    storage: int
    counter: int
    sizes: int
    strides: int
    number: int
    offset: int
    writes: int
    data: int
    length: int
    changes: int | None

    dimensions = 5

    def identity_of(self, tensor: Tensor) -> int:
        """Return the address of what tells which tensor of C++ a Python object stands for."""
        return id(tensor) + self.tensor * _WORD

    def words_of(self, tensor: Tensor) -> list[int] | None:
        """Return the addresses of what tells that a tensor was written to, or has other memory, sizes or strides.

        They are there as long as the tensor in C++ and its storage are. None for tensors of many dimensions.
        """
        if tensor.dim() > self.dimensions:
            return None
        own, dimensions = _address(tensor), range(tensor.dim())
        inside = [self.storage, self.counter, self.number, self.offset, self.sizes - 1]
        inside += [first + each for first in (self.sizes, self.strides) for each in dimensions]
        counter = _read(own, self.counter + 1)[self.counter]
        data = storage_id(tensor) + self.data * _WORD
        return [*(own + each * _WORD for each in inside), counter + self.writes * _WORD, data]

    def change_of(self, dictionary: dict[Any, Any]) -> int:
        """Return the address of the number of changes of a dictionary, where there is one."""
        return id(dictionary) + (self.changes or 0) * _WORD

    def length_of(self, dictionary: dict[Any, Any]) -> int:
        """Return the address of the length of a dictionary."""
        return id(dictionary) + self.length * _WORD

    def type_of(self, value: object) -> int:
        """Return the address of what tells the class of an object."""
        return id(value) + _WORD

    def attributes_of(self, value: object) -> int | None:
        """Return the address of what tells which dictionary has an object's attributes; None where it is not found."""
        start = id(value) - _BEFORE * _WORD
        found = _read(start, _BEFORE + _IN_PYTHON)
        wanted = id(vars(value))
        return start + found.index(wanted) * _WORD if wanted in found else None


def _address(tensor: Tensor) -> int:
    return tensor._cdata


def _read(address: int, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_uint64 * count).from_address(address))


@cache
def layout() -> Layout | None:
    """Return where words lie in this version of torch and Python; None where that cannot be told."""
    if sys.maxsize < _END or sys.implementation.name != "cpython":
        return None
    with torch.inference_mode(False), torch.no_grad(), torch_functions_off(), dispatch_modes_off():
        try:
            return _found()
        except LookupError:
            return None


def _found() -> Layout:
    """Return the layout of objects made for that; raise a LookupError where a place is none or several."""
    memory = torch.frombuffer(bytearray(4 * 4096), dtype=torch.float32)
    sizes, strides, start = (3, 11, 7), (1501, 23, 2), 13
    given = memory.as_strided(sizes, strides, start)
    own, shared, apart = (_read(_address(each), _IN_TENSOR) for each in (given, given.detach(), given.data))
    counter = _only(i for i in range(2, _IN_TENSOR) if own[i] == shared[i] != apart[i])
    return Layout(
        tensor=_place((_address(given),), _read(id(given), _IN_PYTHON)),
        storage=_place((storage_id(given),), own),
        counter=counter,
        sizes=_place((len(sizes), *sizes), own) + 1,
        strides=_place(strides, own),
        number=_place((given.numel(),), own),
        offset=_place((start,), own),
        writes=_changing(lambda: _read(own[counter], _IN_COUNTER), lambda: given.add_(1)),
        data=_place((given.untyped_storage().data_ptr(),), _read(storage_id(given), _IN_STORAGE)),
        length=_length(),
        changes=_changes(),
    )


def _only(places: Iterable[int]) -> int:
    found = list(places)
    if len(found) != 1:
        raise LookupError
    return found[0]


def _place(wanted: Sequence[int], words: Sequence[int]) -> int:
    count = len(wanted)
    return _only(i for i in range(len(words)) if tuple(words[i : i + count]) == tuple(wanted))


def _changing(read: Callable[[], Sequence[int]], change: Callable[[], object]) -> int:
    """Return the one place that each change changes."""
    places, before = set(range(len(read()))), read()
    for _ in range(4):
        change()
        after = read()
        places &= {i for i in places if after[i] != before[i]}
        before = after
    return _only(places)


def _length() -> int:
    values = dict.fromkeys(range(1237))
    return _place((len(values),), _read(id(values), _IN_DICTIONARY))


class _Holder:
    """Has attributes."""


def _changes() -> int | None:
    """Return the place of the number of changes in dictionaries of all kinds that modules have."""
    holder = _Holder()
    holder.kept = 0  # pyright: ignore[reportAttributeAccessIssue]
    attributes = vars(holder)

    def set_often() -> None:
        for number in range(20):  # so that Python takes its fast way
            before = read(attributes)
            holder.kept = number  # pyright: ignore[reportAttributeAccessIssue]
            if read(attributes) == before:
                raise LookupError

    def read(dictionary: dict[Any, Any]) -> tuple[int, ...]:
        return _read(id(dictionary), _IN_DICTIONARY)

    def exchanged(dictionary: dict[Any, Any]) -> Callable[[], None]:
        values = [object(), object()]

        def exchange() -> None:
            values.reverse()
            dictionary["kept"] = values[0]

        exchange()
        return exchange

    kinds: list[dict[Any, Any]] = [{}, OrderedDict(), attributes]
    try:
        found = {_changing(lambda each=each: read(each), exchanged(each)) for each in kinds}
        found.add(_changing(lambda: read(attributes), set_often))
        return _only(found)
    except LookupError:
        return None
