"""A pass's options as text: values written and read by the type of the dataclass field that holds them."""

from __future__ import annotations

import ast
import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, cast

import torch

from ...errors import UsageError, did_you_mean
from ...runtime.values import cached_by_class

__all__ = ["WORD", "Text", "ValueMismatch", "format_options", "format_value", "option_types", "read_value", "type_text"]

WORD = re.compile(r"[^\s,={}\[\]\"'<>]+")
_PLAIN_STRING = re.compile(r"(?!(?:none|true|false|inf|infinity|nan)$)[a-z_][\w.+/-]*", re.ASCII | re.IGNORECASE)
_COLLECTIONS = (tuple, list, frozenset, Sequence)
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")


@dataclasses.dataclass(frozen=True)
class Text:
    """A value in a pipeline string, with its place: a word, a quoted string, or a list of values (`items`)."""

    text: str
    start: int
    end: int
    items: tuple[Text, ...] | None = None

    @property
    def quoted(self) -> bool:
        return self.items is None and self.text[:1] in ("'", '"')

    @property
    def word(self) -> str | None:
        return None if self.quoted or self.items is not None else self.text


class ValueMismatch(Exception):  # a signal between two modules, turned into a PipelineError by one
    """A value is not of the type that its option has."""

    def __init__(self, expected: str, value: Text, hint: str = "") -> None:
        super().__init__(f"expected {expected}, got {value.text}{hint}")
        self.start, self.end = value.start, value.end


def option_types(pass_type: type[Any]) -> dict[str, Any]:
    """Return the type of each option, in the order of the fields; raise UsageError where an annotation is unknown.

    A field left out of comparisons (`field(compare=False)`) holds what text cannot express: tensors, a loader.
    """
    fields = [f.name for f in dataclasses.fields(pass_type) if f.init and f.compare]
    try:
        hints = _hints(pass_type)
    except NameError as error:
        raise UsageError(f"an option of {pass_type.__qualname__} has a type that does not resolve: {error}") from error
    return {name: hints[name] for name in fields}


@cached_by_class
def _hints(pass_type: type[Any]) -> dict[str, Any]:
    """Return what `typing` reads in the annotations of a class: it compiles each anew."""
    return typing.get_type_hints(pass_type)


def format_options(pass_: Any) -> str:
    """Write the options that differ from their defaults as a pipeline has them: "{lowering=bmm}", or nothing."""
    options = _non_default_options(pass_)
    if not options:
        return ""
    wanted = option_types(cast("type[Any]", type(pass_)))
    written = ",".join(f"{key}={format_value(value, wanted[key])}" for key, value in options.items())
    return f"{{{written}}}"


def _non_default_options(pass_: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults, in the order of the fields."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(pass_):
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(pass_, field.name)
        if field.init and field.compare and not (type(value) is type(default) and value == default):
            found[field.name] = value
    return found


def read_value(value: Text, wanted: Any) -> Any:
    """Return `value` as an instance of the type `wanted`, or raise ValueMismatch."""
    if wanted is None or wanted is type(None):
        return _word_of({"none": None}, value, "none")
    origin = typing.get_origin(wanted)
    if origin in (Union, types.UnionType):
        return _read_union(value, wanted)
    if origin is Literal:
        return _read_literal(value, wanted)
    if origin in _COLLECTIONS:
        return _read_collection(value, wanted)
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return _word_of({_enum_word(member): member for member in wanted}, value, type_text(wanted))
    reader = _READERS.get(wanted)
    if reader is None:
        raise ValueMismatch(f"a {type_text(wanted)}, which text cannot express (pass an instance)", value)
    return reader(value)


def _read_union(value: Text, wanted: Any) -> Any:
    # Every word is text, every whole number a number, and one value a list: the narrow members are tried first.
    broad = (int, float, str)
    last = len(broad) + 1 if value.items is None else 0

    def order(member: Any) -> int:
        return broad.index(member) + 1 if member in broad else last * (typing.get_origin(member) in _COLLECTIONS)

    for member in sorted(typing.get_args(wanted), key=order):
        try:
            return read_value(value, member)
        except ValueMismatch:
            continue
    raise ValueMismatch(type_text(wanted), value)


def _read_literal(value: Text, wanted: Any) -> Any:
    members = typing.get_args(wanted)
    if value.quoted and (text := _read_string(value)) in members:
        return text
    return _word_of({str(member).lower(): member for member in members}, value, type_text(wanted))


def _read_collection(value: Text, wanted: Any) -> Any:
    """Read a list; one value that is not in brackets is a list of one, where lists may have any length."""
    origin, members = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is tuple and members[-1:] != (Ellipsis,):
        if value.items is None:
            raise ValueMismatch(type_text(wanted), value)
        if len(members) != len(value.items):
            raise ValueMismatch(f"{len(members)} values", value)
        return tuple(map(read_value, value.items, members))
    read = [read_value(item, members[0]) for item in ((value,) if value.items is None else value.items)]
    return read if origin is list else frozenset(read) if origin is frozenset else tuple(read)


def _read_bool(value: Text) -> bool:
    return _word_of({"true": True, "false": False}, value, "true or false")


def _read_int(value: Text) -> int:
    if value.word is None or not _INTEGER.fullmatch(value.word):
        raise ValueMismatch("a whole number", value)
    return int(value.word)


def _read_float(value: Text) -> float:
    try:
        number = float(value.word or "")
    except ValueError:
        raise ValueMismatch("a number", value) from None
    if number != number:
        raise ValueMismatch("a number", value)
    return number


def _read_string(value: Text) -> str:
    if value.items is not None:
        raise ValueMismatch("text", value)
    if not value.quoted:
        return value.text
    try:
        return ast.literal_eval(value.text)
    except (SyntaxError, ValueError):
        raise ValueMismatch("a quoted string with valid escapes", value) from None


def _read_dtype(value: Text) -> torch.dtype:
    dtypes = {name: found for name, found in vars(torch).items() if isinstance(found, torch.dtype)}
    named = (value.word or "").removeprefix("torch.")
    if named not in dtypes:
        raise ValueMismatch("a dtype", value, did_you_mean(named, dtypes))
    return dtypes[named]


def _word_of(words: dict[str, Any], value: Text, expected: str) -> Any:
    if value.word is None or value.word.lower() not in words:
        near = did_you_mean(value.text, words)
        raise ValueMismatch(expected, value, near if "did you mean" in near else "")
    return words[value.word.lower()]


_READERS: Mapping[Any, Callable[[Text], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_string,
    torch.dtype: _read_dtype,
}


def format_value(value: Any, wanted: Any) -> str:
    """Write a value so that `read_value` gives it back for the type `wanted`."""
    if isinstance(value, enum.Enum):
        return _enum_word(value)
    if value is None or isinstance(value, bool | int | float):
        return repr(value).lower()
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):
        return value if _PLAIN_STRING.fullmatch(value) and not _is_ambiguous(wanted) else repr(value)
    if isinstance(value, tuple | list | frozenset):
        return _format_collection(cast("Sequence[Any]", value), wanted)
    return f"<{type(value).__name__}>"


def _format_collection(values: Sequence[Any], wanted: Any) -> str:
    collection = next((m for m in (wanted, *typing.get_args(wanted)) if typing.get_origin(m) in _COLLECTIONS), None)
    members = [m for m in typing.get_args(collection) if m is not Ellipsis]
    ordered = sorted(values, key=repr) if isinstance(values, frozenset) else list(values)
    each = members if len(members) == len(ordered) else members[:1] * len(ordered) or [Any] * len(ordered)
    return f"[{','.join(map(format_value, ordered, each))}]"


def _is_ambiguous(wanted: Any) -> bool:
    """Say whether a bare word could be read as something other than text."""
    members = [m for m in typing.get_args(wanted) if m is not type(None)]
    return typing.get_origin(wanted) in (Union, types.UnionType) and len(members) > 1


def _enum_word(member: enum.Enum) -> str:
    spelled = isinstance(member.value, str) and WORD.fullmatch(member.value)
    return (member.value if spelled else member.name).lower()


def type_text(wanted: Any) -> str:
    """Say what a type takes, for messages and tables: "auto, loop or bmm", "whole number or none"."""
    origin, members = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return _either([str(member).lower() for member in members])
    if origin in (Union, types.UnionType):
        return _either([type_text(member) for member in sorted(members, key=lambda m: m is type(None))])
    if origin in _COLLECTIONS:
        return "a list like [a,b]"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}
    if wanted in plain:
        return plain[wanted]
    name = str(getattr(wanted, "__name__", wanted))
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return _either([_enum_word(member) for member in wanted])
    return name


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
