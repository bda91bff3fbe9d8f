"""A flat graph as JSON: a list of nodes in the order in which they run, each an object.

| key | meaning |
|---|---|
| `op` | `placeholder`, `get_attr`, `call_function`, `call_method`, `call_module` or `output`, as in `torch.fx` |
| `name` | what the node is called; a reader may change it |
| `path` | of a placeholder: the argument of the forward, then the keys inside it |
| `target` | a tensor or mode ("encoder.training") of the model; an allowed function or method; a module that is held |
| `args`, `kwargs` | values; absent where there are none |
"""

from __future__ import annotations

import keyword
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from ..errors import ArchiveError
from ..tracing.guards import require
from .targets import check_path, checked_attribute, checked_method, find_function, name_of_function, takes_path
from .values import decode, encode

__all__ = ["FlatGraph", "Known", "decode_graph", "encode_graph", "is_identifier"]

MOST_NODES = 1_000_000
Path = Sequence[str | int]


@dataclass(frozen=True)
class FlatGraph:
    """A graph, and where its placeholders come from.

    Attributes:
        graph: it calls allowed functions and methods, and modules that the model holds.
        paths: name of a placeholder -> the argument of the forward, then the keys inside it.
    """

    graph: fx.Graph
    paths: Mapping[str, Path]


@dataclass(frozen=True)
class Known:
    """What a graph may refer to.

    Attributes:
        arguments: of the forward.
        attributes: names of tensors and modes.
        modules: names of the modules that can be called.
    """

    arguments: Collection[str]
    attributes: Collection[str] = ()
    modules: Collection[str] = ()


def is_identifier(name: object) -> bool:
    """Say whether text may stand as a name in generated code."""
    return isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def encode_graph(flat: FlatGraph) -> list[dict[str, Any]]:
    """Return a graph as JSON.

    Raises:
        ArchiveError: if it holds what archives do not.
    """
    position: dict[fx.Node, int] = {}
    encoded: list[dict[str, Any]] = []
    for node in flat.graph.nodes:
        encoded.append(_encode_node(node, flat.paths, position))
        position[node] = len(position)
    return encoded


def _encode_node(node: fx.Node, paths: Mapping[str, Path], position: Mapping[fx.Node, int]) -> dict[str, Any]:
    data: dict[str, Any] = {"op": node.op, "name": node.name}
    if node.op == "placeholder":
        return {**data, "path": list(paths[node.name])}
    if node.op == "call_function":
        name = name_of_function(node.target)
        if name is None:
            raise ArchiveError(f"{node.target} is no function that an archive may call")
        data["target"] = name
    elif node.op != "output":
        data["target"] = node.target
    if node.args:
        data["args"] = [encode(value, position.__getitem__) for value in node.args]
    if node.kwargs:
        data["kwargs"] = {key: encode(value, position.__getitem__) for key, value in node.kwargs.items()}
    return data


def decode_graph(data: Any, known: Known) -> FlatGraph:
    """Return the graph that JSON describes, once everything it names is allowed and there.

    Raises:
        ArchiveError: if something is not.
    """
    if not isinstance(data, list) or not 0 < len(cast("list[Any]", data)) <= MOST_NODES:
        raise ArchiveError(f"a graph is a list of up to {MOST_NODES:,} nodes")
    reader = _Reader(known)
    for item in cast("list[Any]", data):
        reader.read(item)
    return reader.finished()


class _Reader:
    """Build a graph node by node."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.graph = fx.Graph()
        self.nodes: list[fx.Node] = []
        self.paths: dict[str, Path] = {}

    def read(self, data: Any) -> None:
        fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        op, name = fields.get("op"), fields.get("name")
        if self.nodes and self.nodes[-1].op == "output":
            raise ArchiveError("a graph goes on after its output")
        if not is_identifier(name) or name == "self":
            raise ArchiveError(f"{name!r} is no name for a node")
        args, kwargs = self._arguments(fields)
        if op == "placeholder":
            node = self._placeholder(str(name), fields.get("path"))
        elif op == "output" and len(args) == 1 and not kwargs:
            node = self.graph.output(args[0])
        else:
            target = self._target(op, fields.get("target"), args)
            node = self.graph.create_node(str(op), target, args, kwargs, str(name))
        self.nodes.append(node)

    def finished(self) -> FlatGraph:
        if self.nodes[-1].op != "output":
            raise ArchiveError("a graph has no output")
        return FlatGraph(self.graph, self.paths)

    def _arguments(self, fields: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = fields.get("args", []), fields.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ArchiveError("a node's arguments are a list and an object")
        named = cast("dict[str, Any]", kwargs)
        if not all(map(is_identifier, named)):
            raise ArchiveError(f"a node has arguments called {sorted(named)}")
        values = tuple(decode(value, self.nodes) for value in cast("list[Any]", args))
        return values, {key: decode(value, self.nodes) for key, value in named.items()}

    def _placeholder(self, name: str, path: Any) -> fx.Node:
        steps = cast("list[Any]", path) if isinstance(path, list) else []
        if not steps or not all(type(step) in (str, int) for step in steps) or steps[0] not in self.known.arguments:
            raise ArchiveError(f"{path!r} is no place in the arguments")
        node = self.graph.create_node("placeholder", name, name=name)
        self.paths[node.name] = tuple(steps)
        return node

    def _target(self, op: Any, target: Any, args: Sequence[Any]) -> Any:
        if op == "call_function":
            return self._function(target, args)
        if op == "call_method" and args:
            return checked_method(target)
        if not isinstance(target, str):
            raise ArchiveError(f"{target!r} is no name for a node to refer to")
        if op == "call_module" and target in self.known.modules:
            return target
        if op == "get_attr" and target in self.known.attributes:
            return target
        raise ArchiveError(f"{op!r} with the target {target!r} is nothing that a graph may do")

    def _function(self, target: Any, args: Sequence[Any]) -> Any:
        function = find_function(target)
        if function is getattr:
            if len(args) != 2:
                raise ArchiveError("an attribute is read with other arguments than a value and a name")
            checked_attribute(args[1])
        if takes_path(function):
            check_path(args[0] if args else None)
        if function is require and (len(args) != 4 or args[3] is not False or not isinstance(args[2], str)):
            raise ArchiveError("a check has other arguments than a value, what is expected, and a reason")
        return function
