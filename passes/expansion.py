"""A module's dataflow with its children opened up, as plain records: what structural analyses read.

Captured children and `torch.nn` leaves are expanded into the operators they call, so that a loop over Sequentials, a
comprehension over user classes and a line of functional calls all look the same. Nothing here changes the program;
each record knows the node it came from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torch import fx, nn

from ..compat import own_children
from ..errors import CaptureError
from ..tracing.captured import Capture, Guard, Variant, capture_of
from . import operators
from .batchable_modules import module_operator
from .effects import writes
from .mode_guards import asks_for_training, mode_guard
from .opening import checks_on_the_way, has_plain_output, leaf_graph, obstacle_to_opening, unmet_guards, variant_of_call
from .opening_checks import write_checks

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
        users: the operations that read it, in order.
        example: what is known of its value: shape, dtype, device of a tensor; None where nothing is.
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
    users: list[Operation] = field(default_factory=list["Operation"])
    example: Any = None

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
        closed: name of each module call that must stay one -> why.
        conditional: name of each module call whose graph does not hold for every call -> under what it does.
        opened: name of each home node -> the modules that were opened to see what it calls, qualified from the home.
        assumed: name of each home node -> what is taken to be the mode of modules in it, as guards of the home.
    """

    operations: tuple[Operation, ...]
    results: Mapping[str, Any]
    closed: Mapping[str, str]
    conditional: Mapping[str, str]
    opened: Mapping[str, Sequence[str]]
    assumed: Mapping[str, Sequence[Guard]]

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
        self._known: dict[tuple[str, int, bool], Expansion] = {}

    @classmethod
    def compute(cls, program: Program) -> Expansions:
        return cls(program)

    def of(self, home: str, variant: int, flipped: bool) -> Expansion:
        key = (home, variant, flipped)
        if key not in self._known:
            self._known[key] = _expanded(self._program, *key)
        return self._known[key]


def expand(program: Program, home: str, variant: int = 0, *, flipped: bool = False) -> Expansion:
    """Return the dataflow of module `home` with captured children and `torch.nn` leaves opened up.

    Children whose graphs differ by mode are taken to be in the mode that they are in or, if `flipped`, in the other.
    """
    return program.facts[Expansions].of(home, variant, flipped)


def _expanded(program: Program, home: str, variant: int, flipped: bool) -> Expansion:
    graph = program.graph(home, variant)
    may_restart = not any(writes(node, program, home) for node in graph.nodes)
    builder = _Builder(program.module(home), may_restart, flipped)
    builder.run(graph, prefix="", path="", inputs=None, call=None)
    return Expansion(
        tuple(builder.operations), builder.results, builder.closed, builder.conditional, builder.opened, builder.assumed
    )


class _Builder:
    def __init__(self, root: nn.Module, may_restart: bool, flipped: bool) -> None:
        self.root = root
        self.may_restart = may_restart
        self.flipped = flipped
        self.modules: dict[str, nn.Module] = {}
        self.operations: list[Operation] = []
        self.closed: dict[str, str] = {}
        self.conditional: dict[str, str] = {}
        self.opened: dict[str, list[str]] = {}
        self.assumed: dict[str, list[Guard]] = {}
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
        if node.target is operator.getitem and _is_item(*args):
            return args[0][args[1]]
        if node.target is len and isinstance(args[0], (tuple, list, dict)):
            return len(cast("Sequence[Any]", args[0]))
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
        if obstacle is not None:
            self.closed[prefix + node.name] = obstacle
            return None
        capture = capture_of(module)
        if capture is None:
            return self.open_leaf(node, module, args, kwargs, prefix, target, call)
        given = _given(capture, args, kwargs)
        if given is None:
            return None
        variant = variant_of_call(module, capture, given, self.flipped)
        if variant is None:
            self.conditional[prefix + node.name] = "its graph differs by kind of call"
            return None
        bound = _bound(variant, given)
        if bound is None or not has_plain_output(variant.graph):
            return None
        refusal = self.check(node, module, variant, given, prefix, call)
        if refusal is not None:
            self.conditional[prefix + node.name] = refusal
            return None
        modes = [mode_guard(guard, target) for guard in variant.guards if asks_for_training(guard)]
        if modes:
            self.assumed.setdefault(call, []).extend(modes)
        return self.enter(node, variant.graph, bound, prefix, target, call)

    def open_leaf(
        self, node: fx.Node, module: nn.Module, args: Any, kwargs: Any, prefix: str, target: str, call: str
    ) -> tuple[Any] | None:
        graph = leaf_graph(module)
        names = [] if graph is None else [n.name for n in graph.nodes if n.op == "placeholder"]
        plain = not kwargs and len(args) == len(names) and all(isinstance(value, Operation) for value in args)
        if graph is None or not plain:
            return None
        return self.enter(node, graph, dict(zip(names, args, strict=True)), prefix, target, call)

    def enter(
        self, node: fx.Node, graph: fx.Graph, bound: Mapping[str, Any], prefix: str, target: str, call: str
    ) -> tuple[Any]:
        self.opened.setdefault(call, []).append(target)
        result = self.run(graph, prefix=f"{prefix}{node.name}/", path=target, inputs=bound, call=call)
        if isinstance(result, Operation) and result.example is None:
            result.example = node.meta.get("val")  # leaves are traced without example values
        return (result,)

    def check(
        self, node: fx.Node, module: nn.Module, variant: Variant, given: Mapping[str, Any], prefix: str, call: str
    ) -> str | None:
        """Append what checks that a module's graph holds for a call, or return under what it does."""
        guards = [guard for guard in unmet_guards(module, variant, given) if not asks_for_training(guard)]
        values = {name: value for name, value in given.items() if isinstance(value, Operation)}
        checks = write_checks(guards, values) if guards else None
        if guards and (checks is None or not self.may_restart):
            return f"its graph holds only where {guards[0].expression} ({guards[0].reason})"
        if checks_on_the_way(variant.graph) and not self.may_restart:
            return "it checks values on its way, and what calls it cannot start over once it has written something"
        if checks is not None:
            written, inputs = checks
            self.run(written, prefix=f"{prefix}{node.name}/check_", path="", inputs=inputs, call=call)
        return None

    def child(self, path: str, name: str) -> nn.Module:
        if path not in self.modules:
            self.modules[path] = self.root.get_submodule(path)
        module = self.modules[path]
        for part in name.split("."):
            module = own_children(module)[part] or module
        return module

    def append(self, node: fx.Node, args: Any, kwargs: Any, prefix: str, path: str, call: str) -> Operation:
        target = node.target
        if node.op in ("call_module", "get_attr"):
            target = _join(path, str(target))
        operation = Operation(
            prefix + node.name, node.op, target, args, kwargs,
            operators.canonical_name(node), node, call, len(self.operations), example=node.meta.get("val"),
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


def _is_item(container: Any, index: Any) -> bool:
    """Say whether an item is picked from a structure that an opened module returned."""
    return isinstance(container, (tuple, list, dict)) and isinstance(index, (int, str, slice))


def _given(capture: Capture, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a call passes by argument, or None where that is not plain."""
    try:
        return capture.parameters.bind(args, dict(kwargs))
    except TypeError:
        return None


def _bound(variant: Variant, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what each placeholder of a child's graph receives, or None where it is not one operation's value."""
    names: list[str] = [node.name for node in variant.graph.nodes if node.op == "placeholder"]
    bound = {name: given.get(variant.arguments.get(name, name)) for name in names}
    return bound if all(isinstance(value, Operation) for value in bound.values()) else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _substitute(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    return map_structure(argument, lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else leaf)


def map_structure(argument: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to the leaves of an fx argument: tuples, lists, dicts and slices are kept."""
    if isinstance(argument, tuple):
        items = [map_structure(item, function) for item in cast("tuple[Any, ...]", argument)]
        kind: Any = type(cast("object", argument))
        return kind(*items) if hasattr(kind, "_fields") else tuple(items)
    if isinstance(argument, list):
        return [map_structure(item, function) for item in cast("list[Any]", argument)]
    if isinstance(argument, dict):
        return {key: map_structure(item, function) for key, item in cast("dict[Any, Any]", argument).items()}
    if isinstance(argument, slice):
        parts = cast("slice[Any, Any, Any]", argument)
        return slice(*(map_structure(part, function) for part in (parts.start, parts.stop, parts.step)))
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
