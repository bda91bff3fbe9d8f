"""What one rewrite does to names and tensors: the steps that a state map is made of."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from ...errors import StateError
from .pieces import Piece

__all__ = [
    "Concatenate", "ConcatenateOfSome", "Deal", "Mask", "Rename", "Select", "Stack", "StackOfSome", "StateStep",
    "merge", "packed", "unpacked",
]  # fmt: skip


class StateStep(ABC):
    """Turn tensors with old names into tensors with new names, and back, exactly.

    A step that only moves values takes weights, buffers, gradients and moments alike. Subclasses are frozen dataclasses
    of strings, numbers and tuples; the fields that hold names are called `old`, `olds` and `new`. A step of another
    package is registered under its kind in the entry-point group `fxopt.state_steps`. A step may keep a name: `is_old`
    and `is_new` tell by shapes whether tensors have been through it.

    Attributes:
        kind: the step's name in JSON.
        lossy: whether `backward` cannot give back all that was there; where it could not, it gives zeros.
        idempotent: whether `forward` leaves what has been through it as it is: tensors from before and after need not
            be told apart, and zeros in state dicts are no surprise.
        is_compact: whether the new tensors take less room, and give back all that is saved: archives hold the new ones.
        keeps_gradients: whether the new tensors are trained where the old ones were.
        by_data: whether the new tensors were made of data, too: `forward` gives others, unless it is given what
            `backward` made of these.
        fills_gradients: whether old tensors that a call leaves alone, without a gradient, get zeros for one.
    """

    kind: ClassVar[str]
    lossy: ClassVar[bool] = False
    idempotent: ClassVar[bool] = False
    is_compact: ClassVar[bool] = False
    keeps_gradients: ClassVar[bool] = True
    by_data: ClassVar[bool] = False
    fills_gradients: ClassVar[bool] = False

    @property
    @abstractmethod
    def sources(self) -> tuple[str, ...]:
        """Return the names that the step takes away."""

    @property
    @abstractmethod
    def targets(self) -> tuple[str, ...]:
        """Return the names that the step puts in their place."""

    @abstractmethod
    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the targets' tensors for the sources', differentiable where gradients are on."""

    @abstractmethod
    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sources' tensors for the targets', as views where possible."""

    def is_old(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether the sources' tensors have the shapes from before the step; asked where it keeps a name."""
        return True

    def is_new(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether the targets' tensors have the shapes from after the step; asked where it keeps a name."""
        return True

    def parts(self, piece: Piece) -> Sequence[Piece] | None:
        """Return the parts of the sources that make up a part of a target; None where the step needs the whole."""
        return None

    @property
    def keeps_names(self) -> bool:
        """Say whether a tensor is called the same before and after."""
        return not set(self.sources).isdisjoint(self.targets)

    def renamed(self, rename: Callable[[str], str]) -> StateStep:
        """Return the same step on other names."""
        changes: dict[str, Any] = {}
        for field in ("old", "olds", "new"):
            value = cast("str | tuple[str, ...] | None", getattr(self, field, None))
            if value is not None:
                changes[field] = rename(value) if isinstance(value, str) else tuple(map(rename, value))
        return dataclasses.replace(cast("Any", self), **changes)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = dataclasses.asdict(cast("Any", self))
        lists = {name: list(cast("tuple[Any, ...]", v)) for name, v in fields.items() if isinstance(v, tuple)}
        return {"kind": self.kind} | fields | lists | self._class_path()

    def _class_path(self) -> dict[str, str]:
        cls = type(self)
        return {} if cls.__module__ == __name__ else {"class": f"{cls.__module__}:{cls.__qualname__}"}

    def __str__(self) -> str:
        return f"{self.kind} {_summary(self.sources)} -> {_summary(self.targets)}"


@dataclass(frozen=True)
class _OfOne(StateStep):
    old: str
    new: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.old,)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.new,)


@dataclass(frozen=True)
class _OfMany(StateStep):
    olds: tuple[str, ...]
    new: str

    @property
    def sources(self) -> tuple[str, ...]:
        return self.olds

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.new,)


@dataclass(frozen=True)
class Rename(_OfOne):
    """The tensor `old` is called `new`."""

    kind: ClassVar[str] = "rename"

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def parts(self, piece: Piece) -> Sequence[Piece] | None:
        return [dataclasses.replace(piece, name=self.old)]


@dataclass(frozen=True)
class Stack(_OfMany):
    """The tensors `olds`, all of one shape [...], are the slices of `new`: [N, ...]."""

    kind: ClassVar[str] = "stack"

    def __post_init__(self) -> None:
        _check_distinct(self)

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        _check_alike(self, tensors)
        return (torch.stack(list(tensors)),)

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (stacked,) = tensors
        if stacked.ndim == 0 or stacked.shape[0] != len(self.olds):
            raise StateError(f"'{self.new}' has shape {list(stacked.shape)}; it stacks {len(self.olds)} tensors")
        # Slices of a tensor that lies otherwise in memory have gaps, which checkpoint writers refuse.
        return [tensor.contiguous() for tensor in stacked.detach().unbind(0)]

    def parts(self, piece: Piece) -> Sequence[Piece] | None:
        return piece.members(self.olds)


@dataclass(frozen=True)
class StackOfSome(Stack):
    """The same of tensors of which a call may use some only (experts): the others get zeros for a gradient."""

    kind: ClassVar[str] = "stack_of_some"
    fills_gradients: ClassVar[bool] = True


@dataclass(frozen=True)
class Concatenate(_OfMany):
    """The tensors `olds` lie behind one another in `new` along `dim`, where they are `sizes` long."""

    dim: int
    sizes: tuple[int, ...]

    kind: ClassVar[str] = "concatenate"

    def __post_init__(self) -> None:
        _check_distinct(self)
        if len(self.sizes) != len(self.olds):
            raise StateError(f"'{self.new}' concatenates {len(self.olds)} tensors of {len(self.sizes)} sizes")

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        for name, size, tensor in zip(self.olds, self.sizes, tensors, strict=True):
            if not -tensor.ndim <= self.dim < tensor.ndim or tensor.shape[self.dim] != size:
                raise StateError(f"'{name}' has shape {list(tensor.shape)}; dimension {self.dim} must be {size} long")
        _check_alike(self, tensors, except_dim=self.dim)
        return (torch.cat(list(tensors), self.dim),)

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (whole,) = tensors
        if not -whole.ndim <= self.dim < whole.ndim or whole.shape[self.dim] != sum(self.sizes):
            expected = f"dimension {self.dim} must be {sum(self.sizes)} long"
            raise StateError(f"'{self.new}' has shape {list(whole.shape)}; {expected}")
        return torch.split(whole.detach(), list(self.sizes), self.dim)

    def parts(self, piece: Piece) -> Sequence[Piece] | None:
        return piece.neighbours(self.olds, self.sizes, self.dim % piece.memory.ndim)


@dataclass(frozen=True)
class ConcatenateOfSome(Concatenate):
    """The same of tensors of which a call may use some only (experts): the others get zeros for a gradient."""

    kind: ClassVar[str] = "concatenate_of_some"
    fills_gradients: ClassVar[bool] = True


def merge(olds: Sequence[str], new: str, example: Tensor, *, some: bool = False) -> StateStep:
    """Return the step by which equal parameters become one: vectors lie behind one another, others are stacked.
    So what an optimizer decides by the number of dimensions stays decided. `some`: a call may use some of them only.
    """
    if example.ndim != 1:
        return StackOfSome(tuple(olds), new) if some else Stack(tuple(olds), new)
    sizes = (example.shape[0],) * len(olds)
    return ConcatenateOfSome(tuple(olds), new, 0, sizes) if some else Concatenate(tuple(olds), new, 0, sizes)


@dataclass(frozen=True)
class Deal(_OfOne):
    """The tensor `old` is several parts, of these `sizes` along `dim`, each in as many `shares`; in `new` the first
    shares of all parts come first, then the second ones.
    """

    dim: int
    sizes: tuple[int, ...]
    shares: int

    kind: ClassVar[str] = "deal"

    def __post_init__(self) -> None:
        if self.shares < 1 or any(size % self.shares for size in self.sizes):
            raise StateError(f"'{self.old}' has parts of {self.sizes}; they do not divide by {self.shares}")

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (whole,) = tensors
        self._check(self.old, whole)
        return (torch.cat([whole.narrow(self.dim, start, size) for start, size in self._blocks()], self.dim),)

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (dealt,) = tensors
        self._check(self.new, dealt)
        blocks = self._blocks()
        there = torch.split(dealt.detach(), [size for _, size in blocks], self.dim)
        back = sorted(range(len(blocks)), key=lambda number: blocks[number][0])
        return (torch.cat([there[number] for number in back], self.dim),)

    def parts(self, piece: Piece) -> Sequence[Piece] | None:
        found: list[Piece] = []
        dim = self.dim % piece.memory.ndim
        begin, end, at = piece.start[dim], piece.start[dim] + piece.memory.shape[dim], 0
        for start, size in self._blocks():
            low, high = max(begin, at), min(end, at + size)
            if low < high:
                place = (*piece.start[:dim], start + low - at, *piece.start[dim + 1 :])
                found.append(Piece(self.old, place, piece.memory.narrow(dim, low - begin, high - low)))
            at += size
        return found

    def _blocks(self) -> list[tuple[int, int]]:
        """Return where the slices of the new tensor begin in the old one, and how large they are."""
        starts = [sum(self.sizes[:number]) for number in range(len(self.sizes))]
        each = [(start, size // self.shares) for start, size in zip(starts, self.sizes, strict=True)]
        return [(start + share * size, size) for share in range(self.shares) for start, size in each]

    def _check(self, name: str, tensor: Tensor) -> None:
        if not -tensor.ndim <= self.dim < tensor.ndim or tensor.shape[self.dim] != sum(self.sizes):
            expected = f"dimension {self.dim} must be {sum(self.sizes)} long"
            raise StateError(f"'{name}' has shape {list(tensor.shape)}; {expected}")


@dataclass(frozen=True)
class Select(_OfOne):
    """Of the tensor `old`, `size` long along `dim`, `new` has the slices `kept`; going back, the others are zeros.

    Of a tensor that is gone as a whole `new` is empty. The name may stay: its length tells whether a tensor is cut.
    """

    dim: int
    kept: tuple[int, ...]
    size: int

    kind: ClassVar[str] = "select"
    lossy: ClassVar[bool] = True
    is_compact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if sorted({*self.kept}) != [*self.kept] or not all(0 <= each < self.size for each in self.kept):
            raise StateError(
                f"'{self.new}' keeps slices of '{self.old}' from 0 to {self.size - 1}, in order, each once"
            )

    def is_old(self, tensors: Sequence[Tensor]) -> bool:
        return self._length(tensors[0]) == self.size

    def is_new(self, tensors: Sequence[Tensor]) -> bool:
        return self._length(tensors[0]) == len(self.kept)

    def _length(self, tensor: Tensor) -> int:
        return tensor.shape[self.dim] if -tensor.ndim <= self.dim < tensor.ndim else -1

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (whole,) = tensors
        if not self.is_old(tensors):
            raise StateError(
                f"'{self.old}' has shape {list(whole.shape)}; dimension {self.dim} must be {self.size} long"
            )
        return (whole.index_select(self.dim, self._index(whole)),)

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (cut,) = tensors
        if not self.is_new(tensors):
            expected = f"dimension {self.dim} must be {len(self.kept)} long"
            raise StateError(f"'{self.new}' has shape {list(cut.shape)}; {expected}")
        shape = list(cut.shape)
        shape[self.dim] = self.size
        return (cut.new_zeros(shape).index_copy(self.dim, self._index(cut), cut.detach()),)

    def _index(self, tensor: Tensor) -> Tensor:
        return torch.tensor(self.kept, dtype=torch.int64, device=tensor.device)

    def __str__(self) -> str:
        return f"select {len(self.kept)} of {self.size} along {self.dim}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class Mask(_OfOne):
    """Of the tensor `old`, of this shape, `new` has zeros where `gone`, as `packed` writes it, says so."""

    shape: tuple[int, ...]
    gone: str

    kind: ClassVar[str] = "mask"
    lossy: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (whole,) = tensors
        if tuple(whole.shape) != self.shape:
            raise StateError(f"'{self.old}' has shape {list(whole.shape)}; its mask has {list(self.shape)}")
        return (whole.masked_fill(unpacked(self.gone, self.shape).to(whole.device), 0),)

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (kept,) = tensors
        (masked,) = self.forward([kept.detach()])
        # Most often nothing was written where the zeros are: then it is the model's own memory.
        return (kept.detach() if not kept.is_meta and torch.equal(masked, kept) else masked,)

    def __str__(self) -> str:
        return f"mask {list(self.shape)}: {self.old} -> {self.new}"


def _check_distinct(step: _OfMany) -> None:
    if not step.olds:
        raise StateError(f"'{step.new}' is made of no tensors")
    if len(set(step.olds)) < len(step.olds):
        repeated = next(name for name in step.olds if step.olds.count(name) > 1)
        raise StateError(f"'{repeated}' goes into '{step.new}' twice")


def _check_alike(step: _OfMany, tensors: Sequence[Tensor], except_dim: int | None = None) -> None:
    first = tensors[0]
    for name, tensor in zip(step.olds, tensors, strict=True):
        for what, mine, others in (
            ("shape", _shape(tensor, except_dim), _shape(first, except_dim)),
            ("dtype", tensor.dtype, first.dtype),
            ("device", tensor.device, first.device),
        ):
            if mine != others:
                theirs = f"'{step.olds[0]}' has {what} {others} and '{name}' has {what} {mine}"
                raise StateError(f"{theirs}: they cannot be merged into '{step.new}'")


def _shape(tensor: Tensor, except_dim: int | None) -> list[int | str]:
    shape: list[int | str] = list(tensor.shape)
    if except_dim is not None:
        shape[except_dim] = "*"
    return shape


def _summary(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def packed(flags: Tensor) -> str:
    """Return a tensor of booleans as text: eight to the byte, compressed, in base 64."""
    bits = np.packbits(flags.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1))
    return base64.b64encode(zlib.compress(bits.tobytes(), 1)).decode("ascii")


def unpacked(text: str, shape: Sequence[int]) -> Tensor:
    """Return the tensor of booleans, of this shape, that `packed` wrote, or raise a StateError."""
    count = math.prod(shape)
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(text, validate=True), -(-count // 8) + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise StateError(f"a mask of shape {list(shape)} cannot be read: {error}") from error
    if len(data) != -(-count // 8):
        raise StateError(f"a mask of shape {list(shape)} has {len(data)} bytes; it needs {-(-count // 8)}")
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count)
    return torch.from_numpy(bits).bool().reshape(tuple(shape))
