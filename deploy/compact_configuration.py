"""Find the configuration of `transformers` by which a family's own code builds a model of given shapes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

__all__ = ["ShorterLists", "built", "configuration_of", "padded"]

_T = TypeVar("_T")

Shapes = Mapping[str, torch.Size]
Place = tuple[str, int]
"""A dimension of a tensor, by the tensor's name."""

_WIDTHS = re.compile(r".*(size|sizes|dim|dims|d_model|d_ff|d_inner|n_embd|n_inner|channels|width)")
_DEPTHS = re.compile(r".*(layers?|depths?|blocks?)")
_COUNTS = re.compile(r".*(heads?|experts)")
_OTHERS = re.compile(r".*(vocab|patch|image|window|kernel|head_dim|chunk|batch|state_size|group).*")


@dataclass(frozen=True)
class ShorterLists:
    """Lists of modules by name, with the name of each item, and whether it is left."""

    stays: Mapping[str, Mapping[str, bool]]

    @property
    def gone(self) -> dict[str, list[int]]:
        """Return the numbers of the items that are gone."""
        return {
            name: [at for at, stays in enumerate(items.values()) if not stays] for name, items in self.stays.items()
        }

    def of(self, values: Mapping[str, _T]) -> dict[str, _T]:
        """Return values by the names that modules have once the lists are shorter, without those of items gone."""
        named = {self._renamed(name): value for name, value in values.items()}
        return {name: value for name, value in named.items() if name is not None}

    def _renamed(self, name: str) -> str | None:
        for path, stays in self.stays.items():
            if name.startswith(f"{path}."):
                item, _, rest = name[len(path) + 1 :].partition(".")
                left = [each for each, is_left in stays.items() if is_left]
                return f"{path}.{left.index(item)}.{rest}" if item in left else None
        return name


@dataclass(frozen=True)
class _Field:
    """A whole number in a configuration, of a part of it and of a list maybe."""

    part: str
    name: str
    index: int | None = None

    def read(self, config: Any) -> Any:
        value = getattr(self.owner(config), self.name)
        return value if self.index is None else value[self.index]

    def write(self, config: Any, number: int) -> None:
        owner = self.owner(config)
        value: Any = number
        if self.index is not None:
            old = getattr(owner, self.name)
            value = type(old)(number if at == self.index else each for at, each in enumerate(old))
        setattr(owner, self.name, value)

    @property
    def counts(self) -> bool:
        return _COUNTS.fullmatch(self.name) is not None

    def owner(self, config: Any) -> Any:
        return getattr(config, self.part) if self.part else config


def built(cls: Any, config: Any) -> dict[str, torch.Size] | None:
    """Return the shapes of what a class builds by a configuration, by name; None where it builds nothing."""
    try:
        with torch.device("meta"):
            model: nn.Module = cls(copy.deepcopy(config))
    except Exception:  # not all numbers go together
        return None
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def configuration_of(cls: Any, config: Any, wanted: Shapes, lists: ShorterLists) -> Any:
    """Return a configuration by which `cls` builds tensors of `wanted` shapes, or larger ones where layers of one size
    differ; None where it has no fields for that.
    """
    whole, config = config, _with_fewer_blocks(cls, _with_widths_of_heads(config), lists)
    before = None if config is None else built(cls, config)
    if before is None or before.keys() != wanted.keys():
        return None
    slopes = {field: found for field in _fields(config) if (found := _slopes(cls, config, field, before))}
    new = copy.deepcopy(config)
    for each, number in _solved(config, slopes, before, wanted).items():
        each.write(new, number)
    after = built(cls, new)
    fits = after is not None and all(_holds(after[name], shape) for name, shape in wanted.items())
    return new if fits and after != built(cls, whole) and _is_valid(new) else None


def padded(tensor: Tensor, shape: torch.Size, parts: int) -> Tensor:
    """Return a tensor with zeros behind its elements, or behind those of each of `parts` parts of a dimension."""
    for dim, size in enumerate(shape):
        if tensor.shape[dim] == size:
            continue
        count = parts if tensor.shape[dim] % parts == 0 and size % parts == 0 else 1
        pieces: Tensor = cast("Any", tensor).unflatten(dim, (count, -1))
        missing = list(pieces.shape)
        missing[dim + 1] = size // count - missing[dim + 1]
        tensor = torch.cat((pieces, pieces.new_zeros(missing)), dim + 1).flatten(dim, dim + 1)
    return tensor


def _with_widths_of_heads(config: Any) -> Any:
    """Return a configuration that says how wide heads are, which else follows from the other widths."""
    new = copy.deepcopy(config)
    for each in (new, *(value for value in _held(new).values() if hasattr(value, "to_dict"))):
        width, heads = getattr(each, "hidden_size", None), getattr(each, "num_attention_heads", None)
        if getattr(each, "head_dim", None) is None and type(width) is int and type(heads) is int:
            with suppress(Exception):
                each.head_dim = width // heads
    return new


def _with_fewer_blocks(cls: Any, config: Any, lists: ShorterLists) -> Any:
    """Return a configuration by which a class's lists have as many items as are left; None where no field counts them.

    What the configuration lists of each layer is left out with its layer.
    """
    for name, stays in lists.stays.items():
        config = next(_shortened(cls, config, name, list(stays.values())), None)
        if config is None:
            return None
    return config


def _shortened(cls: Any, config: Any, name: str, stays: Sequence[bool]) -> Iterator[Any]:
    for each in _numbers(config, _DEPTHS):
        if each.read(config) != len(stays):
            continue
        new = copy.deepcopy(config)
        with suppress(Exception):  # configurations check some fields
            each.write(new, sum(stays))
            for last, value in _held(each.owner(new)).items():
                items = cast("list[Any]", value) if isinstance(value, list) else []
                if "layer" in last and len(items) == len(stays):
                    setattr(each.owner(new), last, [item for item, left in zip(items, stays, strict=True) if left])
        found = {key[len(name) + 1 :].partition(".")[0] for key in built(cls, new) or () if key.startswith(f"{name}.")}
        if len(found) == sum(stays):
            yield new


def _is_valid(config: Any) -> bool:
    """Say whether a configuration can be read again: some check how their numbers go together."""
    try:
        type(config).from_dict(config.to_dict())
    except Exception:
        return False
    return True


def _fields(config: Any) -> Iterator[_Field]:
    """Yield the numbers whose names tell of a width or of a count."""
    for pattern in (_WIDTHS, _COUNTS):
        yield from (each for each in _numbers(config, pattern) if not _OTHERS.fullmatch(each.name))


def _numbers(config: Any, pattern: re.Pattern[str], part: str = "") -> Iterator[_Field]:
    """Yield the numbers in a configuration and its parts whose names are of a form."""
    for name, value in _held(config).items():
        if hasattr(value, "to_dict") and not part and name.endswith("_config"):
            yield from _numbers(value, pattern, name)
        if not pattern.fullmatch(name):
            continue
        if type(value) is int and value > 0:
            yield _Field(part, name)
        elif isinstance(value, (list, tuple)):
            items = cast("Sequence[Any]", value)
            yield from (_Field(part, name, index) for index, each in enumerate(items) if type(each) is int)


def _slopes(cls: Any, config: Any, field: _Field, before: Shapes) -> dict[Place, Fraction]:
    """Return by how much dimensions grow with a field: it is doubled, as widths of heads must stay whole."""
    number, other = field.read(config), copy.deepcopy(config)
    try:
        field.write(other, 2 * number)
    except Exception:  # configurations check some fields
        return {}
    after = built(cls, other)
    if after is None or after.keys() != before.keys():
        return {}
    return {
        (name, dim): Fraction(size - before[name][dim], number)
        for name, shape in after.items()
        if len(shape) == len(before[name])
        for dim, size in enumerate(shape)
        if size != before[name][dim]
    }


def _solved(
    config: Any, slopes: Mapping[_Field, Mapping[Place, Fraction]], before: Shapes, wanted: Shapes
) -> dict[_Field, int]:
    """Return the least numbers for the fields: first of those that alone decide a dimension, then of the others."""
    numbers: dict[_Field, int] = {}
    while True:
        found: dict[_Field, int] = {}
        for place in {place for each in slopes.values() for place in each}:
            deciding = {field: each[place] for field, each in slopes.items() if place in each}
            open_ = [field for field in deciding if field not in numbers]
            if len(open_) != 1:
                continue
            name, dim = place
            fixed = before[name][dim] - sum(slope * field.read(config) for field, slope in deciding.items())
            known = sum(slope * numbers[field] for field, slope in deciding.items() if field in numbers)
            least = math.ceil((wanted[name][dim] - fixed - known) / deciding[open_[0]])
            found[open_[0]] = max(found.get(open_[0], 1), least)
        if not found:
            return numbers
        numbers |= found


def _holds(shape: torch.Size, smaller: torch.Size) -> bool:
    return len(shape) == len(smaller) and all(size >= least for size, least in zip(shape, smaller, strict=True))


def _held(config: Any) -> dict[str, Any]:
    return dict(cast("Mapping[str, Any]", vars(config)))
