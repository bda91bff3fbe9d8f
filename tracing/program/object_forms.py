"""Objects in example calls, such as caches: what they hold, and new ones made without running code of their class."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from torch import nn

from ...compat import all_modules
from ...runtime.values import has_attributes, is_namedtuple, parts_of, user_class

__all__ = ["Unmade", "class_of", "class_text", "held_by", "made_of", "packages_of"]


_GRAPH = "torch_geometric.data.data:Data"


class Unmade(LookupError):
    """A class that is not imported, or whose package nobody allowed; the text says which."""


def packages_of(model: nn.Module) -> set[str]:
    """Return the packages, torch aside, of a model's modules: objects of their classes are what the model takes."""
    classes = {base for module in all_modules(model) for base in user_class(type(module)).__mro__}
    return {base.__module__.partition(".")[0] for base in classes} - {"builtins", "torch", "typing"}


def held_by(value: object) -> dict[str, Any] | None:
    """Return what an object holds by name; None for what is no object, or cannot be made again from that."""
    if _is_graph(type(value)):
        return cast("Any", value).to_dict()
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not (is_record or is_namedtuple(value) or has_attributes(value)):
        return None
    if not is_record and isinstance(value, Mapping):
        return None
    names_and_parts = vars(value).items() if has_attributes(value) else parts_of(value)
    return dict(cast("Iterable[tuple[str, Any]]", names_and_parts))


def class_text(cls: type) -> str:
    """Return `module:Class`; LookupError where that does not lead back to the class."""
    if _is_graph(cls):  # batches of graphs too: their classes are made on the fly
        return _GRAPH
    text = f"{cls.__module__}:{cls.__qualname__}"
    if class_of(text, None) is not cls:
        raise Unmade(f"{text} is another class")
    return text


def class_of(text: str, packages: Collection[str] | None) -> type:
    """Return an imported class of one of these packages, of any for None; Unmade for others. Nothing is imported, and
    classes whose objects run code when they are thrown away are left out.
    """
    module, _, path = text.partition(":")
    if packages is not None and module.partition(".")[0] not in packages:
        raise Unmade(text)
    found: object = sys.modules.get(module)
    for name in path.split("."):
        found = cast("Mapping[str, object]", getattr(found, "__dict__", {})).get(name)
    if not isinstance(found, type) or issubclass(found, nn.Module):
        raise Unmade(text)
    cls = cast("type[object]", found)
    if cls.__module__ != module or hasattr(cls, "__del__"):
        raise Unmade(text)
    return cls


def made_of(cls: type, held: Mapping[str, Any]) -> Any:
    """Return an object of a class that holds this; ValueError where it cannot. No `__init__` runs, but that of
    graphs of PyTorch Geometric.
    """
    if any(name.startswith("__") for name in held):
        raise ValueError("the form of an object is malformed")
    try:
        if _is_graph(cls):
            return cast("Any", cls).from_dict(dict(held))
        return _tuple(cls, held) if issubclass(cls, tuple) else _object(cls, held)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError("the form of an object does not fit its class") from error


def _is_graph(cls: type) -> bool:
    return any(f"{base.__module__}:{base.__qualname__}" == _GRAPH for base in cls.__mro__)


def _tuple(cls: Any, held: Mapping[str, Any]) -> Any:
    return tuple.__new__(cls, [held[name] for name in cls._fields])


def _object(cls: Any, held: Mapping[str, Any]) -> Any:
    kind = cast("Any", next(kind for kind in (OrderedDict, dict, object) if issubclass(cls, kind)))
    new: Any = kind.__new__(cls)
    if hasattr(new, "__dict__"):
        vars(new).update(held)
    else:
        for name, value in held.items():
            object.__setattr__(new, name, value)
    if kind is not object:  # outputs of transformers are dictionaries, too, of the fields that are given
        given = {field.name: held[field.name] for field in dataclasses.fields(new) if field.name in held}
        kind.update(new, {name: value for name, value in given.items() if value is not None})
    return new
