"""Whether the options of a pass hold values of the types that its fields have."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from typing import Any, Literal, Union, cast

from ...errors import UsageError
from .base import Pass
from .options import option_types, type_text

__all__ = ["check_option_types"]

_COLLECTIONS: tuple[Any, ...] = (tuple, list, collections.abc.Sequence)


def check_option_types(pass_: Pass) -> None:
    """Refuse options whose values are not of the types of their fields; those that text leaves out are the pass's.

    Raises:
        UsageError: the first of them, by name.
    """
    if not dataclasses.is_dataclass(pass_):
        return
    for name, wanted in option_types(cast("type[Any]", type(pass_))).items():
        value: Any = getattr(pass_, name)
        if not _fits(value, wanted):
            raise UsageError(f"pass '{pass_.name}': {name}={value!r}; give {type_text(wanted)}")


def _fits(value: Any, wanted: Any) -> bool:
    origin, members = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is None or wanted is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if origin is Literal:  # which word it is, a pass says with more to it
        return any(type(value) is type(member) for member in members)
    if origin in _COLLECTIONS:
        return isinstance(value, (tuple, list))
    if wanted in (int, float):
        return isinstance(value, (int, wanted)) and not isinstance(value, bool)
    return isinstance(value, wanted) if wanted in (bool, str) else True
