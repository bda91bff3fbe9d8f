"""What a graph assumes about a call, as trees of a few operations that a file may hold, and as guards.

A guard is Python text, which nobody should run from a file; a tree can say nothing but comparisons of shapes, types,
modes and plain values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch

from ..errors import ArchiveError
from ..tracing.expressions import DESCRIPTIONS
from ..tracing.guards import Guard
from ..tracing.signature import Absent
from ..tracing.source import attribute_expression, module_expression
from .targets import checked_attribute
from .values import DEEPEST, decode, encode

__all__ = [
    "FUNCTIONS", "METHODS", "Apply", "Argument", "Attribute", "Condition", "Literal", "Read", "Tree", "parts",
]  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """Stand for an argument of the forward."""

    name: str


@dataclass(frozen=True)
class Read:
    """Stand for what the model holds under a name: a tensor, or the mode of a module ("encoder.training")."""

    target: str


@dataclass(frozen=True)
class Literal:
    """Stand for a constant or a type."""

    value: Any


@dataclass(frozen=True)
class Attribute:
    """Stand for an attribute of a value."""

    owner: Tree
    name: str


@dataclass(frozen=True)
class Apply:
    """Stand for an operation on values: a key of `FORMS`, or a method like ".size"."""

    operation: str
    operands: tuple[Tree, ...]


Tree: TypeAlias = "Argument | Read | Literal | Attribute | Apply"

FORMS: Mapping[str, tuple[str, int]] = {
    "is_": ("({} is {})", 2), "is_not": ("({} is not {})", 2), "eq": ("({} == {})", 2), "ne": ("({} != {})", 2),
    "lt": ("({} < {})", 2), "le": ("({} <= {})", 2), "gt": ("({} > {})", 2), "ge": ("({} >= {})", 2),
    "in": ("({} in {})", 2), "not_": ("(not {})", 1), "neg": ("(-{})", 1), "add": ("({} + {})", 2),
    "sub": ("({} - {})", 2), "mul": ("({} * {})", 2), "floordiv": ("({} // {})", 2), "truediv": ("({} / {})", 2),
    "mod": ("({} % {})", 2), "pow": ("({} ** {})", 2), "getitem": ("{}[{}]", 2), "len": ("len({})", 1),
    "tuple": ("tuple({})", 1), "type": ("type({})", 1), "type_name": ("type({}).__name__", 1),

}  # fmt: skip
"""How each operation is written, and on how many values."""

METHODS = DESCRIPTIONS - {"type_as"}
"""The methods that a condition may call."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in FORMS if hasattr(operator, name)},
    **{name: function for function, name in ()},
    "len": len,
    "tuple": tuple,
}
"""What the operations do; but for "in" and those that ask for a type."""


@dataclass(frozen=True)
class Condition:
    """One condition under which a graph holds.

    Attributes:
        tree: true where it does.
        reason: what was assumed, in words.
    """

    tree: Tree
    reason: str

    def guard(self) -> Guard:
        """Return the condition as a guard; the names in it must have been checked."""
        return Guard(_written(self.tree), self.reason)

    def to_json(self) -> dict[str, Any]:
        """Return the condition as plain JSON values.

        Raises:
            ArchiveError: if a constant in it cannot be stored.
        """
        return {"holds": _to_json(self.tree), "reason": self.reason}

    @classmethod
    def from_json(cls, data: Any) -> Condition:
        """Return the condition that `to_json` described.

        Raises:
            ArchiveError: if the description is malformed.
        """
        fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        reason = fields.get("reason")
        if not isinstance(reason, str) or "holds" not in fields:
            raise ArchiveError("a condition is malformed")
        return cls(_from_json(fields["holds"], 0), reason)


def parts(tree: Tree) -> Iterator[Tree]:
    """Yield a tree and every tree in it."""
    yield tree
    below = (tree.owner,) if isinstance(tree, Attribute) else tree.operands if isinstance(tree, Apply) else ()
    for inner in below:
        yield from parts(inner)


def _written(tree: Tree) -> str:
    match tree:
        case Argument(name=name):
            return name
        case Read(target=target):
            *parents, name = target.split(".")
            return attribute_expression(module_expression(parents), name)
        case Literal(value=value):
            return _written_constant(value)
        case Attribute(owner=owner, name=name):
            return f"{_written(owner)}.{name}"
        case Apply(operation=operation, operands=operands):
            written = [_written(operand) for operand in operands]
            if operation.startswith("."):
                return f"{written[0]}{operation}({', '.join(written[1:])})"
            return FORMS[operation][0].format(*written)


def _written_constant(value: Any) -> str:
    if isinstance(value, type):
        return "torch.Size" if value is torch.Size else value.__name__
    if isinstance(value, tuple):
        items = [_written_constant(item) for item in cast("tuple[Any, ...]", value)]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, slice):
        limits = cast("tuple[Any, ...]", (value.start, value.stop, value.step))
        return f"slice({', '.join(map(_written_constant, limits))})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, (int, float)):
        return f"({value!r})"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)


_CONSTANTS = (
    type(None), bool, int, float, str, torch.device, torch.dtype, torch.layout, torch.memory_format, type,
)  # fmt: skip


def _is_constant(value: Any) -> bool:
    if isinstance(value, slice):
        return all(map(_is_constant, cast("tuple[Any, ...]", (value.start, value.stop, value.step))))
    if isinstance(value, tuple):
        return all(map(_is_constant, cast("tuple[Any, ...]", value)))
    return isinstance(value, _CONSTANTS)


def _to_json(tree: Tree) -> Any:
    match tree:
        case Argument(name=name):
            return {"argument": name}
        case Read(target=target):
            return {"read": target}
        case Literal(value=value):
            return {"value": encode(value)}
        case Attribute(owner=owner, name=name):
            return {"attribute": [_to_json(owner), checked_attribute(name)]}
        case Apply(operation=operation, operands=operands):
            return {"apply": [operation, *map(_to_json, operands)]}


def _from_json(data: Any, depth: int) -> Tree:
    if depth > DEEPEST or not isinstance(data, dict) or len(cast("dict[str, Any]", data)) != 1:
        raise ArchiveError("a condition is malformed")
    tag, content = next(iter(cast("dict[str, Any]", data).items()))
    if tag in ("argument", "read") and isinstance(content, str):
        return Argument(content) if tag == "argument" else Read(content)
    if tag == "value" and (_is_constant(value := decode(content)) or value is Absent):
        return Literal(value)
    items = cast("list[Any]", content) if isinstance(content, list) else []
    if tag == "attribute" and len(items) == 2:
        return Attribute(_from_json(items[0], depth + 1), checked_attribute(items[1]))
    if tag == "apply" and items:
        operands = tuple(_from_json(item, depth + 1) for item in items[1:])
        return Apply(_checked_operation(items[0], len(operands)), operands)
    raise ArchiveError("a condition is malformed")


def _checked_operation(name: Any, count: int) -> str:
    if isinstance(name, str) and name.startswith(".") and name[1:] in METHODS and count > 0:
        return name
    if not isinstance(name, str) or name not in FORMS or FORMS[name][1] != count:
        raise ArchiveError(f"{name!r} is no operation of a condition on {count} values")
    return name
