"""See which plain values a forward reads from outside the modules: globals, what it closes over, class attributes."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

from torch import nn

from .guards import Guard
from .nested import spelled
from .outside import own_cells
from .reached_code import codes_in, is_foreign, reached_functions
from .source import attribute_expression

__all__ = ["OutsideReads", "class_attribute", "condition_on"]

_SKIPPED = frozenset(("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP"))
_MISSING: Any = object()


class _Names(NamedTuple):
    """What code reads and writes by name; a chain is a global and the attributes read from it."""

    chains: frozenset[tuple[str, ...]]
    of_class: frozenset[str]
    stored: frozenset[str]


class OutsideReads:
    """Hold what a forward, and the functions that it names, may read from outside the modules, as it is now.

    Args:
        module: about to be traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._conditions: dict[str, str] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._stored: list[tuple[dict[str, Any], str, Any]] = []
        for function in reached_functions([module], hooks=False):
            self._note_function(function)
        self._cells = {name: (cell, _content(cell)) for name, cell in own_cells(type(module).forward).items()}
        for name, (_, value) in self._cells.items():
            self._note(f"fxopt_cells(self)[{name!r}].cell_contents", value, name.partition(":")[2])

    def _note_function(self, function: FunctionType) -> None:
        names, space = _names_in(function.__code__), function.__globals__
        self._stored += [(space, name, space.get(name, _MISSING)) for name in names.stored]
        home = space.get("__name__")
        if isinstance(home, str) and getattr(sys.modules.get(home), "__dict__", None) is space:
            for chain in names.chains:
                self._note_chain(space, home, chain)
        self._note_attributes(names.of_class)

    def _note_chain(self, space: dict[str, Any], home: str, chain: tuple[str, ...]) -> None:
        name, *attributes = chain
        value, expression = space.get(name, _MISSING), f"fxopt_globals({home.replace('.', '/')!r})[{name!r}]"
        for attribute in attributes:
            value, expression = _held(value, attribute), attribute_expression(expression, attribute)
        self._note(expression, value, ".".join(chain))

    def _note_attributes(self, names: Iterable[str]) -> None:
        """Note that attributes of the module's class are read, those of its own or of a base."""
        for name in names:
            self._note(f"type(self).{name}", class_attribute(type(self._module), name), f"{name} of its class")

    def _note(self, expression: str, value: Any, told: str) -> None:
        condition = condition_on(expression, value)
        if condition is not None:
            self._conditions.setdefault(condition, f"{told} is {value!r}")
            if type(value) in (list, dict, set):
                self._contents.append((value, copy.deepcopy(value)))

    def put_back(self) -> str:
        """Put back globals and the like that the forward has set or changed meanwhile; return what, or nothing.

        No graph would do that again.
        """
        changed = [name for space, name, value in self._stored if space.get(name, _MISSING) is not value]
        for space, name, value in self._stored:
            space[name] = value
            if value is _MISSING:
                del space[name]
        for name, (cell, value) in self._cells.items():
            if _content(cell) is not value:
                changed.append(name.partition(":")[2])
                cell.cell_contents = value
        changed += [reason for condition, reason in self._conditions.items() if not self._holds(condition, reason)]
        for container, content in self._contents:
            if container != content:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        return f"it changes what is not the module's: {changed[0]}" if changed else ""

    def _holds(self, condition: str, reason: str) -> bool:
        return Guard(condition, reason).holds({"self": self._module})

    def guards(self, read: Iterable[str]) -> Iterator[Guard]:
        """Yield conditions under which the same is read again.

        Args:
            read: names of the module's plain attributes that were read; its class may have them.
        """
        self._note_attributes(name for name in read if name not in vars(self._module))
        yield from (Guard(condition, reason) for condition, reason in self._conditions.items())


def condition_on(expression: str, value: Any) -> str | None:
    """Return the condition that an expression gives a plain value, or a short container of such; None for any other."""
    if value is None or type(value) is bool:
        return f"{expression} is {value}"
    if type(value) in (int, float):
        if value - value != 0:  # no number, or infinite
            return f"str({expression}) == {str(value)!r}"
        return f"{expression} == {value!r} and type({expression}) is {type(value).__name__}"
    text = spelled(value)
    return None if text is None else f"{expression} == {text}"


def class_attribute(cls: type, name: str) -> Any:
    """Return what a class, or a base of it, has as an attribute; an object without a spelling where it has none."""
    return inspect.getattr_static(cls, name, _MISSING)


def _held(owner: Any, name: str) -> Any:
    """Return an attribute of a module, a class or a plain object, where reading it runs no code of the user's."""
    if isinstance(owner, ModuleType):
        return _MISSING if is_foreign(owner.__name__) else vars(owner).get(name, _MISSING)
    if isinstance(owner, type):
        return _MISSING if is_foreign(owner.__module__) else class_attribute(owner, name)
    cls = cast("type[Any]", type(owner))
    if cls is not SimpleNamespace and (
        is_foreign(cls.__module__) or cls.__getattribute__ is not object.__getattribute__
    ):
        return _MISSING
    on_class = class_attribute(cls, name)
    if hasattr(cast("type[Any]", type(on_class)), "__set__"):  # a property
        return _MISSING
    return getattr(owner, "__dict__", {}).get(name, on_class)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> _Names:
    """Return what code, and the functions made in it, read and write."""
    receiver = code.co_varnames[0] if code.co_argcount else ""
    chains, of_class, stored = set[tuple[str, ...]](), set[str](), set[str]()
    for inner in codes_in(code):
        steps = [(s.opname, s.argval) for s in dis.get_instructions(inner) if s.opname not in _SKIPPED]
        for place, (operation, name) in enumerate(steps):
            if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                stored.add(name)
            elif operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                chains.add((name, *_attributes(steps, place + 1)))
                if name == "type" and _is_read(steps, place + 1, receiver) and _is_call(steps, place + 2):
                    of_class.update(_attributes(steps, place + 3)[:1])
            elif _is_read(steps, place, receiver):
                read = _attributes(steps, place + 1)
                of_class.update(read[1:2] if read[:1] == ["__class__"] else ())
    return _Names(frozenset(chains), frozenset(of_class), frozenset(stored))


_Steps = list[tuple[str, Any]]


def _attributes(steps: _Steps, place: int) -> list[str]:
    """Return the names of the attributes that are read one from the other, from a place on."""
    found: list[str] = []
    while place < len(steps) and steps[place][0] in ("LOAD_ATTR", "LOAD_METHOD"):
        found.append(steps[place][1])
        place += 1
    return found


def _is_read(steps: _Steps, place: int, name: str) -> bool:
    operation, read = steps[place] if place < len(steps) else ("", "")
    return read == name != "" and operation.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE"))


def _is_call(steps: _Steps, place: int) -> bool:
    return place < len(steps) and steps[place][0].startswith("CALL")
