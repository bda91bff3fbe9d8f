"""What a flat model computes, as JSON: the arguments of its forward and its graphs."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..errors import ArchiveError
from ..tracing.guards import GUARD_NAMES
from ..tracing.signature import Signature
from .conditions import Argument, Condition, Read, parts
from .graph_json import FlatGraph, Known, decode_graph, encode_graph, is_identifier
from .values import decode, encode

__all__ = ["FlatCode", "FlatVariant", "json_list", "json_object"]

_Kind = inspect.Parameter
_KINDS = {
    kind.name: kind
    for kind in (
        _Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD, _Kind.VAR_POSITIONAL, _Kind.KEYWORD_ONLY, _Kind.VAR_KEYWORD,
    )
}  # fmt: skip


@dataclass(frozen=True)
class FlatVariant:
    """One graph, and when it holds."""

    conditions: tuple[Condition, ...]
    flat: FlatGraph


@dataclass(frozen=True)
class FlatCode:
    """Hold what tells the classes of flat models apart.

    Attributes:
        signature: of the forward.
        variants: the first that holds is run.
        attributes: the tensors and modes that graphs may read.
        modules: the modules that graphs may call.
    """

    signature: Signature
    variants: Sequence[FlatVariant]
    attributes: Collection[str]
    modules: Collection[str]

    def to_json(self) -> dict[str, Any]:
        """Return the code as plain JSON values.

        Raises:
            ArchiveError: if it holds what archives do not.
        """
        return {
            "decorated": self.signature.decorated,
            "parameters": [_parameter_to_json(parameter) for parameter in self.signature.parameters],
            "attributes": list(self.attributes),
            "modules": list(self.modules),
            "variants": [
                {"conditions": [c.to_json() for c in variant.conditions], "nodes": encode_graph(variant.flat)}
                for variant in self.variants
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> FlatCode:
        """Return the code that `to_json` described, once all that it names is allowed.

        Raises:
            ArchiveError: if something is not, or the description is malformed.
        """
        fields = json_object(data)
        signature = _signature(json_list(fields, "parameters"), fields.get("decorated"))
        attributes, modules = (_names(json_list(fields, key)) for key in ("attributes", "modules"))
        known = Known({parameter.name for parameter in signature.parameters}, attributes, modules)
        variants = [_variant(json_object(item), known) for item in json_list(fields, "variants")]
        if not variants:
            raise ArchiveError("the model has no graph")
        return cls(signature, variants, attributes, modules)


def json_object(data: Any) -> Mapping[str, Any]:
    """Return a JSON object.

    Raises:
        ArchiveError: if it is none.
    """
    if not isinstance(data, dict):
        raise ArchiveError("something is no JSON object where one belongs")
    return cast("dict[str, Any]", data)


def json_list(fields: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under a key.

    Raises:
        ArchiveError: if there is none.
    """
    value = fields.get(key)
    if not isinstance(value, list):
        raise ArchiveError(f"it has no list of {key}")
    return cast("list[Any]", value)


def _names(items: Sequence[Any]) -> dict[str, None]:
    if not all(isinstance(item, str) for item in items):
        raise ArchiveError("a name is no text")
    return dict.fromkeys(items)


def _variant(fields: Mapping[str, Any], known: Known) -> FlatVariant:
    conditions = tuple(Condition.from_json(item) for item in json_list(fields, "conditions"))
    for part in (part for condition in conditions for part in parts(condition.tree)):
        if isinstance(part, Argument) and part.name not in known.arguments:
            raise ArchiveError(f"a condition asks for {part.name!r}, which is no argument")
        if isinstance(part, Read) and part.target not in known.attributes:
            raise ArchiveError(f"a condition asks for {part.target!r}, which the model does not hold")
    return FlatVariant(conditions, decode_graph(fields.get("nodes"), known))


def _parameter_to_json(parameter: inspect.Parameter) -> dict[str, Any]:
    data: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind.name}
    if parameter.default is not _Kind.empty:
        data["default"] = encode(parameter.default)
    return data


def _signature(data: Sequence[Any], decorated: Any) -> Signature:
    if type(decorated) is not bool:
        raise ArchiveError("the forward's arguments are malformed")
    try:
        parameters = [_parameter(json_object(item)) for item in data]
        inspect.Signature(parameters)
    except ValueError as error:
        raise ArchiveError(f"the forward's arguments are malformed: {error}") from error
    return Signature(tuple(parameters), decorated)


def _parameter(fields: Mapping[str, Any]) -> inspect.Parameter:
    name, kind = fields.get("name"), fields.get("kind")
    if not isinstance(name, str) or not is_identifier(name) or name == "self" or name in GUARD_NAMES:
        raise ArchiveError(f"{name!r} is no name for an argument")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ArchiveError(f"{kind!r} is no kind of argument")
    return inspect.Parameter(
        name, _KINDS[kind], default=decode(fields["default"]) if "default" in fields else _Kind.empty
    )
