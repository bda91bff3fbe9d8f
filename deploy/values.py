"""The values inside a standalone archive, as JSON: numbers, text and lists as they are, the rest as tagged objects.

| JSON | value |
|---|---|
| `null`, `true`, `3`, `0.5`, `"mean"`, `[...]` | the same in Python |
| `{"node": 3}` | what node 3 of the graph computes |
| `{"tuple": [...]}`, `{"slice": [start, stop, step]}`, `{"range": [start, stop, step]}` | the container named |
| `{"dict": [[key, value], ...]}` | a dictionary, in order |
| `{"float": "inf"}`, `{"complex": [real, imaginary]}`, `{"ellipsis": null}` | what JSON has no word for |
| `{"dtype": "float32"}`, `{"device": "cuda:0"}` | torch's |
| `{"layout": "strided"}`, `{"memory_format": "channels_last"}` | torch's too |
| `{"absent": null}`, `{"type": "tuple"}` | in conditions: an argument not given; a type |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from ..errors import ArchiveError
from ..tracing.signature import Absent

__all__ = ["decode", "encode"]

DEEPEST = 20
"""Values nest no deeper; Python's own parser gives up at 200 brackets."""

_TYPES: Mapping[str, type] = {
    kind.__name__: kind for kind in (tuple, list, dict, int, float, str, bool, bytes, Tensor, slice, torch.Size)
}
_CONSTANTS: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def encode(value: Any, number: Callable[[fx.Node], int] | None = None) -> Any:
    """Return a value as JSON.

    Args:
        value: constants, containers of them, and nodes of a graph.
        number: the position of a node; None where there may be none.

    Raises:
        ArchiveError: if it is, or holds, anything else; the message is a clause ("a Config cannot be stored").
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, fx.Node) and number is not None:
        return {"node": number(value)}
    if type(value) in (float, complex):
        return _encode_number(value)
    if isinstance(value, (tuple, list, dict, slice, range)):
        return _encode_container(value, number)
    return _encode_constant(value)


def _encode_number(value: Any) -> Any:
    if isinstance(value, complex):
        return {"complex": [_encode_number(value.real), _encode_number(value.imag)]}
    return value if math.isfinite(value) else {"float": str(value)}


def _encode_container(value: Any, number: Callable[[fx.Node], int] | None) -> Any:
    if isinstance(value, (slice, range)):
        limits = cast("tuple[Any, ...]", (value.start, value.stop, value.step))
        return {type(cast("object", value)).__name__: [encode(part, number) for part in limits]}
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return {"dict": [[encode(key), encode(item, number)] for key, item in pairs]}
    items = [encode(item, number) for item in cast("Sequence[Any]", value)]
    if hasattr(cast("object", value), "_fields"):
        raise ArchiveError(f"the named tuple {type(cast('object', value)).__name__} cannot be stored")
    return items if isinstance(value, list) else {"tuple": items}


def _encode_constant(value: Any) -> Any:
    if value is ...:
        return {"ellipsis": None}
    if value is Absent:
        return {"absent": None}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for tag, kind in _CONSTANTS.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    raise ArchiveError(f"a {kind} cannot be stored")


def decode(data: Any, nodes: Sequence[fx.Node] = (), depth: int = 0) -> Any:
    """Return the value that JSON stands for.

    Args:
        data: what `encode` made, or what somebody else did.
        nodes: those that it may refer to.
        depth: how deep inside another value this is.

    Raises:
        ArchiveError: if it stands for none.
    """
    if depth > DEEPEST:
        raise ArchiveError("a value is nested too deeply")
    if isinstance(data, float) and not math.isfinite(data):
        raise ArchiveError("a number is too large")
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [decode(item, nodes, depth + 1) for item in cast("list[Any]", data)]
    if not isinstance(data, dict) or len(cast("dict[str, Any]", data)) != 1:
        raise ArchiveError("a value is neither plain nor an object with one key")
    tag, content = next(iter(cast("dict[str, Any]", data).items()))
    if tag == "node":
        return _node(content, nodes)
    if tag in ("tuple", "slice", "range", "dict"):
        return _decode_container(tag, content, nodes, depth)
    return _decode_constant(tag, content)


def _node(index: Any, nodes: Sequence[fx.Node]) -> fx.Node:
    if type(index) is not int or not 0 <= index < len(nodes):
        raise ArchiveError(f"{index!r} is no node that comes before")
    return nodes[index]


def _decode_container(tag: str, content: Any, nodes: Sequence[fx.Node], depth: int) -> Any:
    if not isinstance(content, list):
        raise ArchiveError(f"a {tag} has no list of items")
    items = [decode(item, nodes, depth + 1) for item in cast("list[Any]", content)]
    if tag == "tuple":
        return tuple(items)
    if tag == "dict":
        return _dictionary(items)
    if tag == "slice" and len(items) == 3:
        return slice(*items)
    if tag == "range" and len(items) == 3 and all(type(item) is int for item in items) and items[2] != 0:
        return range(*items)
    raise ArchiveError(f"a {tag} has the wrong items")


def _dictionary(pairs: Sequence[Any]) -> dict[Any, Any]:
    if not all(isinstance(pair, list) and len(cast("list[Any]", pair)) == 2 for pair in pairs):
        raise ArchiveError("a dictionary has something else than pairs")
    if not all(isinstance(key, (str, int, float, bool, type(None))) for key, _ in pairs):
        raise ArchiveError("a dictionary has a key that is neither text nor a number")
    return dict(pairs)


def _decode_constant(tag: str, content: Any) -> Any:
    if tag == "ellipsis":
        return ...
    if tag == "absent":
        return Absent
    if tag == "complex" and isinstance(content, list):
        return _complex(cast("list[Any]", content))
    if not isinstance(content, str):
        raise ArchiveError(f"a {tag!r} is not text")
    if tag == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if tag == "device":
        return _device(content)
    if tag == "type" and content in _TYPES:
        return _TYPES[content]
    return _torch_constant(tag, content)


def _complex(parts: Sequence[Any]) -> complex:
    numbers = [decode(part) for part in parts]
    if len(numbers) != 2 or not all(type(number) in (int, float) for number in numbers):
        raise ArchiveError("a complex number has two parts")
    return complex(*numbers)


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except (RuntimeError, ValueError) as error:
        raise ArchiveError(f"{text!r} is no device that this torch knows") from error


def _torch_constant(tag: str, name: str) -> Any:
    found = getattr(torch, name, None) if name.isidentifier() and not name.startswith("_") else None
    if tag not in _CONSTANTS or not isinstance(found, _CONSTANTS[tag]):
        raise ArchiveError(f"{tag} {name!r} means nothing to this torch")
    return found
