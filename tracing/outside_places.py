"""Look at what modules of Python, classes and plain objects hold, running no code of the user's, and put it back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

from .class_cache import cached_by_class
from .reached_code import is_foreign, is_of_user

__all__ = [
    "MISSING",
    "Place",
    "attributes_of",
    "class_attribute",
    "held",
    "holds_attributes",
    "is_readable",
    "own_method",
]

MISSING: Any = object()
"""Stands for what there is not; it has no spelling in a condition."""
_UNKNOWN: Any = object()
_BARE: tuple[type, ...] = (SimpleNamespace, Namespace)
"""Classes of the standard library whose objects hold what users put there."""
_BARE_SETTERS: Any = tuple(cls.__setattr__ for cls in _BARE)


class Place(NamedTuple):
    """Something that code sets: a global in a dictionary of such, or an attribute of a module, a class or an object."""

    owner: Any
    name: str

    def content(self) -> Any:
        """Return what is there itself, without what classes and bases have; `_UNKNOWN` where one cannot see."""
        if isinstance(self.owner, dict):
            return self._attributes().get(self.name, MISSING)
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.name, MISSING)
        slot = self._on_class()
        if isinstance(slot, MemberDescriptorType):
            return _in_slot(slot, self.owner)
        if not self._is_plain(slot):
            return _UNKNOWN
        return self._attributes().get(self.name, MISSING)

    def is_known(self) -> bool:
        """Say whether setting it can be seen, and taken back."""
        return self.content() is not _UNKNOWN

    def put(self, value: Any) -> None:
        """Put back what was there; `MISSING` for nothing."""
        owner = self.owner
        if isinstance(owner, type):
            type.__delattr__(owner, self.name) if value is MISSING else type.__setattr__(owner, self.name, value)
        elif not isinstance(owner, dict) and isinstance(self._on_class(), MemberDescriptorType):
            object.__delattr__(owner, self.name) if value is MISSING else object.__setattr__(owner, self.name, value)
        elif value is MISSING:
            self._attributes().pop(self.name, None)
        else:
            self._attributes()[self.name] = value

    def _on_class(self) -> Any:
        return class_attribute(cast("type[Any]", type(self.owner)), self.name)

    def _attributes(self) -> dict[str, Any]:
        owner: Any = self.owner
        return cast("dict[str, Any]", owner if isinstance(owner, dict) else vars(owner))

    def _is_plain(self, on_class: Any) -> bool:
        """Tell whether setting the attribute only puts it among the object's own."""
        sets = own_method(cast("type[Any]", type(self.owner)), "__setattr__")
        is_plain = hasattr(self.owner, "__dict__") and sets in (
            object.__setattr__,
            ModuleType.__setattr__,
            *_BARE_SETTERS,
        )
        return is_plain and not hasattr(cast("type[Any]", type(on_class)), "__set__")


def own_method(cls: type, name: str) -> Any:
    """Return a method of a class: the one that was there before what tells of its calls while a forward is traced."""
    method = getattr(cls, name)
    return getattr(method, "fxopt_original", method)


def holds_attributes(cls: type) -> bool:
    """Say whether objects of a class are the user's, and plain ones."""
    return cls in _BARE or is_of_user(cls)


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return what an object has itself as attributes, in its dictionary and in its slots, as a new dictionary."""
    cls = cast("type[Any]", type(owner))
    found = {name: value for name, slot in _slots(cls) if (value := _in_slot(slot, owner)) is not MISSING}
    return {**found, **object.__getattribute__(owner, "__dict__")} if _has_dictionary(cls) else found


def _slots(cls: type) -> list[tuple[str, MemberDescriptorType]]:
    members = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return [(name, value) for name, value in members.items() if isinstance(value, MemberDescriptorType)]


@cached_by_class
def _has_dictionary(cls: type) -> bool:
    return cls.__dictoffset__ != 0


def class_attribute(cls: type, name: str) -> Any:
    """Return what a class, or a base of it, has as an attribute; an object without a spelling where it has none."""
    for base in cls.__mro__:
        held = vars(base)
        if name in held:
            return held[name]
    return MISSING


def held(owner: Any, name: str) -> Any:
    """Return an attribute of a module, a class or a plain object, where reading it runs no code of the user's."""
    if isinstance(owner, ModuleType):
        return vars(owner).get(name, MISSING)
    if isinstance(owner, type):
        return class_attribute(owner, name)
    cls = cast("type[Any]", type(owner))
    if own_method(cls, "__getattribute__") is not object.__getattribute__ and cls not in _BARE:
        return MISSING
    on_class = class_attribute(cls, name)
    if isinstance(on_class, MemberDescriptorType):
        return _in_slot(on_class, owner)
    if hasattr(cast("type[Any]", type(on_class)), "__set__"):  # a property
        return MISSING
    attributes: Mapping[str, Any] = getattr(owner, "__dict__", {})
    return attributes.get(name, on_class)


def is_readable(owner: Any) -> bool:
    """Say whether what an owner holds is the user's, so that it is guarded."""
    if isinstance(owner, ModuleType):
        return not is_foreign(owner.__name__)
    cls = cast("type[Any]", owner if isinstance(owner, type) else type(owner))
    return cls in _BARE or not is_foreign(cls.__module__)


def _in_slot(slot: MemberDescriptorType, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:  # not set
        return MISSING
