"""Whether the options of a pass hold what its fields say, and words that name modules: names, with `*`, or classes."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, Union, cast

import torch
from torch import nn

from ...compat import modules_by_name
from ...errors import UsageError, did_you_mean
from ...runtime.values import user_class
from ...tracing.program import Program
from .base import Pass
from .options import option_types, type_text

__all__ = ["check_named", "check_option_types", "check_options_read", "module_words", "names_module", "word_for"]

_COLLECTIONS: tuple[Any, ...] = (tuple, list, collections.abc.Sequence)


def check_option_types(pass_: Pass) -> None:
    """Raise UsageError for an option whose value is not of its field's type; the pass checks what text leaves out."""
    if not dataclasses.is_dataclass(pass_):
        return
    for name, wanted in option_types(cast("type[Any]", type(pass_))).items():
        value: Any = getattr(pass_, name)
        if not _fits(value, wanted):
            raise UsageError(f"pass '{pass_.name}': {name}={value!r}; give {type_text(wanted)}")


def check_options_read(pass_name: str, options: Any, chooser: str, read_by: Mapping[str, tuple[str, ...]]) -> None:
    """Raise UsageError for an option that is set, but not read with what the option `chooser` says.

    `read_by`: name of an option -> the choices that read it.
    """
    chosen = getattr(options, chooser)
    for name, choices in read_by.items():
        given, default = getattr(options, name), getattr(cast("Any", type(options)), name)
        if chosen not in choices and given is not default and given != default:
            raise UsageError(
                f"pass '{pass_name}': {name}= is for {chooser}={' and '.join(choices)}, and {chooser}={chosen} does "
                f"not read it; leave {name} out"
            )


def _fits(value: Any, wanted: Any) -> bool:
    origin, members = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is None or wanted is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in members)
    if origin in _COLLECTIONS:
        is_list = isinstance(value, (tuple, list))
        return is_list and all(_fits(item, members[0]) for item in cast("tuple[Any, ...]", value))
    if wanted in (int, float):
        return isinstance(value, (int, wanted)) and not isinstance(value, bool)
    is_judged = isinstance(wanted, type) and issubclass(wanted, (bool, str, enum.Enum, torch.dtype))
    return not is_judged or isinstance(value, wanted)


def module_words(pass_name: str, option: str, given: object) -> tuple[str, ...]:
    """Return the words by which an option names modules, one or several; raise UsageError if it is something else."""
    several = isinstance(given, Iterable) and not isinstance(given, (str, type))
    items: list[object] = list(cast("Iterable[object]", given)) if several else [given]
    return tuple(_word(pass_name, option, item) for item in items)


def _word(pass_name: str, option: str, item: object) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, type):
        return user_class(cast("type[nn.Module]", item)).__name__
    kind = type(item).__name__
    raise UsageError(f"pass '{pass_name}': {option} has a value of type {kind}; give names of modules, or classes")


def names_module(word: str, name: str, module: nn.Module) -> bool:
    """Say whether a word names a module: by its qualified name, which may hold `*`, or by its class."""
    return fnmatchcase(name, word) or user_class(type(module)).__name__ == word


def word_for(words: Sequence[str], name: str, program: Program) -> str | None:
    """Return the first of the words (see `names_module`) that names a module, or one around it; None if none does."""
    parts = name.split(".") if name else []
    around = {path: program.module(path) for count in range(len(parts) + 1) for path in [".".join(parts[:count])]}
    return next((word for word in words if any(names_module(word, *each) for each in around.items())), None)


def check_named(pass_name: str, option: str, words: Sequence[str], model: nn.Module) -> None:
    """Raise UsageError, with the nearest name, where a word of an option names no module."""
    modules: dict[str, nn.Module] = modules_by_name(model)
    for word in words:
        if not any(names_module(word, name, module) for name, module in modules.items()):
            names = [name for name in modules if name]
            names += [user_class(type(module)).__name__ for module in modules.values()]
            raise UsageError(
                f"pass '{pass_name}': {option}={word!r} names nothing in the model{did_you_mean(word, names)}"
            )
