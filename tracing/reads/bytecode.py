"""Follow the values that code has names for through its bytecode: what each step takes, as far as it has a name."""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

__all__ = [
    "TYPE", "Asked", "Display", "Plain", "Read", "Use", "Value", "Variable", "is_class", "named_in", "root_of",
    "uses_in",
]  # fmt: skip


class Variable(NamedTuple):
    """A variable; `kind` is "global", "builtin", "cell" (of this function or one around it) or "local"."""

    kind: str
    name: str


class Read(NamedTuple):
    """An attribute of a value."""

    owner: Value
    name: str


class Asked(NamedTuple):
    """What calling something with one argument gives, `type` for instance; `value.__class__` is written so too."""

    function: Value
    argument: Value


class Display(NamedTuple):
    """A tuple, list or set that is written out."""

    items: tuple[Value, ...]


class Plain(NamedTuple):
    """A constant."""

    value: Any


TYPE = Variable("builtin", "type")
Value = Variable | Read | Asked | Display | Plain | None
"""What is on the stack; None where it has no name."""


class Use(NamedTuple):
    """One step of the code: its name in `dis`, the name in it, what it takes from the stack, and its line."""

    operation: str
    argument: Any
    taken: tuple[Value, ...]
    line: int


_NOTHING = frozenset(
    "CACHE PRECALL EXTENDED_ARG NOP RESUME KW_NAMES MAKE_CELL COPY_FREE_VARS NOT_TAKEN TO_BOOL".split()
)
_ENDS = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")
"""After these the code goes on only where something jumps to."""
_TAKES_ONLY = tuple(
    "STORE_ DELETE_ POP_ SWAP RETURN_ RAISE_ RERAISE JUMP_IF LIST_ SET_ADD SET_UPDATE DICT_ MAP_ END_ CLEANUP_".split()
)
_KINDS = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "cell", "LOAD_CLASSDEREF": "cell"}
_OF_VARIABLES = ("STORE_", "DELETE_", *_KINDS)
_CALLS = {"CALL": 2, "CALL_KW": 3}
"""What these take besides as many arguments as they say."""
_OWNERS = {"LOAD_ATTR": 1, "LOAD_METHOD": 1, "LOAD_SUPER_ATTR": 3}
_DISPLAYS = ("BUILD_TUPLE", "BUILD_LIST", "BUILD_SET")
_TWO = re.compile(r"((?:LOAD|STORE)_FAST(?:_BORROW)?)_((?:LOAD|STORE)_FAST(?:_BORROW)?)")
"""Since Python 3.13 one step may read or set two local variables."""


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions made in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


def is_class(value: Value) -> bool:
    """Say whether a value is the class of a local variable."""
    if not isinstance(value, Asked) or not isinstance(value.argument, Variable):
        return False
    return value.function in (TYPE, Variable("global", "type")) and value.argument.kind in ("local", "cell")


def root_of(value: Value) -> Value:
    """Return what the first of some attributes is read from."""
    while isinstance(value, Read):
        value = value.owner
    return value


@functools.lru_cache(maxsize=4096)
def uses_in(code: CodeType) -> tuple[Use, ...]:
    """Return the steps of code, and of the functions made in it, that have to do with names."""
    found = (use for inner in codes_in(code) for use in _uses(inner))
    return tuple(use for use in found if any(use.taken) or use.operation.startswith(_OF_VARIABLES))


@functools.lru_cache(maxsize=4096)
def named_in(code: CodeType) -> frozenset[Value]:
    """Return the variables that code reads, but local ones, and the attributes that it reads of anything."""
    named: set[Value] = set()
    for use in uses_in(code):
        if use.operation in _KINDS:
            named.add(Variable(_KINDS[use.operation], use.argument))
        elif use.operation in _OWNERS and use.argument != "__class__":
            named.add(Read(use.taken[-1], use.argument))
    return frozenset(named)


def _uses(code: CodeType) -> Iterator[Use]:
    stack: list[Value] = []
    at_target: dict[int, list[Value]] = {}
    goes_on, line = True, code.co_firstlineno
    for step in dis.get_instructions(code):
        if not goes_on:
            stack = at_target.get(step.offset, [])
        goes_on = not step.opname.startswith(_ENDS)
        if step.opcode in dis.hasjrel:
            at_target.setdefault(step.argval, _moved(stack, dis.stack_effect(step.opcode, step.arg, jump=True)))
        line = (step.positions and step.positions.lineno) or line
        for operation, argument, effect in _single(step):
            takes, pushes = _counts(operation, step.arg or 0, effect)
            taken = _popped(stack, takes)
            yield Use(operation, argument, taken, line)
            stack += _pushed(operation, argument, taken, pushes)
            _rearrange(operation, step.arg or 0, stack)


def _single(step: dis.Instruction) -> Iterator[tuple[str, Any, int]]:
    """Yield what a step does, its argument, and by how much it changes the depth of the stack."""
    two = _TWO.fullmatch(step.opname)
    if step.opname in _NOTHING:
        return
    if two is None:
        yield step.opname, step.argval, dis.stack_effect(step.opcode, step.arg, jump=False)
        return
    for operation, name in zip(two.groups(), step.argval, strict=True):
        yield operation, name, 1 if operation.startswith("LOAD") else -1


def _counts(operation: str, argument: int, effect: int) -> tuple[int, int]:
    """Return how many values a step takes, and how many it puts there."""
    if operation in _CALLS:
        return argument + _CALLS[operation], 1
    if operation in _OWNERS:
        return _OWNERS[operation], effect + _OWNERS[operation]
    if operation.startswith(_TAKES_ONLY):
        return max(0, -effect), 0
    return (0, effect) if effect > 0 else (1 - effect, 1)


def _popped(stack: list[Value], count: int) -> tuple[Value, ...]:
    taken = stack[max(0, len(stack) - count) :]
    del stack[max(0, len(stack) - count) :]
    return (*[None] * (count - len(taken)), *taken)


def _moved(stack: Sequence[Value], effect: int) -> list[Value]:
    return [*stack[: len(stack) + min(0, effect)], *[None] * effect]


def _pushed(operation: str, argument: Any, taken: tuple[Value, ...], count: int) -> list[Value]:
    """Return what a step puts on the stack, its result last."""
    result: Value = None
    if operation in _KINDS:
        result = Variable(_KINDS[operation], argument)
    elif operation.startswith("LOAD_FAST"):
        result = Variable("local", argument)
    elif operation == "LOAD_CONST":
        result = Plain(argument)
    elif operation in _OWNERS:
        result = Asked(TYPE, taken[-1]) if argument == "__class__" else Read(taken[-1], argument)
    elif operation == "CALL" and len(taken) == 3:
        result = Asked(taken[0] or taken[1], taken[2])
    elif operation in _DISPLAYS:
        result = Display(taken)
    elif operation.startswith("JUMP_"):
        result = taken[-1]
    return [*[None] * (count - 1), result] if count else []


def _rearrange(operation: str, argument: int, stack: list[Value]) -> None:
    if operation == "COPY" and argument < len(stack):
        stack[-1] = stack[-1 - argument]
    elif operation == "SWAP" and argument <= len(stack):
        stack[-1], stack[-argument] = stack[-argument], stack[-1]
