"""Check the text in the description of an exported program: torch's reader evaluates some, and writes some as code."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, cast

from ..errors import ArchiveError

__all__ = ["check_program"]

_NAME = re.compile(r"[\w.\-+]*")
_STRING = re.compile(
    r"[\w.,>\- ]*|Runtime assertion failed for expression [\w <>=+*()]+ on node '\w+'"  # of sizes that data decides
)
_TARGET = re.compile(
    r"torch\.ops\.aten\.(?!(from_file|save|load|set_\w*|_?resize\w*|sparse_resize\w*|\w+_unsafe|_unsafe_masked\w*|_print|warn|"
    r"data|record_stream|_?pin_memory|requires_grad_|retain_grad|_cufft\w*)\b)\w+(\.\w+)?|"
    r"_operator\.(?!(attrgetter|itemgetter|methodcaller|call)\b)\w+|math\.\w+|torch\.sym_\w+|"
    r"torch\.ops\.quantized_decomposed\.(de)?quantize_per_(tensor|channel)\.default|"
    r"torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond)"
)
"""Operators of others: of aten, none that reads files, writes or takes memory as it is."""
_OWN_TARGET = re.compile(r"torch\.ops\.(fxopt)\.(\w+)\.default")

_COMMENTS = frozenset("stack_trace nn_module_stack torch_fn source_fn_stack from_node custom".split())
"""Keys under which a node has what the reader keeps as text."""

_EXPRESSION_NODES = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult,
    ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Call,
    ast.Name, ast.Load, ast.Constant, ast.keyword, ast.Subscript, ast.Attribute,
)  # fmt: skip
_FUNCTIONS = re.compile(
    r"Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|Abs|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Piecewise|floor|ceiling|"
    r"sqrt|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|"
    r"FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|TruncToInt|RoundToInt|"
    r"GreaterThan|LessThan|StrictGreaterThan|StrictLessThan|Equality|Unequality|"
    r"RoundDecimal|ToFloat|Identity|size|stride|storage_offset|dim|item|min|max"
)
_SYMBOL = re.compile(r"[a-z]\d+|oo|true|false|L|args|kwargs")
_SIZES = frozenset("size stride storage_offset dim shape ndim".split())
_STRUCTURES = frozenset("builtins.tuple builtins.list builtins.dict collections.OrderedDict".split())

_LONGEST_EXPRESSION = 10_000
_HIGHEST_POWER = 64
_MOST_DIGITS = 1000
_POWERS = frozenset("Pow PowByNatural FloatPow LShift".split())
_LARGE_NUMBER = re.compile(r"[\d.][eE][+-]?\d{4,}")
"""A number that is worked out digit by digit when it is read."""


def check_program(path: Path, program: dict[str, Any]) -> None:
    """Raise `ArchiveError` unless all that could be run or end up in generated code is known."""
    _Checker(path).check(program)


class _Checker:
    """Walk the description of a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, value: Any, key: str = "") -> None:
        if isinstance(value, str):
            self._text(value, key)
        elif isinstance(value, list):
            for item in cast("list[Any]", value):
                self.check(item, key)
        elif isinstance(value, dict):
            for name, item in cast("dict[str, Any]", value).items():
                if not _NAME.fullmatch(name):
                    raise self._refusal("the name", name)
                if name not in _COMMENTS:
                    self.check(item, name)
                if name in ("as_custom_obj", "custom_obj_values") and item:
                    raise self._refusal("an object", name)

    def _text(self, text: str, key: str) -> None:
        if key in ("target", "as_operator"):
            known = _TARGET.fullmatch(text) is not None or _is_own(text)
        elif key in ("in_spec", "out_spec"):
            known = not text or self._is_structure(json.loads(text)[1])
        elif key in ("expr_str", "guards_code"):
            known = _is_arithmetic(text)
        else:
            known = (_STRING if key in ("as_string", "as_strings") else _NAME).fullmatch(text) is not None
        if not known:
            raise self._refusal(key or "the text", text)

    def _is_structure(self, spec: Any) -> bool:
        """Say whether inputs or outputs are built of plain containers, with keys that are names."""
        context = json.loads(spec["context"]) if isinstance(spec["context"], str) else spec["context"]
        keys = cast("list[Any]", context) if isinstance(context, list) else [] if context is None else [None]
        plain = spec["type"] in (*_STRUCTURES, None) and all(type(key) in (str, int) for key in keys)
        named = all(_NAME.fullmatch(key) for key in keys if isinstance(key, str))
        return plain and named and all(map(self._is_structure, spec["children_spec"]))

    def _refusal(self, what: str, text: str) -> ArchiveError:
        return ArchiveError(f"{self.path} is refused: fxopt does not read {what} {text[:80]!r} from a .pt2 file")


def _is_own(text: str) -> bool:
    """Say whether a target is one of fxopt's operators, which only compute; they are made where a file names one."""
    if _OWN_TARGET.fullmatch(text) is None:
        return False
    from ..cuda_ops import NAMES

    return _OWN_TARGET.sub(r"\1::\2", text) in NAMES


def _is_arithmetic(text: str) -> bool:
    """Say whether text is arithmetic and comparisons of sizes, and nothing else, with numbers that fit in memory."""
    if len(text) > _LONGEST_EXPRESSION or _LARGE_NUMBER.search(text):
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return all(_is_plain(node, id(node) in called) for node in ast.walk(tree)) and _power(tree) <= _HIGHEST_POWER


def _is_plain(node: ast.AST, is_called: bool) -> bool:
    match node:
        case ast.Name(id=name):
            return (_FUNCTIONS if is_called else _SYMBOL).fullmatch(name) is not None
        case ast.Attribute(attr=name):
            return name in _SIZES
        case ast.Constant(value=str() as text):
            return _NAME.fullmatch(text) is not None
        case ast.Constant(value=value):
            return value is None or isinstance(value, (bool, int, float))
        case ast.Call(func=ast.Name(id="Float"), args=[_, *more], keywords=named):
            return all(_size(value) <= _MOST_DIGITS for value in (*more, *(keyword.value for keyword in named)))
        case ast.Call(func=function):
            return isinstance(function, (ast.Name, ast.Attribute))
        case _:
            return isinstance(node, _EXPRESSION_NODES)


def _power(node: ast.AST) -> float:
    """Return the highest power to which something is raised, powers of powers multiplied; infinity if none can tell."""
    below = max(map(_power, ast.iter_child_nodes(node)), default=1.0)
    match node:
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return below * _size(exponent)
        case ast.Call(func=ast.Name(id=name), args=[_, exponent]) if name in _POWERS:
            return below * _size(exponent)
        case ast.Call(func=ast.Name(id=name)) if name in _POWERS:
            return float("inf")
        case _:
            return below


def _size(exponent: ast.AST) -> float:
    """Return the absolute value of an exponent, at least 1; infinity if it is no number."""
    match exponent:
        case ast.Constant(value=int() | float() as value):
            return max(1.0, abs(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _size(operand)
        case ast.Call(func=ast.Name(id="Integer" | "Float" | "Rational"), args=[first, *_]):
            return _size(first)
        case _:
            return float("inf")
