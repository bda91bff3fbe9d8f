"""What a graph asks of its module and reads there, as it was when all was asked: one look tells that it still is so."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from ...compat import is_plainly_eager
from ...compat.words import Layout, Words, layout
from ..guards import (
    NOT_HELD,
    SELF,
    Attribute,
    Call,
    Constant,
    Dictionary,
    Guard,
    Is,
    IsNot,
    Item,
    Known,
    Source,
    reader,
)
from ..values import counts_items, is_plain_structure

__all__ = ["NOTED", "Grounded", "Grounds", "Settled", "can_settle"]

NOTED = "_fxopt_noted"
"""In the `__dict__` of a module that runs from graphs: what was noted of it, which goes with it, and is in no copy."""

_FEWEST_CALLS = 16
"""So many calls are made before a module that has changed is noted once more. A note takes as long as some ten calls of
a short model, so it is not to fall within the few calls of a race."""
_MOST_CALLS = 256
"""So many calls are made, at most, before modules that change again and again are noted once more."""

_WELL_USED = 1000
"""A note that served more calls was worth its time, which may be 20 ms: after the next change few calls are made."""

_FIXED = (int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device)
_PURE = (len, str, type)


@dataclass
class Grounds:
    """What an answer stands on: objects of certain classes, and what dictionaries hold."""

    dictionaries: list[dict[Any, Any]] = field(default_factory=list[dict[Any, Any]])
    empty: list[dict[Any, Any]] = field(default_factory=list[dict[Any, Any]])  # those of which only this counts
    objects: list[object] = field(default_factory=list[object])  # whose class counts
    attributes: list[tuple[object, dict[str, Any]]] = field(default_factory=list[tuple[object, dict[str, Any]]])
    """Objects, and the dictionaries that have their attributes; what these hold counts."""
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
        words = dict.fromkeys(map(found.length_of, self.empty), 0)
        for each, attributes in {id(each): (each, attributes) for each, attributes in self.attributes}.values():
            place = found.attributes_of(each)
            if place is None:
                return None
            words[place] = id(attributes)
        objects = (*self.objects, *(each for each, _ in self.attributes))
        words |= {found.type_of(each): id(type(each)) for each in objects}
        dictionaries = (*self.dictionaries, *(attributes for _, attributes in self.attributes))
        return Words(map(found.change_of, dictionaries)).then(Words(words))

    def is_as(self, other: Grounds) -> bool:
        """Say whether values that may change in themselves were the same in another look."""
        return self.copies == other.copies and repr(self.copies) == repr(other.copies)

    def without(self, module: nn.Module) -> list[object]:
        """Return all that words tell of, for as long as they are read, but for a module itself and its attributes."""
        own, objects = vars(module), [*self.objects, *(each for each, _ in self.attributes)]
        held = (*self.dictionaries, *self.empty, *(each for _, each in self.attributes), *objects, *map(type, objects))
        return [each for each in {id(each): each for each in held}.values() if each is not module and each is not own]


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


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What a graph reads from a module, as long as words are the same."""

    words: Words
    held: Sequence[object]  # what the words lie in, but for the module and its attributes: it is freed with its user
    values: Grounds | None  # those that may change in themselves
    tensors: tuple[Tensor, ...]

    def holds(self) -> bool:
        return self.words.same() and (self.values is None or self.values.hold_the_same())


class _Notes:
    """What graphs noted of the module in whose attributes this is, and of no other one that has got it from there."""

    __slots__ = ("known", "of", "waits")

    def __init__(self, of: tuple[int, int] = (0, 0)) -> None:
        self.of = of
        self.known: dict[Settled, _Known] = {}
        self.waits: dict[Settled, _Wait] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Notes, ()


@dataclass(slots=True)
class _Wait:
    """How many calls are made before a module is noted, how many next time, and how many the last note served."""

    left: int = 0
    next: int = _FEWEST_CALLS
    served: int = 0

    def is_over(self) -> bool:
        """Count one more call; say whether it is time to note."""
        if self.left:
            self.left -= 1
            return False
        self.next = _FEWEST_CALLS if self.served > _WELL_USED else self.next
        self.left, self.next, self.served = self.next, min(2 * self.next, _MOST_CALLS), 0
        return True


class Settled:
    """Give the tensors that a graph reads from a module where guards held and nothing that they stand on has changed.

    Code asks it first; where it has no answer the code asks the guards themselves, and lets it `note` that they hold.
    """

    __name__ = "settled"

    def __init__(self, guards: Sequence[Guard], targets: Sequence[str]) -> None:
        self.guards, self.targets = tuple(guards), tuple(targets)

    def __call__(self, module: nn.Module) -> tuple[Tensor, ...] | None:
        """Return the tensors; None where guards are to be asked."""
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_compiling():
            return None
        own = module.__dict__  # held, and the notes with it, until the words are read
        notes: _Notes | None = own.get(NOTED)
        known = None if notes is None else notes.known.get(self)
        if notes is None or known is None or notes.of != (id(module), id(own)):
            return None
        if known.holds():
            notes.waits[self].served += 1
            return known.tensors
        notes.known.pop(self, None)
        return None

    def note(self, module: nn.Module) -> bool:
        """Note, where all guards hold, what they stand on; return True."""
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_compiling():
            return True
        found, own = layout(), module.__dict__
        if found is None or found.changes is None or not is_plainly_eager():
            return True
        notes: _Notes | None = own.get(NOTED)
        if notes is None or notes.of != (id(module), id(own)):
            notes = own[NOTED] = _Notes((id(module), id(own)))
        if notes.waits.setdefault(self, _Wait()).is_over():
            try:
                known = self._known(module, found)
            except (_Unsettled, *NOT_HELD):
                return True
            if known is not None:
                notes.known[self] = known
        return True

    def _known(self, module: nn.Module, found: Layout) -> _Known | None:
        """Return what is known if guards hold; they are asked between two looks that see the same.

        What another thread changes behind the first look, and before the words are read anew, counts as no answer.
        """
        first, _ = self._grounds(module)
        before, read = first.words(found), reader({"self": module})
        if before is None or not all(guard.holds_as_read(read) for guard in self.guards):
            return None
        grounds, tensors = self._grounds(module)
        words = grounds.words(found)
        if words is None or not words.equal(before) or not grounds.is_as(first):
            return None
        return _Known(words, grounds.without(module), grounds if grounds.values else None, tensors)

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
            self.grounds.copies.append(copy.deepcopy(cast("object", value)))
        elif not _is_fixed(value):
            raise _Unsettled

    def _attributes(self, owner: Any) -> dict[str, Any]:
        attributes: Any = object.__getattribute__(owner, "__dict__")
        if type(attributes) is not dict:
            raise _Unsettled
        self.grounds.attributes.append((owner, cast("dict[str, Any]", attributes)))
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
