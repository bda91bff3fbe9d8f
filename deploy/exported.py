"""Read `.pt2` files of `torch.export` without running anything from them.

`torch.export.load` alone will not do: it unpickles what its weights-only reader refuses, loads shared libraries, and
hands text from the file to `eval` (sizes), `exec` (guards, names of arguments) and the importer (enumerations). So a
file is checked first, entry by entry, and what it names beyond torch's own operators is refused.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from ..compat import load_exported_program
from ..errors import ArchiveError
from ..settings import weights_only
from ..tracing.inputs import Inputs
from .container import UNREADABLE, checked_entries, read_json

__all__ = ["is_exported", "load_exported"]

_ENTRIES = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id|models/model\.json|"
    r"data/weights/(model_weights_config\.json|weight_\d+)|data/constants/(model_constants_config\.json|tensor_\d+)|"
    r"data/sample_inputs/model\.pt|extra/[\w.]+)"
)
_PAYLOADS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")

_NAME = re.compile(r"[\w.\-+]*")
_STRING = re.compile(r"[\w.,>\- ]*")
_TARGET = re.compile(
    r"torch\.ops\.aten\.(?!(from_file|save|load|set_|resize_)\b)\w+(\.\w+)?|_operator\.\w+|math\.\w+|torch\.sym_\w+|"
    r"torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond)"
)
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
    r"RoundDecimal|ToFloat|Identity|size|stride|storage_offset|dim|item"
)
_SYMBOL = re.compile(r"[a-z]\d+|oo|true|false|L|args|kwargs")
_SIZES = frozenset("size stride storage_offset dim shape ndim".split())
_STRUCTURES = frozenset("builtins.tuple builtins.list builtins.dict collections.OrderedDict".split())


def is_exported(names: Iterator[str] | list[str]) -> bool:
    """Say whether a zip file with these entries was written by `torch.export`."""
    return any(
        name.partition("/")[2] == "archive_format" or name == "serialized_exported_program.json" for name in names
    )


def load_exported(path: Path) -> tuple[nn.Module, Inputs | None]:
    """Return the module that a `.pt2` file describes, and the example inputs if it has any.

    Raises:
        ArchiveError: it cannot be read, or holds anything but torch's own operators and plain tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check(path, archive)
    except (*UNREADABLE, LookupError, TypeError, RecursionError) as error:
        raise ArchiveError(f"{path} is no readable .pt2 file: {error}") from error
    try:
        with weights_only():
            program = load_exported_program(str(path))
        inputs = cast("tuple[tuple[Any, ...], dict[str, Any]] | None", program.example_inputs)
        return program.module(), None if inputs is None else Inputs(*inputs[0], **inputs[1])
    except Exception as error:  # the reader asserts what it expects, and raises whatever it meets
        first = (str(error).strip().splitlines() or [""])[0]
        raise ArchiveError(f"{path} is no readable .pt2 file: {type(error).__name__}: {first}") from error


def _check(path: Path, archive: zipfile.ZipFile) -> None:
    entries = checked_entries(path, archive)
    for name in entries:
        if not _ENTRIES.fullmatch(name):
            raise ArchiveError(f"{path} holds {name!r}; fxopt reads .pt2 files of one exported program, without code")
    root = next(iter(entries)).partition("/")[0]
    for name in _PAYLOADS:
        _check_payloads(path, root, name, entries, read_json(path, name, archive.read(f"{root}/{name}")))
    for name in (f"{root}/models/model.json",):
        _Checker(path).check(read_json(path, name, archive.read(name)))


def _check_payloads(
    path: Path, root: str, name: str, entries: Mapping[str, zipfile.ZipInfo], data: Mapping[str, Any]
) -> None:
    """Make sure that tensors come from entries for tensors, and take no more memory than the file has."""
    folder = name.rpartition("/")[0]
    payloads: Any = data.get("config")
    for payload in cast("dict[str, Any]", payloads).values() if isinstance(payloads, dict) else ():
        target = cast("dict[str, Any]", payload).get("path_name") if isinstance(payload, dict) else None
        entry = entries.get(f"{root}/{folder}/{target}")
        if not isinstance(target, str) or not _PAYLOAD.fullmatch(target) or entry is None:
            raise ArchiveError(f"{path} holds {target!r}, which is no tensor")
        meta: Any = cast("dict[str, Any]", payload).get("tensor_meta")
        sizes: Any = cast("dict[str, Any]", meta).get("sizes") if isinstance(meta, dict) else None
        if entry.file_size == 0 and (not isinstance(sizes, list) or {"as_int": 0} not in sizes):
            raise ArchiveError(f"{path}: the tensor {target!r} has no data")


class _Checker:
    """Walk the description of a program; whatever could be run, or could end up in generated code, must be known."""

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
            known = _TARGET.fullmatch(text) is not None
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
        return ArchiveError(f"{self.path} is refused: {what} {text[:80]!r} is none that fxopt reads from a .pt2 file")


def _is_arithmetic(text: str) -> bool:
    """Say whether text is arithmetic and comparisons of sizes, and nothing else."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return all(_is_plain(node, id(node) in called) for node in ast.walk(tree))


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
        case ast.Call(func=function):
            return isinstance(function, (ast.Name, ast.Attribute))
        case _:
            return isinstance(node, _EXPRESSION_NODES)
