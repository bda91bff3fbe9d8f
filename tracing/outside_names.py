"""Read from the code of functions which globals, and which attributes of these and of classes, they read and set."""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from .reached_code import codes_in

__all__ = ["OutsideNames", "names_in", "single_steps"]

_SKIPPED = frozenset(("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP"))
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES = ("STORE_ATTR", "DELETE_ATTR")
_TWO = re.compile(r"((?:LOAD|STORE)_FAST(?:_BORROW)?)_((?:LOAD|STORE)_FAST(?:_BORROW)?)")
"""Since Python 3.13 one step may read or set two local variables."""

_Step = tuple[str, Any]


class OutsideNames(NamedTuple):
    """What code reads and sets by name; a chain is a global and the attributes read from it.

    Attributes:
        chains: what is read.
        of_class: attributes read of the class of the first argument.
        stored: chains of which the last name is set or deleted; globals are chains of one.
        stored_of_class: attributes set or deleted of the class of the first argument.
        renamed: chains of which the last is given another name.
    """

    chains: frozenset[tuple[str, ...]]
    of_class: frozenset[str]
    stored: frozenset[tuple[str, ...]]
    stored_of_class: frozenset[tuple[str, ...]]
    renamed: frozenset[tuple[str, ...]]

    def reads(self, stored: tuple[str, ...]) -> bool:
        """Say whether the code also reads what it sets, as what makes something on its first call does."""
        return any(chain[: len(stored)] == stored for chain in self.chains)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> OutsideNames:
    """Return what code, and the functions made in it, read and set."""
    receiver = code.co_varnames[0] if code.co_argcount else ""
    sets: tuple[set[Any], set[Any], set[Any], set[Any], set[Any]] = (set(), set(), set(), set(), set())
    for inner in codes_in(code):
        steps = list(single_steps((step.opname, step.argval) for step in dis.get_instructions(inner)))
        for place in range(len(steps)):
            _note_step(steps, place, receiver, *sets)
    return OutsideNames(*map(frozenset, sets))


def _note_step(
    steps: list[_Step],
    place: int,
    receiver: str,
    chains: set[Any],
    of_class: set[Any],
    stored: set[Any],
    kept: set[Any],
    renamed: set[Any],
) -> None:
    operation, name = steps[place]
    if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
        stored.add((name,))
    elif operation in ("LOAD_GLOBAL", "LOAD_NAME"):
        read, target = _attributes(steps, place + 1)
        chains.add((name, *read))
        renamed.update([(name, *read)] if _is_named(steps, place + 1 + len(read)) else ())
        stored.update([(name, *target)] if target else ())
        if name == "type" and _is_read(steps, place + 1, receiver) and _is_call(steps, place + 2):
            read, target = _attributes(steps, place + 3)
            of_class.update(read[:1])
            kept.update([target] if target else ())
    elif _is_read(steps, place, receiver):
        read, target = _attributes(steps, place + 1)
        of_class.update(read[1:2] if read[:1] == ("__class__",) else ())
        kept.update([target[1:]] if target[:1] == ("__class__",) and target[1:] else ())


def single_steps(steps: Iterable[_Step]) -> Iterator[_Step]:
    """Yield what each step does and its argument, without those that do nothing here, two for one that does two."""
    for operation, argument in steps:
        two = _TWO.fullmatch(operation)
        if two is not None and isinstance(argument, tuple):
            yield from zip(two.groups(), argument, strict=True)  # pyright: ignore[reportUnknownArgumentType]
        elif operation not in _SKIPPED:
            yield operation, argument


def _attributes(steps: list[_Step], place: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the attributes read one from the other, from a place on, and with the last the one that is set, if any."""
    found: tuple[str, ...] = ()
    is_copied = False
    for operation, name in steps[place:]:
        if operation == "COPY":  # `a.b += 1` keeps `a` for setting what it reads next
            is_copied = True
        elif operation in _WRITES:
            return found, (*found, name)
        elif operation in _READS:
            found = (*found, name)
            if is_copied:
                return found, found
        else:
            break
    return found, ()


def _is_read(steps: list[_Step], place: int, name: str) -> bool:
    operation, read = steps[place] if place < len(steps) else ("", "")
    return read == name != "" and operation.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE"))


def _is_named(steps: list[_Step], place: int) -> bool:
    """Say whether what was read last is given a name."""
    if place < len(steps) and steps[place][0] == "COPY":  # `(c := CONFIG).scale`
        place += 1
    return place < len(steps) and steps[place][0].startswith(("STORE_FAST", "STORE_DEREF"))


def _is_call(steps: list[_Step], place: int) -> bool:
    return place < len(steps) and steps[place][0].startswith("CALL")
