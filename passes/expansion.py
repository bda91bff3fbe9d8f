"""A module's dataflow with its children opened up, as plain records: what structural analyses read.

Captured children and `torch.nn` leaves are expanded into the operators they call, so that a loop over Sequentials, a
comprehension over user classes and a line of functional calls all look the same. Nothing here changes the program;
each record knows the node it came from.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torch import fx, nn
from torch.nn.utils import parametrize

from ..errors import CaptureError
from ..tracing.captured import Capture, capture_of
from ..tracing.leaf_graphs import trace_leaf
from . import operators
from .batchable_modules import module_operator

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["Expansion", "Operation", "expand", "is_chain"]


@dataclass(eq=False, slots=True)
class Operation:
    """One operator, module call, attribute read, input or output of an expanded dataflow.

    Attributes:
        name: unique and stable: the home node's name, then those inside the children, joined by "/".
        kind: the fx opcode.
        target: the fx target; of a call_module or get_attr, qualified from the home module.
        args, kwargs: like the node's, with operations in the place of nodes.
        operator: canonical operator name, or None.
        node: the node it stands for; of an expanded child, the child's own node.
        call: name of the home graph's node that it is part of.
        index: position in execution order.
        level: length of the longest path from an input.
        value: metadata of what it gave on the example inputs, or None.
        users: the operations that read it, in order.
    """

    name: str
    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operator: str | None
    node: fx.Node
    call: str
    index: int
    level: int = 0
    value: Any = None
    users: list[Operation] = field(default_factory=list["Operation"])

    def __repr__(self) -> str:
        return f"<{self.name}: {self.operator or self.target}>"

    @property
    def inputs(self) -> Iterator[Operation]:
        """Yield the operations read, each as often as it is read."""
        return _leaves((self.args, self.kwargs))

    @property
    def mutates(self) -> bool:
        return operators.mutates(self.node)


@dataclass(frozen=True)
class Expansion:
    """The operations of one home graph in execution order.

    Attributes:
        operations: all of them, inputs and the output included.
        results: name of each home node -> its value: an operation, or a structure of them.
        closed: name of each module call that could not be opened -> why.
    """

    operations: tuple[Operation, ...]
    results: Mapping[str, Any]
    closed: Mapping[str, str]

    def __getitem__(self, name: str) -> Operation:
        for operation in self.operations:
            if operation.name == name:
                return operation
        raise CaptureError(f"no operation '{name}' in the expanded graph any more")

    def by_name(self) -> dict[str, Operation]:
        return {operation.name: operation for operation in self.operations}


class Expansions:
    """The expansions of a program, each worked out once until the program changes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[tuple[str, int], Expansion] = {}

    @classmethod
    def compute(cls, program: Program) -> Expansions:
        return cls(program)

    def of(self, home: str, variant: int) -> Expansion:
        if (home, variant) not in self._known:
            self._known[home, variant] = _expanded(self._program, home, variant)
        return self._known[home, variant]


def expand(program: Program, home: str, variant: int = 0) -> Expansion:
    """Return the dataflow of module `home` with captured children and `torch.nn` leaves opened up."""
    return program.facts[Expansions].of(home, variant)


def _expanded(program: Program, home: str, variant: int) -> Expansion:
    builder = _Builder(program.module(home))
    builder.run(program.graph(home, variant), prefix="", path="", inputs=None, call=None)
    return Expansion(tuple(builder.operations), builder.results, builder.closed)


_LEAF_GRAPHS: dict[object, fx.Graph | None] = {}
"""What tracing a leaf gave, by everything that its forward depends on; None where it cannot be traced."""


class _Builder:
    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules: dict[str, nn.Module] = {}
        self.operations: list[Operation] = []
        self.closed: dict[str, str] = {}
        self.results: dict[str, Any] = {}

    def run(
        self, graph: fx.Graph, *, prefix: str, path: str, inputs: Mapping[str, Any] | None, call: str | None
    ) -> Any:
        """Append the operations of `graph`; return what it outputs."""
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder" and inputs is not None:
                values[node] = inputs[node.name]
            elif node.op == "output" and inputs is not None:
                return _substitute(node.args[0], values)
            else:
                values[node] = self.visit(node, values, prefix, path, call or node.name)
            if inputs is None:
                self.results[node.name] = values[node]
        return None

    def visit(self, node: fx.Node, values: dict[fx.Node, Any], prefix: str, path: str, call: str) -> Any:
        args, kwargs = _substitute(node.args, values), _substitute(node.kwargs, values)
        if node.op == "call_module":
            opened = self.open(node, args, kwargs, prefix, path, call)
            if opened is not None:
                return opened[0]
        return self.append(node, args, kwargs, prefix, path, call)

    def open(self, node: fx.Node, args: Any, kwargs: Any, prefix: str, path: str, call: str) -> tuple[Any] | None:
        """Expand a module call, or say why not and return None."""
        target = _join(path, str(node.target))
        module = self.child(path, str(node.target))
        # What is inside of an opened module was looked at when that was opened.
        obstacle = None if prefix else obstacle_to_opening(module)
        graph = None if obstacle else self.graph_of(module)
        if graph is None:
            if obstacle:
                self.closed[prefix + node.name] = obstacle
            return None
        bound = bind_placeholders(capture_of(module), graph, args, kwargs)
        if bound is None:
            return None
        result = self.run(graph, prefix=f"{prefix}{node.name}/", path=target, inputs=bound, call=call)
        if isinstance(result, Operation) and result.value is None:
            result.value = node.meta.get("val")
        return (result,)

    def child(self, path: str, name: str) -> nn.Module:
        if path not in self.modules:
            self.modules[path] = self.root.get_submodule(path)
        module = self.modules[path]
        for part in name.split("."):
            module = module._modules[part] or module  # pyright: ignore[reportPrivateUsage]
        return module

    def graph_of(self, module: nn.Module) -> fx.Graph | None:
        capture = capture_of(module)
        if capture is not None:
            return capture.variants[0].graph if len(capture.variants) == 1 and _single_output(capture) else None
        if type(module).__module__.split(".")[:2] != ["torch", "nn"] or any(module.children()):
            return None
        if module_operator(module) is not None:
            return None
        key = leaf_key(module)
        if key not in _LEAF_GRAPHS:
            _LEAF_GRAPHS[key] = _leaf_graph(module)
        return _LEAF_GRAPHS[key]

    def append(self, node: fx.Node, args: Any, kwargs: Any, prefix: str, path: str, call: str) -> Operation:
        target = node.target
        if node.op in ("call_module", "get_attr"):
            target = _join(path, str(target))
        operation = Operation(
            prefix + node.name, node.op, target, args, kwargs,
            operators.canonical_name(node), node, call, len(self.operations), value=node.meta.get("val"),
        )  # fmt: skip
        if node.op == "call_module" and operation.name not in self.closed:
            operation.operator = module_operator(self.child(path, str(node.target)))
        for operand in operation.inputs:
            operation.level = max(operation.level, operand.level + 1)
            if not operand.users or operand.users[-1] is not operation:
                operand.users.append(operation)
        self.operations.append(operation)
        return operation


def is_chain(graph: fx.Graph) -> bool:
    """Say whether each operation reads the one before it: then no two are independent, however they are opened."""
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if previous is not None and previous not in node.all_input_nodes:
            return False
        previous = node
    return True


def obstacle_to_opening(module: nn.Module) -> str | None:
    """Return why a module must stay one call (hooks, parametrizations), or None."""
    for submodule in module.modules():
        if has_hooks(submodule):
            return "it has hooks"
        if parametrize.is_parametrized(submodule):
            return "it has parametrizations"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Say whether calling the module runs hooks that the user registered."""
    return bool(
        module._forward_hooks  # pyright: ignore[reportPrivateUsage]
        or module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or module._backward_hooks  # pyright: ignore[reportPrivateUsage]
        or module._backward_pre_hooks  # pyright: ignore[reportPrivateUsage]
    )


def leaf_key(module: nn.Module) -> object:
    """Return a key that is equal for leaves whose forwards are the same but for their tensors."""
    attributes: dict[str, Any] = vars(module)
    own = {name: value for name, value in attributes.items() if name not in _OF_EVERY_MODULE}
    plain: tuple[Any, ...] = tuple((name, type(v), _comparable(v)) for name, v in own.items())
    tensors = tuple((name, p is None) for key in ("_parameters", "_buffers") for name, p in attributes[key].items())
    return type(module), plain, tensors


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((bool, int, float, str, type(None)))


def _comparable(value: object) -> object:
    """Return a hashable stand-in that is equal for equal values; what is neither plain nor a function counts for nothing."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        return tuple((type(item), _comparable(item)) for item in cast("list[object]", value))
    return value if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)) else None


def _leaf_graph(module: nn.Module) -> fx.Graph | None:
    try:
        graph = trace_leaf(module)
    except CaptureError:
        return None
    return graph if isinstance(graph.output_node().args[0], fx.Node) else None


def _single_output(capture: Capture) -> bool:
    return isinstance(capture.variants[0].graph.output_node().args[0], fx.Node)


def bind_placeholders(
    capture: Capture | None, graph: fx.Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return what each placeholder of a child's graph receives from a call, or None where that is not plain."""
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    if capture is None:
        return dict(zip(names, args, strict=True)) if not kwargs and len(args) == len(names) else None
    try:
        given = capture.parameters.bind(args, dict(kwargs))
    except TypeError:
        return None
    arguments = capture.variants[0].arguments
    bound = {name: given.get(arguments.get(name, name)) for name in names}
    return bound if all(isinstance(value, Operation) for value in bound.values()) else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _substitute(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    return map_structure(argument, lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else leaf)


def map_structure(argument: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to the leaves of an fx argument: tuples, lists, dicts and slices are kept."""
    if isinstance(argument, tuple):
        items = [map_structure(item, function) for item in cast("tuple[Any, ...]", argument)]
        return cast("Any", type(argument))(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, list):
        return [map_structure(item, function) for item in cast("list[Any]", argument)]
    if isinstance(argument, dict):
        return {key: map_structure(item, function) for key, item in cast("dict[Any, Any]", argument).items()}
    if isinstance(argument, slice):
        parts: tuple[Any, ...] = (argument.start, argument.stop, argument.step)
        return slice(*(map_structure(part, function) for part in parts))
    return function(argument)


def _leaves(argument: Any) -> Iterator[Operation]:
    if isinstance(argument, Operation):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in cast("list[Any]", argument):
            yield from _leaves(item)
    elif isinstance(argument, dict):
        for item in cast("dict[Any, Any]", argument).values():
            yield from _leaves(item)
    elif isinstance(argument, slice):
        yield from _leaves((argument.start, argument.stop, argument.step))
