"""What is made of tensors, kept as long as these are the same, unchanged: the one cache behind all that is derived."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..compat import storage_id, version_of
from ..compat.tensors import COMPARED, SAME_MEMORY, SAME_VERSION, holders_of

__all__ = ["Cache", "Unchanged", "is_dense", "sample_of", "why_not_plain", "why_unseen"]


class Unchanged:
    """Notes how tensors are, in the order of the calls of `same`; None stays None.

    Changed is another object, a write in place, other memory, size or strides, or, on a CPU, other numbers at a few
    places (`sample_of`), which shows most writes that torch does not count (`.data`, numpy, fused optimizers).
    Inference tensors are compared in full where `whole`. `torch.utils.swap_tensors` forbids weak references; the memory
    is held.
    """

    __slots__ = ("_memory", "holds_floats", "same")

    def __init__(self, tensors: Sequence[Tensor | None], *, whole: bool = False) -> None:
        given = [each for each in tensors if each is not None]
        aliases = {id(tensor): tensor.detach() for tensor in given}  # as they are now, whatever other threads set
        self._memory = [_held(aliases[id(tensor)]) for tensor in given]
        self.holds_floats = any(tensor.is_floating_point() for tensor in given)
        kinds = tuple("none" if each is None else _kind(each, whole) for each in tensors)
        are_many = len(tensors) >= _MANY and set(kinds) == {"counted"}
        check = _check_of_many(given, [aliases[id(tensor)] for tensor in given]) if are_many else None
        if check is None:
            noted = [value for tensor in given for value in _noted(tensor, aliases[id(tensor)], whole)]
            check = _check_of(kinds)(*noted)
        self.same: Callable[..., bool] = check

    @property
    def first_is_gone(self) -> bool:
        """Say whether only notes hold the memory of the first tensor: it is gone, or has other memory."""
        return bool(self._memory) and self._memory[0].is_gone


class _Memory:
    """Holds the memory of a tensor, once for all notes of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, alias: Tensor) -> None:
        self.tensor = alias

    @property
    def is_gone(self) -> bool:
        """Say whether nobody else holds it."""
        return holders_of(self.tensor) <= 1


_MEMORIES = WeakValueDictionary[int, _Memory]()
"""By what tells memory from others'. Where two threads add the same at once, it is held longer."""


def _held(alias: Tensor) -> _Memory:
    memory = _Memory(alias)
    return _MEMORIES.setdefault(storage_id(memory.tensor), memory)


def why_not_plain(tensor: Tensor) -> str:
    """Return by what a tensor is another than operations in graphs take it for, or ""."""
    kind = type(tensor)
    if kind not in (Tensor, nn.Parameter):
        return f"is no plain tensor, but a {kind.__name__} of {kind.__module__.partition('.')[0]}"
    return "" if tensor.layout is torch.strided else f"is no plain tensor, but one of layout {tensor.layout}"


def why_unseen(tensor: Tensor) -> str:
    """Return why changes of a tensor may go unseen, or ""."""
    if reason := why_not_plain(tensor):
        return reason
    return "was made in inference_mode, where torch does not count writes into it" if tensor.is_inference() else ""


_NOTED = ("name", "version", "place", "number", "strides", "view", "sample", "copy")


def _noted(tensor: Tensor, alias: Tensor, whole: bool) -> tuple[Any, ...]:
    """Return what is compared at each call, in the order of `_NOTED`."""
    version = None if tensor.is_inference() else version_of(alias)
    sample = sample_of(alias) if type(tensor) in (Tensor, nn.Parameter) else (None, None)
    copy = tensor.clone() if whole and tensor.is_inference() else None
    return id(tensor), version, alias.data_ptr(), alias.numel(), alias.stride(), *sample, copy


def _kind(tensor: Tensor, whole: bool) -> str:
    return "counted" if not tensor.is_inference() else "whole" if whole else "inference"


_SAMPLE = f"id(x{{i}}) == name{{i}} and {SAME_MEMORY} and view{{i}} == sample{{i}}"
"""The view comes last: it may be read only where the tensor still has that memory."""
_CHECKS = {
    "none": "x{i} is None",
    "counted": f"id(x{{i}}) == name{{i}} and {SAME_VERSION} and {SAME_MEMORY} and view{{i}} == sample{{i}}",
    "inference": _SAMPLE,
    "whole": f"{_SAMPLE} and equal(x{{i}}, copy{{i}})",
}


@cache
def _check_of(kinds: tuple[str, ...]) -> Callable[..., Callable[..., bool]]:
    """Return what makes a check of so many tensors, as straight-line code: loops take three times as long."""
    noted = [f"{what}{i}" for i, kind in enumerate(kinds) if kind != "none" for what in _NOTED]
    text = f"""
def check_of({", ".join(noted)}):
    def same({", ".join(f"x{i}" for i in range(len(kinds)))}):
        try:
            return {" and ".join(_CHECKS[kind].format(i=i) for i, kind in enumerate(kinds)) or True}
        except (AttributeError, RuntimeError):  # None, or the first is gone, and what has its identity has no memory
            return False
    return same
"""
    names: dict[str, Any] = {"equal": torch.equal}
    exec(text, names)  # noqa: S102  made of numbers and names of this file
    return names["check_of"]


_MANY = 24
"""So many tensors are compared a property at a time; that takes a third of the time of code for each."""


def _check_of_many(tensors: Sequence[Tensor], aliases: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a check of tensors that are all counted; None where samples of some are no words of memory."""
    if not all(type(each) in (Tensor, nn.Parameter) for each in tensors) or (words := _sampled_words(aliases)) is None:
        return None
    held = words()
    names, noted = [*map(id, tensors)], [[*map(read, aliases)] for read in COMPARED]

    def same(*given: Any) -> bool:
        if [*map(id, given)] != names:
            return False
        try:
            are_same = all([*map(read, given)] == then for read, then in zip(COMPARED, noted, strict=True))
        except (AttributeError, RuntimeError, TypeError):  # one is gone, and what has its identity has no memory
            return False
        return are_same and words() == held

    return same


_COUNT = 16
_WORD = 4
_INTEGERS: Mapping[int, Literal["b", "h", "i", "q"]] = {1: "b", 2: "h", 4: "i", 8: "q"}
"""Formats of `memoryview`, by the width of an element: NaN equals itself there."""


def sample_of(tensor: Tensor) -> tuple[memoryview | None, memoryview | None]:
    """Return a view of a few elements of a tensor, spread over its rows and columns, and what they hold; None off CPU.
    The view holds with this memory, size and strides; it goes by the address, since torch cannot resize memory that
    numpy was given, as FSDP does.
    """
    width = tensor.dtype.itemsize
    letter, place = _INTEGERS.get(width), tensor.data_ptr()
    if not tensor.is_cpu or not tensor.numel() or not place or letter is None or tensor.is_conj() or tensor.is_neg():
        return None, None
    count, step = _walk(tensor)
    memory = (ctypes.c_byte * (width * ((count - 1) * step + 1))).from_address(place)
    elements = memoryview(memory).cast("B").cast(letter)[:: max(step, 1)]
    return elements, memoryview(elements.tobytes()).cast(letter)


def _sampled_words(tensors: Sequence[Tensor]) -> Callable[[], bytes] | None:
    """Return what reads the same elements of many tensors at once, as long as these have their memory.

    Returns:
        what reads; None where some tensor has no sample, or has elements of less than a word of 4 bytes.
    """
    if any(sample_of(each)[0] is None or each.dtype.itemsize % _WORD or each.data_ptr() % _WORD for each in tensors):
        return None
    places = np.concatenate([_words_of(each) for each in tensors])
    first = int(places.min())
    memory = (ctypes.c_uint32 * (int(places.max()) - first + 1)).from_address(first * _WORD)
    words, places = np.frombuffer(memoryview(memory), np.uint32), places - first

    def read() -> bytes:
        return words.take(places).tobytes()

    return read


def _words_of(tensor: Tensor) -> NDArray[np.intp]:
    """Return which words of the process's memory the elements of a sample are."""
    (count, step), width = _walk(tensor), tensor.dtype.itemsize // _WORD
    each = np.arange(count, dtype=np.intp)[:, None] * (step * width) + np.arange(width, dtype=np.intp)
    return each.ravel() + tensor.data_ptr() // _WORD


def _walk(tensor: Tensor) -> tuple[int, int]:
    """Return how many elements are read, and how far one lies behind the other in memory."""
    number, lengths = tensor.numel(), [length for length in tensor.shape if length > 1]
    if number <= _COUNT and is_dense(tensor):
        return number, 1
    if is_dense(tensor):
        step = (number - 1) // (_COUNT - 1)
        while math.gcd(step, number) > 1:  # each lies in another row and in another column
            step -= 1
        return _COUNT, step
    count = min(_COUNT, *lengths)  # along the diagonal
    steps = ((length - 1) // (count - 1) for length in tensor.shape)
    return count, sum(step * stride for step, stride in zip(steps, tensor.stride(), strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Say whether the elements fill their memory, in whatever order of the dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


class Cache:
    """Keep what functions make of tensors as long as these are `Unchanged`; several threads may call it.
    It is in no state dict, copy or pickle. Who has one forgets after a backward, and where the mode is set: not all
    writes of fused optimizers are seen.
    """

    compares_whole: ClassVar[bool] = False
    """Compare tensors of inference mode, whose writes torch does not count, in full."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Any, ...]] = {}
        """By key: the tensors as they were, and what was made of them."""

    def of(
        self, make: Callable[..., Any], *tensors: Tensor | None, key: Hashable = None, most: int | None = None
    ) -> Any:
        """Return `make(*tensors)`, or what it made of the same tensors before: for a key always of so many.
        Of more than `most` keys the first goes.
        """
        kept = self._kept.get(key)
        if kept is not None and kept[0].same(*tensors):
            return kept[1]
        noted = Unchanged(tensors, whole=self.compares_whole)  # what a thread writes meanwhile is seen next time
        made = make(*tensors)
        if most is not None and kept is None:
            for other in list(self._kept)[: max(0, len(self._kept) - most + 1)]:
                self.forget(other)
        self._keep(key, noted, tensors, made)
        return made

    def _keep(self, key: Hashable, noted: Unchanged, tensors: Sequence[Tensor | None], made: Any) -> None:
        self._kept[key] = noted, made  # at once: another thread sees the old pair or the new one

    def kept(self) -> list[Any]:
        """Return everything that was made and is kept."""
        return [made for _, made in tuple(self._kept.values())]

    def last(self, key: Hashable = None) -> Any:
        """Return what was made last; None if nothing is kept."""
        kept = self._kept.get(key)
        return None if kept is None else kept[1]

    def forget(self, key: Hashable = None) -> None:
        """Let something be made anew: what it is made of may have been written to unseen."""
        self._kept.pop(key, None)

    def forget_all(self) -> None:
        """Let everything be made anew."""
        self._kept.clear()

    def forget_gone(self) -> None:
        """Let go of what was made of tensors that nobody holds any more."""
        for key, (noted, *_) in tuple(self._kept.items()):
            if noted.first_is_gone:
                self.forget(key)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)  # what is kept follows from the tensors beside it

    def __hash__(self) -> int:
        return hash(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
