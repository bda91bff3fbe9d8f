"""Whether the options of a pass hold values of the types that its fields have."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, cast

import torch

from ...errors import UsageError
from .base import Pass
from .options import option_types, type_text

__all__ = ["check_option_types", "check_options_read"]

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
