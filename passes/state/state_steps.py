"""What one rewrite does to names and tensors: the steps that a state map is made of."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...errors import StateError

__all__ = ["Concatenate", "Rename", "Stack", "StateStep", "step_from_json"]


class StateStep(ABC):
    """Turn tensors with old names into tensors with new names, and back, exactly.

    A step that only moves values knows neither what its tensors are nor where they come from: weights, buffers,
    gradients and the moments of an element-wise optimizer all go through it. Subclasses are frozen dataclasses of
    strings, numbers and tuples; the fields that hold names are called `old`, `olds` and `new`.

    Attributes:
        kind: the step's name in JSON.
    """

    kind: ClassVar[str]

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
        return {"kind": self.kind} | fields | lists

    def __str__(self) -> str:
        return f"{self.kind} {_summary(self.sources)} -> {_summary(self.targets)}"


@dataclass(frozen=True)
class Rename(StateStep):
    """The tensor `old` is called `new`."""

    old: str
    new: str

    kind: ClassVar[str] = "rename"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.old,)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.new,)

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    __str__ = StateStep.__str__


@dataclass(frozen=True)
class Stack(StateStep):
    """The tensors `olds`, all of one shape [...], are the slices of `new`: [N, ...]."""

    olds: tuple[str, ...]
    new: str

    kind: ClassVar[str] = "stack"

    def __post_init__(self) -> None:
        _check_distinct(self)

    @property
    def sources(self) -> tuple[str, ...]:
        return self.olds

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.new,)

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        _check_alike(self, tensors)
        return (torch.stack(list(tensors)),)

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (stacked,) = tensors
        if stacked.ndim == 0 or stacked.shape[0] != len(self.olds):
            raise StateError(f"'{self.new}' has shape {list(stacked.shape)}; it stacks {len(self.olds)} tensors")
        # Slices of a tensor that lies otherwise in memory have gaps, which checkpoint writers refuse.
        return [tensor.contiguous() for tensor in stacked.detach().unbind(0)]

    __str__ = StateStep.__str__


@dataclass(frozen=True)
class Concatenate(StateStep):
    """The tensors `olds` lie behind one another in `new` along `dim`, where they are `sizes` long."""

    olds: tuple[str, ...]
    new: str
    dim: int
    sizes: tuple[int, ...]

    kind: ClassVar[str] = "concatenate"

    def __post_init__(self) -> None:
        _check_distinct(self)
        if len(self.sizes) != len(self.olds):
            raise StateError(f"'{self.new}' concatenates {len(self.olds)} tensors of {len(self.sizes)} sizes")

    @property
    def sources(self) -> tuple[str, ...]:
        return self.olds

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.new,)

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

    __str__ = StateStep.__str__


_KINDS: Mapping[str, type[StateStep]] = {step.kind: step for step in (Rename, Stack, Concatenate)}
_FIELDS: Mapping[str, type] = {"dim": int, "sizes": int}
"""What the fields of steps hold; the others hold names."""


def step_from_json(data: object) -> StateStep:
    """Return the step that `to_json` described.

    Raises:
        StateError: if the description is malformed.
    """
    if not isinstance(data, dict):
        raise StateError(f"a step is an object with a kind, not {data!r}")
    fields = dict(cast("dict[str, Any]", data))
    kind = fields.pop("kind", None)
    step = _KINDS.get(kind) if isinstance(kind, str) else None
    if step is None:
        raise StateError(f"unknown kind of step {kind!r}; known are {', '.join(_KINDS)}")
    wanted = {field.name for field in dataclasses.fields(cast("Any", step))}
    if set(fields) != wanted:
        raise StateError(f"a {kind} step has the fields {', '.join(sorted(wanted))}, not {', '.join(sorted(fields))}")
    return step(**{name: _field_from_json(kind, name, value) for name, value in fields.items()})


def _field_from_json(kind: object, name: str, value: Any) -> Any:
    wanted = _FIELDS.get(name, str)
    if name not in ("olds", "sizes"):
        if type(value) is wanted:
            return value
    elif isinstance(value, list):
        items = tuple(cast("list[Any]", value))
        if all(type(item) is wanted for item in items):
            return items
    raise StateError(f"field '{name}' of a {kind} step cannot be {value!r}")


def _check_distinct(step: Stack | Concatenate) -> None:
    if not step.olds:
        raise StateError(f"'{step.new}' is made of no tensors")
    if len(set(step.olds)) < len(step.olds):
        repeated = next(name for name in step.olds if step.olds.count(name) > 1)
        raise StateError(f"'{repeated}' goes into '{step.new}' twice")


def _check_alike(step: Stack | Concatenate, tensors: Sequence[Tensor], except_dim: int | None = None) -> None:
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
