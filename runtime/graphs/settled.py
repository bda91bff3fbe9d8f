"""What a graph asks of its module and reads there, as it was when all was asked: one look tells that it still is so."""

from __future__ import annotations

import copy
import enum
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from ...compat import is_plainly_eager
from ...compat.words import Layout, Words, layout
from ..guards import SELF, Attribute, Call, Constant, Dictionary, Guard, Is, IsNot, Item, Known, Source
from ..values import counts_items, is_plain_structure

__all__ = ["Grounded", "Grounds", "Settled", "can_settle"]

_MOST_CALLS = 64
"""So many calls are made, at most, before modules that change again and again are noted once more."""

_FIXED = (int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device)
_PURE = (len, str, type)


@dataclass
class Grounds:
    """What an answer stands on: objects of certain classes, and what dictionaries hold."""

    dictionaries: list[dict[Any, Any]] = field(default_factory=list[dict[Any, Any]])
    empty: list[dict[Any, Any]] = field(default_factory=list[dict[Any, Any]])  # those of which only this counts
    objects: list[object] = field(default_factory=list[object])
    values: list[Any] = field(default_factory=list[Any])  # may change in themselves
    copies: list[Any] = field(default_factory=list[Any])  # of these values, as they were

    def add(self, other: Grounds) -> None:
        """Stand on what another answer stands on, too."""
        for name, held in vars(other).items():
            getattr(self, name).extend(held)

    def hold_the_same(self) -> bool:
        """Say whether values that may change in themselves are as they were; `==` takes 1, 1.0 and True for one."""
        return self.values == self.copies and repr(self.values) == repr(self.copies)

    def words(self, found: Layout) -> Words | None:
        """Return the words that tell whether all is as it was; None where some are not found."""
        objects = list({id(each): each for each in self.objects}.values())
        attributes = [found.attributes_of(each) for each in objects if type(getattr(each, "__dict__", None)) is dict]
        if None in attributes:
            return None
        changes, lengths = map(found.change_of, self.dictionaries), map(found.length_of, self.empty)
        return Words([*changes, *lengths, *map(found.type_of, objects), *cast("list[int]", attributes)])


@runtime_checkable
class Grounded(Protocol):
    """A question about a module that graphs ask, which can tell what its answer stands on."""

    def grounds(self, module: nn.Module) -> Grounds | None:
        """Return what the answer stands on that it gave last; None where that cannot be told."""
        ...


class _Unsettled(Exception):
    """What a guard reads cannot be watched."""


def can_settle(guard: Guard) -> bool:
    """Say whether a guard asks only for what is found in the module itself, in its dictionaries and those of others."""
    return all(_is_inside(source) for source in guard.sources())


def _is_inside(source: Source) -> bool:
    match source:
        case Call(function, args):
            return function in _PURE or (isinstance(function, Grounded) and args == (SELF,))
        case _:
            return source == SELF or isinstance(source, (Attribute, Constant, Dictionary, Item, Known))


class Settled:
    """Give the tensors that a graph reads from a module where guards held and nothing that they stand on has changed.

    Code asks it first; where it has no answer the code asks the guards themselves, and lets it `note` that they hold.
    """

    __name__ = "settled"

    def __init__(self, guards: Sequence[Guard], targets: Sequence[str]) -> None:
        self.guards, self.targets = tuple(guards), tuple(targets)
        self._known: dict[int, tuple[Words, Grounds, tuple[Tensor, ...]]] = {}
        """By the identity of the module, for copies of a model may share a graph."""
        self._waits: dict[int, tuple[int, int, object]] = {}
        """How many calls of a module are made before it is noted, and next time; and what tells that it is gone."""

    def __call__(self, module: nn.Module) -> tuple[Tensor, ...] | None:
        """Return the tensors; None where guards are to be asked."""
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_compiling():
            return None
        known = self._known.get(id(module))
        if known is None:
            return None
        words, grounds, tensors = known
        if words.same() and (not grounds.values or grounds.hold_the_same()):
            return tensors
        self._known.pop(id(module), None)
        return None

    def note(self, module: nn.Module) -> bool:
        """Note, where all guards hold, what they stand on; return True."""
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_compiling():
            return True
        key, found = id(module), layout()
        if found is None or found.changes is None or not is_plainly_eager():
            return True
        left, longest, gone = self._waits.get(key) or (
            0,
            1,
            weakref.ref(module, partial(_forget, weakref.ref(self), key)),
        )
        if left:
            self._waits[key] = left - 1, longest, gone
            return True
        self._waits[key] = longest, min(2 * longest, _MOST_CALLS), gone
        try:
            grounds, tensors = self._grounds(module)
        except (_Unsettled, AttributeError, KeyError):
            return True
        words = grounds.words(found)
        if words is not None:
            self._known[key] = words, grounds, tensors
        return True

    def forget(self, key: int) -> None:
        """Let go of what was noted of a module that is gone."""
        self._known.pop(key, None)
        self._waits.pop(key, None)

    def _grounds(self, module: nn.Module) -> tuple[Grounds, tuple[Tensor, ...]]:
        look = _Look(module)
        for guard in self.guards:
            by_identity = isinstance(guard.check, (Is, IsNot))
            for source in (guard.source, *guard.check.parts):
                value = look(source)
                if not by_identity:
                    look.watch(value)
        tensors = tuple(look.tensor(target) for target in self.targets)
        return look.grounds, tensors


def _forget(settled: weakref.ref[Settled], key: int, _: object) -> None:
    if (found := settled()) is not None:
        found.forget(key)


class _Look:
    """Read sources, and note what each stands on."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.grounds = Grounds()
        self._read = dict[Source, Any]()

    def __call__(self, source: Source) -> Any:
        if source not in self._read:
            self._read[source] = self._value(source)
        return self._read[source]

    def _value(self, source: Source) -> Any:
        match source:
            case Constant(value=value) | Known(value):
                return value
            case Attribute(owner, name):
                return self._attribute(self(owner), name)
            case Dictionary(owner):
                return self._attributes(self(owner))
            case Item(owner, key):
                return self._item(self(owner), self(key))
            case Call(function, args) if isinstance(function, Grounded):
                return self._answer(function)
            case Call(function, args):
                return self._computed(function, self(args[0]))
            case _:
                return self._module

    def watch(self, value: Any) -> None:
        """Note what a value holds that may change in itself."""
        if type(value) is list and is_plain_structure(cast("object", value)):
            self.grounds.values.append(value)
            self.grounds.copies.append(copy.deepcopy(value))
        elif not _is_fixed(value):
            raise _Unsettled

    def _attributes(self, owner: Any) -> dict[str, Any]:
        attributes: Any = object.__getattribute__(owner, "__dict__")
        if type(attributes) is not dict:
            raise _Unsettled
        self.grounds.objects.append(owner)
        self.grounds.dictionaries.append(cast("dict[str, Any]", attributes))
        return cast("dict[str, Any]", attributes)

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, type) and name == "__qualname__":
            return owner.__qualname__
        if not isinstance(owner, nn.Module) or hasattr(getattr(type(owner), name, None), "__set__"):
            raise _Unsettled
        return self._attributes(owner)[name]

    def _item(self, owner: Any, key: Any) -> Any:
        if type(owner) in (dict, OrderedDict):
            self.grounds.dictionaries.append(cast("dict[Any, Any]", owner))
        elif type(owner) is not tuple:
            raise _Unsettled
        return cast("Any", owner)[key]

    def _answer(self, question: Grounded) -> bool:
        found = question.grounds(self._module)
        if found is None:
            raise _Unsettled
        self.grounds.add(found)
        return True

    def _computed(self, function: Any, value: Any) -> Any:
        kind = type(cast("object", value))
        if function is len and counts_items(kind):
            self.grounds.dictionaries.append(self._attributes(value)[_CHILDREN])
            return len(value)
        if function is len and type(value) in (dict, OrderedDict):
            self.grounds.dictionaries.append(cast("dict[Any, Any]", value))
        elif function is type and not _is_fixed(value):
            self.grounds.objects.append(value)
        else:
            self.watch(value)
        return cast("Any", function)(value)

    def tensor(self, target: str) -> Tensor:
        """Return a parameter or buffer by its qualified name."""
        *parents, name = target.split(".")
        holder = self._module
        for parent in parents:
            holder = self._item(self._attributes(holder)[_CHILDREN], parent)
        for register in _REGISTERS:
            if name in (held := self._attributes(holder)[register]):
                return _tensor(self._item(held, name))
        raise _Unsettled


_CHILDREN = "_modules"
_REGISTERS = ("_parameters", "_buffers")


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise _Unsettled
    return value


def _is_fixed(value: Any) -> bool:
    """Say whether a value stays what it is."""
    if type(value) in (tuple, torch.Size):
        return all(map(_is_fixed, cast("Iterable[Any]", value)))
    return isinstance(value, _FIXED)
