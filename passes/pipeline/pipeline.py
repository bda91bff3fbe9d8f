"""Pipelines as text: `fuse_ensembles{lowering=bmm}, eliminate_dead_code` and the passes it stands for.

Grammar, with spaces allowed between any two tokens:

    pipeline := [ pass { "," pass } ]
    pass     := NAME [ "{" [ option { "," option } ] "}" ]
    option   := NAME "=" value
    value    := WORD | STRING | "[" [ value { "," value } ] "]"

NAME is that of a pass or of a preset, which may have options too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, get_args

from ...errors import PipelineError, UsageError, did_you_mean
from ...known_passes import PRESET_OPTIONS, PRESETS, members_of
from ..contract import WORD, Pass, Text, ValueMismatch, option_types, read_value
from .registry import find_pass

__all__ = ["parse", "parse_groups"]

T = TypeVar("T")
_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_TOKEN = re.compile(rf"\s*(?:(?P<mark>[,={{}}\[\]])|(?P<string>{_STRING})|(?P<word>{WORD.pattern}))")


def parse(text: str, find: Callable[[str], type[Pass]] = find_pass) -> tuple[Pass, ...]:
    """Return the passes that a pipeline string such as ``"fuse_ensembles{lowering=bmm}, inference"`` names.

    `find` gives the class for a name, or raises UsageError. Raises PipelineError, whose message shows the place.
    """
    return tuple(pass_ for group in parse_groups(text, find) for pass_ in group)


def parse_groups(text: str, find: Callable[[str], type[Pass]] = find_pass) -> tuple[tuple[Pass, ...], ...]:
    """Return what each name in a pipeline string stands for, as `parse` does: of a preset, all its passes."""
    return _Parser(re.sub(r"\s", " ", text), find).groups()


@dataclasses.dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


class _Parser:
    """Read one pipeline string, left to right; `here` is the token to be read next."""

    def __init__(self, text: str, find: Callable[[str], type[Pass]]) -> None:
        self.text, self.find = text, find
        self.here = self._token_at(0)

    def groups(self) -> tuple[tuple[Pass, ...], ...]:
        if self.here.kind == "end":
            return ()
        return tuple(self.listed(self.passes, "end", "',' or the end"))

    def passes(self) -> tuple[Pass, ...]:
        """Read one pass, or the several that a preset stands for."""
        name = self.take("word", "the name of a pass")
        if name.text in PRESETS:
            wanted = {option: Literal[tuple(values)] for option, values in PRESET_OPTIONS.get(name.text, {}).items()}
            members = members_of(name.text, self.options(wanted, name.text))
            return tuple(pass_ for member in members for pass_ in parse(member, self.find))
        try:
            pass_type = self.find(name.text)
        except UsageError as error:
            raise self.error(str(error), name.start, name.end) from error
        return (self.build(pass_type, name, self.options(option_types(pass_type), name.text)),)

    def options(self, wanted: dict[str, Any], owner: str) -> dict[str, Any]:
        """Read the options in braces, where there are any."""
        read: dict[str, Any] = {}
        if self.skip("{") and not self.skip("}"):
            self.listed(lambda: self.option(owner, wanted, read), "}", "',' or '}'")
        return read

    def option(self, owner: str, wanted: dict[str, Any], read: dict[str, Any]) -> None:
        key = self.take("word", "the name of an option")
        if key.text not in wanted:
            hint = _as_a_value(key.text, wanted) or did_you_mean(key.text, wanted) if wanted else "; it has none"
            raise self.error(f"{owner!r} has no option {key.text!r}{hint}", key.start, key.end)
        if key.text in read:
            raise self.error(f"option {key.text!r} is given twice", key.start, key.end)
        self.take("=", f"'=' and a value for {key.text!r}")
        try:
            start = self.here.start
            read[key.text] = read_value(self.value(), wanted[key.text])
        except ValueMismatch as mismatch:
            raise self.error(f"option {key.text!r}: {mismatch}", mismatch.start, mismatch.end) from None
        if self.here.kind == "word":
            together = self.text[start : self.here.end].replace(" ", "")
            raise self.error(f"a value has no spaces in it; write {together}, or quote it", start, self.here.end)

    def value(self) -> Text:
        opening = self.here
        if not self.skip("["):
            token = self.take(("word", "string"), "a value")
            return Text(token.text, token.start, token.end)
        items = () if self.here.text == "]" else tuple(self.listed(self.value, None, "',' or ']'"))
        closing = self.take("]", "',' or ']'")
        return Text(self.text[opening.start : closing.end], opening.start, closing.end, items)

    def listed(self, read: Callable[[], T], closing: str | None, expected: str) -> list[T]:
        """Read one or more things with commas between, and the token that closes them."""
        found = [read()]
        while self.skip(","):
            found.append(read())
        if closing is not None:
            self.take(closing, expected)
        return found

    def build(self, pass_type: type[Pass], name: _Token, options: dict[str, Any]) -> Pass:
        required = [f.name for f in dataclasses.fields(cast(Any, pass_type)) if f.init and _has_no_default(f)]
        missing = [key for key in required if key not in options]
        if missing:
            raise self.error(f"{name.text!r} needs the option {missing[0]!r}", name.start, name.end)
        try:
            return pass_type(**options)
        except (UsageError, ValueError, TypeError) as error:
            why = str(error).removeprefix(f"pass {name.text!r}: ")
            raise self.error(f"{name.text!r} refuses these options: {why}", name.start, self.last_end) from error

    def take(self, kind: str | tuple[str, ...], expected: str) -> _Token:
        """Return the next token if it is of this kind (or is this mark), and move past it."""
        token = self.here
        if (token.text if token.kind == "mark" else token.kind) not in ((kind,) if isinstance(kind, str) else kind):
            got = "the end" if token.kind == "end" else repr(token.text) if token.kind != "string" else token.text
            raise self.error(f"expected {expected}, got {got}", token.start, token.end)
        self.last_end = token.end
        if token.kind != "end":
            self.here = self._token_at(token.end)
        return token

    def skip(self, mark: str) -> bool:
        """Move past the next token if it is this mark, and say whether it was."""
        if self.here.kind != "mark" or self.here.text != mark:
            return False
        self.take(mark, mark)
        return True

    def error(self, message: str, start: int, end: int) -> PipelineError:
        return PipelineError(message, self.text, start, end)

    def _token_at(self, start: int) -> _Token:
        if not self.text[start:].strip():
            return _Token("end", "", len(self.text.rstrip()), len(self.text.rstrip()))
        match = _TOKEN.match(self.text, start)
        if match is None:
            at = start + len(self.text[start:]) - len(self.text[start:].lstrip())
            what = "a quote that is not closed" if self.text[at] in "'\"" else f"{self.text[at]!r} has no meaning here"
            raise self.error(what, at, at + 1)
        kind = match.lastgroup or ""
        return _Token(kind, match[kind], match.start(kind), match.end(kind))


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _as_a_value(word: str, wanted: dict[str, Any]) -> str:
    """Return how a value is written that stands where an option should, else nothing."""
    return next((f"; write {name}={word}" for name, kind in wanted.items() if word in get_args(kind)), "")
