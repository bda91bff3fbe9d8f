"""Read the guards of a capture, which are Python text that the tracer wrote, as trees that an archive may hold."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..errors import ArchiveError
from ..tracing.guards import GUARD_NAMES
from ..tracing.outside import looks_outside
from .conditions import FORMS, METHODS, Apply, Argument, Attribute, Literal, Read, Tree
from .targets import ATTRIBUTES

__all__ = ["conjuncts", "path_of", "reads_self_only"]

_COMPARISONS: Mapping[type, str] = {
    ast.Is: "is_", ast.IsNot: "is_not", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt",
    ast.GtE: "ge", ast.In: "in",
}  # fmt: skip
_ARITHMETIC: Mapping[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Div: "truediv", ast.Mod: "mod",
    ast.Pow: "pow", ast.Not: "not_", ast.USub: "neg",
}  # fmt: skip


_CHANGING = (ATTRIBUTES | METHODS) - {"shape", "ndim"}
"""What a tensor may be asked for that is not its shape."""


class _Unsayable(Exception):
    """A part of a guard has no tree."""


@lru_cache(maxsize=4096)
def conjuncts(expression: str) -> tuple[Tree, ...]:
    """Return what must be true for a guard to hold.

    Raises:
        ArchiveError: if the guard asks for more than trees can say; the message is a clause.
    """
    try:
        body = ast.parse(expression, mode="eval").body
        parts = body.values if isinstance(body, ast.BoolOp) and isinstance(body.op, ast.And) else [body]
        return tuple(_tree(part) for part in parts)
    except (SyntaxError, _Unsayable) as problem:
        raise ArchiveError(f"it holds under {expression!r}, which cannot be checked without its class") from problem


def path_of(expression: str) -> list[str | int]:
    """Return the argument, and the keys inside it, that an expression like `inputs[0]['mask']` names.

    Raises:
        ArchiveError: if it is no such expression; the message is a clause.
    """
    steps: list[str | int] = []
    tree = conjuncts(expression)[0]
    while isinstance(tree, Apply) and tree.operation == "getitem" and isinstance(tree.operands[1], Literal):
        steps.insert(0, tree.operands[1].value)
        tree = tree.operands[0]
    if not isinstance(tree, Argument) or not all(type(step) in (str, int) for step in steps):
        raise ArchiveError(f"its argument {expression!r} cannot be named in an archive")
    return [tree.name, *steps]


@lru_cache(maxsize=4096)
def reads_self_only(expression: str) -> bool:
    """Say whether a guard asks for the structure of the module alone, or for what is outside: an archive keeps both.

    It asks for no argument, no mode, and nothing that moving or casting a tensor changes.
    """
    if looks_outside(expression):
        return True
    if ".training" in expression or "torch.is_" in expression:
        return False
    try:
        nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    except SyntaxError:
        return False
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return "self" in names and names <= {"self", "slice", *GUARD_NAMES} and not read & _CHANGING


def _tree(node: ast.expr) -> Tree:
    match node:
        case ast.Constant(value=value):
            return Literal(value)
        case ast.Tuple(elts=items):
            return Literal(tuple(_constant(item) for item in items))
        case ast.Name(id=name):
            return _name(name)
        case ast.Attribute(value=owner, attr=name):
            return _attribute(owner, name)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            return _call(function, arguments, keywords)
        case _:
            return _operation(node)


def _operation(node: ast.expr) -> Tree:
    match node:
        case ast.Compare(left=left, ops=[comparison], comparators=[right]) if type(comparison) in _COMPARISONS:
            return Apply(_COMPARISONS[type(comparison)], (_tree(left), _tree(right)))
        case ast.BinOp(left=left, op=arithmetic, right=right) if type(arithmetic) in _ARITHMETIC:
            return Apply(_ARITHMETIC[type(arithmetic)], (_tree(left), _tree(right)))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _ARITHMETIC:
            return _signed(_ARITHMETIC[type(sign)], _tree(operand))
        case ast.Subscript(value=owner, slice=key):
            return Apply("getitem", (_tree(owner), _tree(key)))
        case _:
            raise _Unsayable


def _name(name: str) -> Tree:
    if name == "self":
        raise _Unsayable
    return Literal(GUARD_NAMES[name]) if name in GUARD_NAMES else Argument(name)


def _constant(node: ast.expr) -> Any:
    tree = _tree(node)
    if not isinstance(tree, Literal):
        raise _Unsayable
    return tree.value


def _signed(operation: str, operand: Tree) -> Tree:
    if operation == "neg" and isinstance(operand, Literal):
        return Literal(-operand.value)
    return Apply(operation, (operand,))


def _attribute(owner: ast.expr, name: str) -> Tree:
    path = _path_from_self(owner)
    if path is not None:
        return Read(".".join((*path, name)))
    if isinstance(owner, ast.Name) and owner.id == "torch":
        return Literal(getattr(torch, name))
    tree = _tree(owner)
    if name == "__name__" and isinstance(tree, Apply) and tree.operation == "type":
        return Apply("type_name", tree.operands)
    if name not in ATTRIBUTES:
        raise _Unsayable
    return Attribute(tree, name)


def _path_from_self(node: ast.expr) -> tuple[str, ...] | None:
    """Return the names on the way from `self` to what an expression means; None if it starts elsewhere."""
    match node:
        case ast.Name(id=name):
            return () if name == "self" else None
        case ast.Attribute(value=owner, attr=name):
            path, step = _path_from_self(owner), name
        case ast.Subscript(value=ast.Attribute(value=owner, attr="_modules"), slice=ast.Constant(value=str() as name)):
            path, step = _path_from_self(owner), name
        case _:
            return None
    return None if path is None else (*path, step)


def _call(function: ast.expr, arguments: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> Tree:
    match function:
        case ast.Name(id="len" | "type" | "tuple" as name) if len(arguments) == 1 and not keywords:
            return Apply(name, (_tree(arguments[0]),))
        case ast.Name(id="slice" | "float" as name) if arguments and not keywords:
            return Literal({"slice": slice, "float": float}[name](*map(_constant, arguments)))
        case ast.Attribute(value=ast.Name(id="torch"), attr="device"):
            named = {str(keyword.arg): _constant(keyword.value) for keyword in keywords}
            return Literal(torch.device(*map(_constant, arguments), **named))
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if f"torch.{name}" in FORMS and not arguments:
            return Apply(f"torch.{name}", ())
        case ast.Attribute(value=owner, attr=name) if name in METHODS and not keywords:
            return Apply(f".{name}", (_tree(owner), *map(_tree, arguments)))
        case _:
            raise _Unsayable
