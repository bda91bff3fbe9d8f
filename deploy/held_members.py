"""Members that run under `vmap`, as archives hold them: the graph of one of them, and the modules that it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx, nn

from ..errors import ArchiveError
from ..layers.templates import Slot, Template
from ..tracing.structure import map_structure
from .graph_json import FlatGraph, Known, decode_graph, encode_graph
from .nn_modules import build_module, class_name, settings_of
from .values import decode, encode

__all__ = ["HeldMember", "held_member", "member_from_json"]


@dataclass(frozen=True)
class HeldTemplate:
    """A `torch.nn` module whose tensors are operands.

    Attributes:
        kind: its class ("torch.nn.MultiheadAttention").
        settings: what builds it.
        arguments: positional ones and keywords, with a `Slot` for each operand.
        state: names of the tensors and flags that the last operands are.
    """

    kind: str
    settings: Mapping[str, Any]
    arguments: tuple[Any, Any]
    state: tuple[str, ...]


@dataclass(frozen=True)
class HeldMember:
    """What one member computes.

    Attributes:
        flat: its graph; the operands are its placeholders.
        templates: the modules that it calls, by name.
    """

    flat: FlatGraph
    templates: Mapping[str, HeldTemplate] = field(default_factory=dict[str, HeldTemplate])

    def module(self) -> nn.Module:
        """Return the module that computes this.

        Raises:
            ArchiveError: if a template is of no class that archives hold, or its settings are not.
        """
        root = nn.Module()
        for name, held in self.templates.items():
            root.add_module(name, Template(build_module(held.kind, held.settings), held.arguments, held.state))
        return fx.GraphModule(root, self.flat.graph)

    def to_json(self) -> dict[str, Any]:
        """Return the member as plain JSON values, to be merged into those of its module.

        Raises:
            ArchiveError: if it holds what archives do not.
        """
        data: dict[str, Any] = {"member": encode_graph(self.flat)}
        if self.templates:
            data["templates"] = {name: _template_to_json(held) for name, held in self.templates.items()}
        return data


def held_member(member: nn.Module, operands: int) -> HeldMember | None:
    """Return how archives hold a member, or None if they do not.

    Args:
        member: a graph of one member, or the only module that it calls.
        operands: how many it takes.
    """
    if isinstance(member, Template):
        graph = fx.Graph()
        graph.output(graph.call_module("template", tuple(graph.placeholder(f"operand_{i}") for i in range(operands))))
        member = fx.GraphModule({"template": member}, graph)
    if not isinstance(member, fx.GraphModule):
        return None
    templates: dict[str, HeldTemplate] = {}
    for node in member.graph.find_nodes(op="call_module"):
        held = _held_template(member.get_submodule(str(node.target)))
        if held is None:
            return None
        templates[str(node.target)] = held
    placeholders = member.graph.find_nodes(op="placeholder")
    paths = {node.name: (f"operand_{position}",) for position, node in enumerate(placeholders)}
    return HeldMember(FlatGraph(member.graph, paths), templates)


def _held_template(template: nn.Module) -> HeldTemplate | None:
    if not isinstance(template, Template):
        return None
    module: nn.Module = vars(template)["template"]
    kind, settings = class_name(module), settings_of(module)
    if kind is None or settings is None:
        return None
    return HeldTemplate(kind, settings, template.arguments, tuple(template.state))


def member_from_json(fields: Mapping[str, Any], operands: int) -> HeldMember:
    """Return the member that `to_json` described.

    Raises:
        ArchiveError: if the description is malformed, or names what is not allowed.
    """
    described: Any = fields.get("templates", {})
    if not isinstance(described, dict) or not all(map(str.isidentifier, cast("dict[str, Any]", described))):
        raise ArchiveError("the modules of a member are malformed")
    given = cast("dict[str, Any]", described)
    flat = decode_graph(fields.get("member"), Known({f"operand_{i}" for i in range(operands)}, (), given))
    calls = {str(node.target): len(node.args) for node in flat.graph.find_nodes(op="call_module")}
    return HeldMember(flat, {name: _template_from_json(item, calls.get(name, 0)) for name, item in given.items()})


def _template_to_json(held: HeldTemplate) -> dict[str, Any]:
    places: dict[fx.Node, int] = {}
    graph = fx.Graph()

    def node(leaf: Any) -> Any:
        if not isinstance(leaf, Slot):
            return leaf
        new = graph.placeholder(f"operand_{leaf.index}")
        places[new] = leaf.index
        return new

    return {
        "class": held.kind,
        "settings": {key: encode(value) for key, value in held.settings.items()},
        "arguments": encode(map_structure(held.arguments, node), places.__getitem__),
        "state": list(held.state),
    }


def _template_from_json(data: Any, operands: int) -> HeldTemplate:
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    kind, settings, state = (fields.get(key) for key in ("class", "settings", "state"))
    if not isinstance(kind, str) or not isinstance(settings, dict) or not _are_names(state):
        raise ArchiveError("a module of a member is malformed")
    graph = fx.Graph()
    places = {graph.placeholder(f"operand_{i}"): i for i in range(operands)}
    found = decode(fields.get("arguments"), list(places))
    arguments = map_structure(found, lambda leaf: Slot(places[leaf]) if isinstance(leaf, fx.Node) else leaf)
    if not _are_arguments(arguments):
        raise ArchiveError("a module of a member is called with malformed arguments")
    values = {key: decode(value) for key, value in cast("dict[str, Any]", settings).items()}
    return HeldTemplate(kind, values, arguments, tuple(cast("list[str]", state)))


def _are_names(state: object) -> bool:
    return isinstance(state, list) and all(isinstance(name, str) for name in cast("list[Any]", state))


def _are_arguments(arguments: object) -> bool:
    if not isinstance(arguments, tuple) or len(cast("tuple[Any, ...]", arguments)) != 2:
        return False
    args, kwargs = cast("Sequence[object]", arguments)
    named = isinstance(kwargs, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", kwargs))
    return named and isinstance(args, (tuple, list))
