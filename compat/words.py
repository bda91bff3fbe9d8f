"""Words of memory that tell whether tensors, dictionaries and modules are what they were, thousands read in one call.

Asked one by one behind a computation that has emptied the caches, each object costs several misses, one after another;
a gather has many of them under way at a time. Where words lie in objects of torch and Python is found by trying it out
(`layout`), and where that fails, nothing here is used.
"""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import eq, getitem
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .tensors import dispatch_modes_off, storage_id, torch_functions_off

__all__ = ["Layout", "TensorWords", "Words", "found_layout", "identities", "layout"]

_WORD = 8
_FIRST, _END = 1 << 12, 1 << 56
"""Addresses of memory that processes have."""

_IN_TENSOR, _IN_STORAGE, _IN_COUNTER, _IN_DICTIONARY = 23, 8, 3, 6
"""So many words of an object are looked at."""

_AT_ONCE = 400
"""Of more than 500 words numpy lets other threads in while it gathers."""


class Words:
    """Notes what memory holds at addresses; who compares sees to it that the memory is still there.

    No other thread of Python comes in while words are compared, and what `then` adds is read only if all before is the
    same: so an address may lie in what an object of Python owns if the words before say that it still owns that.
    """

    __slots__ = ("_held", "_memories", "_places")

    def __init__(self, words: Iterable[int] | Mapping[int, int], width: int = _WORD) -> None:
        """Note what is at addresses, or, where there is a mapping, what ought to be there."""
        addresses, first = np.unique(np.fromiter(words, np.int64), return_index=True)  # neighbours one after the other
        places, memory = _in_parts((addresses - _FIRST) // width), _memory(width)
        self._memories, self._places = [memory] * len(places), places
        if isinstance(words, Mapping):
            parts = _in_parts(np.fromiter(cast("Mapping[int, int]", words).values(), np.uint64)[first])
        else:
            parts = [memory[part] for part in places]
        self._held: list[bytes] = [part.tobytes() for part in parts]

    def then(self, other: Words) -> Words:
        """Return these words and others, which are read only where these are what they were."""
        both = object.__new__(Words)
        both._memories, both._places = self._memories + other._memories, self._places + other._places
        both._held = self._held + other._held
        return both

    def same(self) -> bool:
        """Say whether all words are what they were."""
        # Each step is in C, and makes nothing that could start a collection: so no other thread runs in between.
        return all(map(eq, map(_bytes_of, map(getitem, self._memories, self._places)), self._held))

    def equal(self, other: Words) -> bool:
        """Say whether others were noted at the same addresses, and hold the same."""
        return self._held == other._held and all(map(np.array_equal, self._places, other._places))


_bytes_of = np.ndarray[Any, Any].tobytes


def _in_parts(values: Any) -> list[Any]:
    return [values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE)]


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
class TensorWords:
    """The address of a tensor in C++, and by their addresses the words that tell of changes inside of it."""

    tensor: int
    inside: Mapping[int, int]


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

    def words_of(self, tensor: Tensor, alias: Tensor) -> TensorWords | None:
        """Return the words that tell that a tensor was written to, or has other memory, sizes or strides.

        What they hold is read from an alias made by `detach`, which no other thread can change. Memory is there as
        long as the tensor in C++ and its storage are. None for tensors of many dimensions.
        """
        if alias.dim() > self.dimensions:
            return None
        dimensions = range(alias.dim())
        inside = [self.storage, self.counter, self.number, self.offset, self.sizes - 1]
        inside += [first + each for first in (self.sizes, self.strides) for each in dimensions]
        own, held = _address(tensor), _read(_address(alias), _IN_TENSOR)
        writes = held[self.counter] + self.writes * _WORD
        held_inside = {own + each * _WORD: held[each] for each in inside}
        data = held[self.storage] + self.data * _WORD
        return TensorWords(own, {**held_inside, writes: _read(writes, 1)[0], data: alias.untyped_storage().data_ptr()})

    def change_of(self, dictionary: dict[Any, Any]) -> int:
        """Return the address of the number of changes of a dictionary, where there is one."""
        return id(dictionary) + (self.changes or 0) * _WORD

    def length_of(self, dictionary: dict[Any, Any]) -> int:
        """Return the address of the length of a dictionary."""
        return id(dictionary) + self.length * _WORD

    def type_of(self, value: object) -> int:
        """Return the address of what tells the class of an object."""
        return id(value) + _TYPE

    def attributes_of(self, value: object) -> int | None:
        """Return the address of what tells which dictionary has an object's attributes; None where it is not found."""
        found = _dictionary_pointer()(value)
        return found if found and _read(found, 1)[0] == id(vars(value)) else None


_TYPE = object.__basicsize__ - _WORD


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor in C++ that an object stands for now."""
    return tensor._cdata


@cache
def _dictionary_pointer() -> Callable[[object], int | None]:
    """Return what tells where an object has the address of its attributes."""
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)
    return kind(("_PyObject_GetDictPtr", ctypes.pythonapi))


def _read(address: int, count: int) -> tuple[int, ...]:
    return tuple((ctypes.c_uint64 * count).from_address(address))


_ENABLED = False
"""A process crashed, once in two runs, in which a thread swapped, set and freed tensors while another compared them."""


def layout() -> Layout | None:
    """Return where words lie; None where they are not to be read, or that cannot be told."""
    return found_layout() if _ENABLED else None


@cache
def found_layout() -> Layout | None:
    """Return where words lie in this version of torch and Python; None where that cannot be told."""
    if sys.maxsize < _END or sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", _yes)():
        return None
    with torch.inference_mode(False), torch.no_grad(), torch_functions_off(), dispatch_modes_off():
        try:
            return _found()
        except (AttributeError, LookupError):
            return None


def _yes() -> bool:
    return True


def _found() -> Layout:
    """Return the layout of objects made for that; raise a LookupError where a place is none or several."""
    holder = _Holder()
    if _read(id(holder) + _TYPE, 1) != (id(_Holder),) or not _dictionary_pointer()(holder):
        raise LookupError
    memory = [torch.frombuffer(bytearray(4 * 4096), dtype=torch.float32) for _ in range(_TRIES)]
    sizes, strides, start = (3, 11, 7), (1501, 23, 2), 13
    made = [each.as_strided(sizes, strides, start + number) for number, each in enumerate(memory)]
    given, counter = made[0], _counter(made)
    own = _read(_address(given), _IN_TENSOR)
    return Layout(
        tensor=_place([((_address(each),), _read(id(each), Tensor.__basicsize__ // _WORD)) for each in made]),
        storage=_place([((storage_id(each),), _read(_address(each), _IN_TENSOR)) for each in made]),
        counter=counter,
        sizes=_place([((len(sizes), *sizes), own)]) + 1,
        strides=_place([(strides, own)]),
        number=_place([((each.numel(),), _read(_address(each), _IN_TENSOR)) for each in made]),
        offset=_place([((int(each.storage_offset()),), _read(_address(each), _IN_TENSOR)) for each in made]),
        writes=_changing(lambda: _read(own[counter], _IN_COUNTER), lambda: given.add_(1)),
        data=_place([((given.untyped_storage().data_ptr(),), _read(storage_id(given), _IN_STORAGE))]),
        length=_length(),
        changes=_changes(),
    )


_TRIES = 6
"""Of so many tensors a place must be the same: in each there are words that nobody has set, equal by chance."""


def _counter(tensors: Sequence[Tensor]) -> int:
    """Return the place of the word that an alias shares, and neither other tensors nor what counts its own writes."""
    places = set(range(2, _IN_TENSOR))
    groups = [[_read(_address(each), _IN_TENSOR) for each in (x, x.detach(), x.data)] for x in tensors]
    for own, shared, apart in groups:
        places &= {i for i in places if own[i] == shared[i] != apart[i]}
    return _only(i for i in places if len({own[i] for own, *_ in groups}) == len(tensors))


def _only(places: Iterable[int]) -> int:
    found = list(places)
    if len(found) != 1:
        raise LookupError
    return found[0]


def _place(seen: Iterable[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Return the one place where what is wanted stands in the words of each object."""
    places = [_places(tuple(wanted), words) for wanted, words in seen]
    return _only(places[0].intersection(*places[1:]))


def _places(wanted: tuple[int, ...], words: Sequence[int]) -> set[int]:
    return {i for i in range(len(words)) if tuple(words[i : i + len(wanted)]) == wanted}


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
    return _place([((len(values),), _read(id(values), _IN_DICTIONARY))])


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
