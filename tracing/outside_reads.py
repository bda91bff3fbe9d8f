"""See which plain values a forward reads from outside the modules: globals, what it closes over, class attributes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import CellType, CodeType, FunctionType
from typing import Any, cast

from torch import nn

from .guards import Equals, Guard, equal, of_type
from .outside import cells_of, own_cells
from .outside_classes import OutsideClasses
from .outside_names import OutsideNames, names_in
from .outside_objects import OutsideObjects, is_watchable
from .outside_places import MISSING, Place, class_attribute, held, is_readable
from .reached_code import TooManyFunctions, is_foreign, reached_functions
from .sources import SELF, Attribute, Call, Globals, Source, constant, item_of, key_of, type_of

__all__ = ["OutsideReads", "guards_on"]


class OutsideReads:
    """Hold what a forward, and the functions that it names, may read from outside the modules, as it is now.

    Args:
        module: about to be traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._conditions: dict[Guard, None] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._stored: dict[tuple[int, str], tuple[Place, Any, str]] = {}
        self._objects = OutsideObjects(self._note, self._conditions.setdefault, self._note_set)
        self._classes = OutsideClasses(self._note)
        self._unseen = ""
        """What it may set without that being noticed, or why that is not known."""
        functions: list[FunctionType] = []
        try:
            for function in reached_functions([module], hooks=False):
                functions.append(function)
                self._note_function(function)
        except TooManyFunctions as error:
            self._unseen = f"what it reads that is not the module's is not known: {error}"
        self._cells = {name: (cell, _content(cell)) for name, cell in own_cells(type(module).forward).items()}
        for name, (_, value) in self._cells.items():
            expression, told = _cell(name), name.partition(":")[2]
            self._note(expression, value, told)
            self._watch(value, expression, told)
        self._classes.note_class_methods(functions, type(module))
        for name, value in _held_by_class(type(module)).items():
            if name not in vars(module):
                self._objects.add(value, Attribute(type_of(SELF), name), f"{name} of its class")

    def watching(self) -> AbstractContextManager[None]:
        """Note, while the forward runs, what it reads of objects and sets on them under any name."""
        return self._objects.watching()

    def _note_function(self, function: FunctionType) -> None:
        names, space = names_in(function.__code__), function.__globals__
        home = _home_of(space)
        for chain in names.chains:
            self._note_chain(space, home, chain, function.__code__ if chain in names.renamed else None)
        self._note_attributes(names.of_class)
        if names.stored or names.stored_of_class:
            self._note_stores(names, space, home)

    def _note_chain(
        self, space: dict[str, Any], home: str | None, chain: tuple[str, ...], renaming: CodeType | None = None
    ) -> bool:
        """Note that a global, or an attribute read from it, is read; say whether it is guarded.

        Args:
            renaming: the code, if it gives this another name.
        """
        if home is None:
            return False
        name, *attributes = chain
        value, expression = space.get(name, MISSING), item_of(Globals(home), name)
        for number, attribute in enumerate(attributes, 1):
            self._watch(value, expression, ".".join(chain[:number]))
            value = held(value, attribute) if is_readable(value) else MISSING
            expression = Attribute(expression, attribute)
        self._watch(value, expression, ".".join(chain))
        if renaming is not None:
            self._classes.note_renamed(value, expression, ".".join(chain), renaming)
        return self._note(expression, value, ".".join(chain))

    def _watch(self, value: Any, expression: Source, told: str) -> None:
        if isinstance(value, type):
            self._classes.add(value, expression)
        elif is_watchable(cast("type[Any]", type(value))):
            self._classes.add(cast("type[Any]", type(value)), type_of(expression))
            self._objects.add(value, expression, told)

    def _note_attributes(self, names: Iterable[str]) -> None:
        """Note that attributes of the module's class are read, those of its own or of a base."""
        for name in names:
            self._note(
                Attribute(type_of(SELF), name), class_attribute(type(self._module), name), f"{name} of its class"
            )

    def _note(self, expression: Source, value: Any, told: str) -> bool:
        guards = guards_on(expression, value, told)
        self._conditions.update(dict.fromkeys(guards))
        if guards and type(value) in (list, dict, set):
            self._contents.append((value, copy.deepcopy(value)))
        return bool(guards)

    def _note_stores(self, names: OutsideNames, space: dict[str, Any], home: str | None) -> None:
        """Note what is set; a graph for when it is there already leaves it as the forward would."""
        for chain in names.stored:
            is_guarded = self._note_chain(space, home, chain)
            root, *attributes = chain
            owner = space if not attributes else space.get(root, MISSING)
            self._note_store(owner, tuple(attributes) or chain, ".".join(chain), is_guarded or names.reads(chain))
        for attributes in names.stored_of_class:
            told = f"{'.'.join(attributes)} of its class"
            expression, value = (
                Attribute(type_of(SELF), attributes[0]),
                class_attribute(type(self._module), attributes[0]),
            )
            is_guarded = len(attributes) == 1 and self._note(expression, value, told)
            self._note_store(type(self._module), attributes, told, is_guarded)

    def _note_set(self, owner: Any, name: str, told: str, is_guarded: bool) -> None:
        self._note_store(owner, (name,), told, is_guarded)

    def _note_store(self, owner: Any, attributes: tuple[str, ...], told: str, is_guarded: bool) -> None:
        if owner is MISSING:  # no such global: that code does not run
            return
        *path, name = attributes
        for attribute in path:
            owner = MISSING if owner is MISSING else held(owner, attribute)
        place = Place(owner, name)
        if owner is MISSING or not place.is_known():
            self._unseen = self._unseen or _unseen(told)
            return
        content = place.content()
        self._stored.setdefault((id(owner), name), (place, content, told))
        if not is_guarded and content is not MISSING:  # it may set just what is there
            self._unseen = self._unseen or _unseen(told)

    def put_back(self) -> str:
        """Put back globals and the like that the forward has set or changed meanwhile; return what, or nothing.

        No graph would do that again.
        """
        changed: list[str] = []
        for place, value, told in self._stored.values():
            if place.content() is not value:
                changed.append(told)
                place.put(value)
        changed += self._objects.put_back()
        changed += self._classes.put_back()
        for name, (cell, value) in self._cells.items():
            if _content(cell) is not value:
                changed.append(name.partition(":")[2])
                cell.cell_contents = value
        changed += [guard.reason for guard in self._conditions if not guard.holds({"self": self._module})]
        for container, content in self._contents:
            if container != content or str(container) != str(content):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        return f"it changes what is not the module's: {changed[0]}" if changed else self._unseen

    def guards(self, read: Iterable[str]) -> Iterator[Guard]:
        """Yield conditions under which the same is read again.

        Args:
            read: names of the module's plain attributes that were read; its class may have them.
        """
        self._note_attributes(name for name in read if name not in vars(self._module))
        yield from self._conditions


def _held_by_class(cls: type[nn.Module]) -> dict[str, Any]:
    """Return the objects and containers that a class of the user's, or one it derives from, has for attributes."""
    bases = [base for base in reversed(cls.__mro__) if not is_foreign(base.__module__)]
    found = {name: value for base in bases for name, value in vars(base).items() if not name.startswith("__")}
    return {name: value for name, value in found.items() if is_watchable(cast("type[Any]", type(value)))}


def _home_of(space: dict[str, Any]) -> str | None:
    """Return the name of the loaded module of Python that has these globals, so that a guard can look there."""
    home = space.get("__name__")
    return home if isinstance(home, str) and getattr(sys.modules.get(home), "__dict__", None) is space else None


def _unseen(told: str) -> str:
    return f"it may set what is not the module's: {told}"


def _cell(name: str) -> Source:
    return Attribute(item_of(Call(cells_of, (SELF,)), name), "cell_contents")


def guards_on(source: Source, value: Any, told: str) -> list[Guard]:
    """Return guards on a plain value, or a short container of such, called `told`; none for any other."""
    if constant(value) is None and type(value) is not float:
        return []
    reason = f"{told} is {value!r}"
    if type(value) in (int, float):
        if value - value != 0:  # no number, or infinite
            return [Guard(Call(str, (source,)), Equals(key_of(str(value))), reason)]
        return [Guard(source, Equals(key_of(value)), reason), of_type(source, type(value), reason)]
    guard = equal(source, value, reason)
    if guard is None:
        return []
    if _has_numbers(value) and not isinstance(value, bool):  # [2] == [2.0] == [True]
        return [guard, Guard(Call(str, (source,)), Equals(key_of(str(value))), reason)]
    return [guard]


def _has_numbers(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_numbers, (part for pair in cast("dict[Any, Any]", value).items() for part in pair)))
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_numbers, cast("Iterable[Any]", value)))
    return isinstance(value, (bool, int, float))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING
