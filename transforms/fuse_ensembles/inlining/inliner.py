"""Inline what a graph of a owner calls: captured children and `torch.nn` leaves."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import fx, nn

from .... import operators
from ....compat import submodule
from ....passes.rewriting import obstacle_to_inlining, unmet_guards, writes
from ....runtime.graphs import Capture, Specialization, capture_of
from ....runtime.guards import Argument, Guard
from ....runtime.values import map_leaves
from ....tracing.analyses import StructuralHash
from ....tracing.program import Program
from .batchable_modules import module_operator
from .called_graphs import checks_on_the_way, has_plain_output, leaf_graph_of, specialization_of_call
from .checks import write_checks
from .dataflow import InlinedGraph, Operation, operations_in
from .mode_guards import child_guard, is_passed_on

__all__ = ["InlinedGraphs", "inlined_graph"]

_Way = tuple[InlinedGraph, Sequence[Any], Sequence[Guard]]
"""How a call is inlined: what is inserted, what its placeholders receive, and the conditions that are passed on."""

_NAMED = ("call_module", "get_attr")
"""The kinds of operations whose target is a name in the module tree."""


class InlinedGraphs:
    """The inlined graphs of a program, worked out once for all modules of a kind until the program changes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._likeness = program.analyses[StructuralHash]
        self._owners: dict[tuple[str, int, bool], InlinedGraph] = {}
        self._known: dict[tuple[int, fx.Graph, bool, bool], InlinedGraph] = {}
        self.ways: dict[tuple[int, int, bool, bool] | None, _Way] = {}  # positions of arguments for what is received
        self._obstacles: dict[int, str | None] = {}

    @classmethod
    def compute(cls, program: Program) -> InlinedGraphs:
        return cls(program)

    def of_owner(self, owner: str, specialization: int, flipped: bool) -> InlinedGraph:
        key = owner, specialization, flipped
        if key not in self._owners:
            graph = self._program.graph(owner, specialization)
            may_restart = not any(writes(node, self._program, owner) for node in graph.nodes)
            self._owners[key] = self.of(self._program.module(owner), graph, may_restart, flipped)
        return self._owners[key]

    def of(self, module: nn.Module, graph: fx.Graph, may_restart: bool, flipped: bool) -> InlinedGraph:
        """Return the inlined form of a module's graph.

        Args:
            module: the module.
            graph: one of its graphs, or what a leaf calls.
            may_restart: whether what calls it, or the module itself, may start over where a check in the graph fails.
            flipped: see `inlined_graph`.
        """
        key = self._likeness.of(module), graph, may_restart, flipped
        if key not in self._known:
            builder = _Builder(self, module, may_restart, flipped)
            builder.run(graph, prefix="", inputs=None, call=None)
            self._known[key] = builder.result()
        return self._known[key]

    def kind(self, module: nn.Module) -> int:
        """Return the number that a module has in common with those that are alike."""
        return self._likeness.of(module)

    def obstacle(self, module: nn.Module) -> str | None:
        """Return why a module must stay one call, or None."""
        kind = self.kind(module)
        if kind not in self._obstacles:
            self._obstacles[kind] = obstacle_to_inlining(module)
        return self._obstacles[kind]


def inlined_graph(program: Program, owner: str, specialization: int = 0, *, flipped: bool = False) -> InlinedGraph:
    """Return the dataflow of module `owner` with captured children and `torch.nn` leaves inlined.

    Children whose graphs differ by mode are taken to be in the mode that they are in or, if `flipped`, in the other.
    """
    return program.analyses[InlinedGraphs].of_owner(owner, specialization, flipped)


class _Builder:
    def __init__(self, graphs: InlinedGraphs, root: nn.Module, may_restart: bool, flipped: bool) -> None:
        self.graphs = graphs
        self.root = root
        self.may_restart = may_restart
        self.flipped = flipped
        self.operations: list[Operation] = []
        self.closed: dict[str, str] = {}
        self.conditional: dict[str, str] = {}
        self.modules: dict[str, list[str]] = {}
        self.assumed: dict[str, list[Guard]] = {}
        self.results: dict[str, Any] = {}

    def result(self) -> InlinedGraph:
        return InlinedGraph(
            tuple(self.operations), self.results, self.closed, self.conditional, self.modules, self.assumed,
            self.may_restart,
        )  # fmt: skip

    def run(self, graph: fx.Graph, *, prefix: str, inputs: Mapping[str, Any] | None, call: str | None) -> Any:
        """Append the operations of `graph`; return what it outputs."""
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder" and inputs is not None:
                values[node] = inputs[node.name]
            elif node.op == "output" and inputs is not None:
                return _substitute(node.args[0], values)
            else:
                values[node] = self.visit(node, values, prefix, call or node.name)
            if inputs is None:
                self.results[node.name] = values[node]
        return None

    def visit(self, node: fx.Node, values: dict[fx.Node, Any], prefix: str, call: str) -> Any:
        args, kwargs = _substitute(node.args, values), _substitute(node.kwargs, values)
        if node.target is operator.getitem and _is_item(*args):
            return args[0][args[1]]
        if node.target is len and isinstance(args[0], (tuple, list, dict)):
            return len(cast("Sequence[Any]", args[0]))
        if node.op == "call_module":
            inlined = self.inline(node, args, kwargs, prefix, call)
            if inlined is not None:
                return inlined[0]
        return self.append(node, args, kwargs, prefix, call)

    def inline(self, node: fx.Node, args: Any, kwargs: Any, prefix: str, call: str) -> tuple[Any] | None:
        """Inline a module call, or say why not and return None."""
        module = self.child(str(node.target))
        obstacle = self.graphs.obstacle(module)
        if obstacle is not None:
            self.closed[prefix + node.name] = obstacle
            return None
        found = self.known_way(module, args, kwargs) or self.way(node, module, args, kwargs, prefix, call)
        if found is None:
            return None
        inner, inputs, passed_on = found
        path = str(node.target)
        if passed_on:
            self.assumed.setdefault(call, []).extend(child_guard(guard, path) for guard in passed_on)
        result = self.insert(inner, inputs, prefix=f"{prefix}{node.name}/", path=path, call=call)
        if isinstance(result, Operation) and result.example is None:
            result.example = node.meta.get("val")  # leaves are traced without example values
        return (result,)

    def alike(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[int, int, bool, bool] | None:
        """Return what calls that are inlined alike have in common; None where constants are passed, or a value twice.

        Nothing is known of values but which argument each is: for modules of a kind it is the same.
        """
        plain = not kwargs and all(type(value) is Operation for value in args) and len(set(args)) == len(args)
        return (self.graphs.kind(module), len(args), self.may_restart, self.flipped) if plain else None

    def known_way(self, module: nn.Module, args: Any, kwargs: Any) -> _Way | None:
        """Return how a call is inlined, if one like it was before."""
        known = self.graphs.ways.get(self.alike(module, args, kwargs))
        if known is None:
            return None
        inner, positions, passed_on = known
        return inner, [args[position] for position in positions], passed_on

    def way(self, node: fx.Node, module: nn.Module, args: Any, kwargs: Any, prefix: str, call: str) -> _Way | None:
        """Append what checks that a module may be inlined for a call, and return how it is; None, and why, if not."""
        capture = capture_of(module)
        if capture is None:
            graph = leaf_graph_of(module)
            names = [] if graph is None else [n.name for n in graph.nodes if n.op == "placeholder"]
            plain = not kwargs and len(args) == len(names) and all(isinstance(value, Operation) for value in args)
            if graph is None or not plain:
                return None
            return self.noted((self.inside(module, graph), args, ()), module, args, kwargs)
        given = _given(capture, args, kwargs)
        if given is None:
            return None
        specialization = specialization_of_call(module, capture, given, self.flipped)
        if specialization is None:
            self.conditional[prefix + node.name] = "it has different graphs for different calls"
            return None
        inputs = _received(specialization, given)
        if inputs is None or not has_plain_output(specialization.graph):
            return None
        before = len(self.operations)
        refusal = self.check(node, module, specialization, given, prefix, call)
        if refusal is not None:
            self.conditional[prefix + node.name] = refusal
            return None
        way = (
            self.inside(module, specialization.graph),
            inputs,
            [guard for guard in specialization.guards if is_passed_on(guard)],
        )
        checked = len(self.operations) > before  # this call by itself
        return way if checked else self.noted(way, module, args, kwargs)

    def noted(self, way: _Way, module: nn.Module, args: Any, kwargs: Any) -> _Way:
        """Keep how a call was inlined for others like it."""
        alike = self.alike(module, args, kwargs)
        if alike is not None:
            inner, inputs, passed_on = way
            self.graphs.ways[alike] = inner, [args.index(value) for value in inputs], passed_on
        return way

    def inside(self, module: nn.Module, graph: fx.Graph) -> InlinedGraph:
        return self.graphs.of(module, graph, self.may_restart, self.flipped)

    def insert(self, inner: InlinedGraph, inputs: Sequence[Operation], *, prefix: str, path: str, call: str) -> Any:
        """Append what a called module computes; return what it outputs.

        Args:
            inner: the inlined graph of the module.
            inputs: what its placeholders receive, in their order.
            prefix, path: what goes before the names of operations and of modules and tensors.
            call: the owner's node.
        """
        values: list[Operation] = []
        read: list[Operation] = []

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Operation):
                return leaf
            read.append(values[leaf.index])
            return read[-1]

        self.closed |= {prefix + name: why for name, why in inner.closed.items()}
        self.conditional |= {prefix + name: when for name, when in inner.conditional.items()}
        inlined = self.modules.setdefault(call, [])
        inlined.append(path)
        inlined.extend(f"{path}.{name}" for names in inner.modules.values() for name in names)
        assumed = [child_guard(guard, path) for guards in inner.assumed.values() for guard in guards]
        if assumed:
            self.assumed.setdefault(call, []).extend(assumed)
        received = iter(inputs)
        for o, operands in zip(inner.operations, inner.operands, strict=True):
            if o.kind == "placeholder":
                values.append(next(received))
                continue
            kwargs = o.kwargs
            if operands is not None:
                args = sources = tuple([values[index] for index in operands])
            else:
                read.clear()
                args, kwargs = map_leaves(value, (o.args, kwargs), Operation)
                sources = tuple(read)
            if o.kind == "output":
                return args[0]
            target = f"{path}.{o.target}" if o.kind in _NAMED else o.target
            copy = Operation(
                prefix + o.name, o.kind, target, args, kwargs, o.operator, o.node, call, len(self.operations),
                sources, example=o.example, mutates=o.mutates, pattern=o.pattern or o,
            )  # fmt: skip
            values.append(self.add(copy))
        return None

    def check(
        self,
        node: fx.Node,
        module: nn.Module,
        specialization: Specialization,
        given: Mapping[str, Any],
        prefix: str,
        call: str,
    ) -> str | None:
        """Append what checks that a module's graph holds for a call, or return under what it does."""
        guards = [guard for guard in unmet_guards(module, specialization, given) if not is_passed_on(guard)]
        values = {name: value for name, value in given.items() if isinstance(value, Operation)}
        checks = write_checks(guards, values) if guards else None
        if guards and (checks is None or not self.may_restart):
            return f"its graph holds only where {guards[0]} ({guards[0].reason})"
        if checks_on_the_way(specialization.graph) and not self.may_restart:
            return "it checks values between writes, and its caller cannot start again after a write"
        if checks is not None:
            written, inputs = checks
            self.run(written, prefix=f"{prefix}{node.name}/check_", inputs=inputs, call=call)
        return None

    def child(self, name: str) -> nn.Module:
        found = submodule(self.root, name)
        if found is None:
            raise LookupError(f"there is no module '{name}'")
        return found

    def append(self, node: fx.Node, args: Any, kwargs: Any, prefix: str, call: str) -> Operation:
        target = str(node.target) if node.op in _NAMED else node.target
        operation = Operation(
            prefix + node.name, node.op, target, args, kwargs,
            operators.canonical_name(node), node, call, len(self.operations), operations_in(args, kwargs),
            example=node.meta.get("val"), mutates=operators.mutates(node),
        )  # fmt: skip
        if node.op == "call_module" and operation.name not in self.closed:
            operation.operator = module_operator(self.child(str(target)))
        return self.add(operation)

    def add(self, operation: Operation) -> Operation:
        for operand in operation.inputs:
            if operand.level >= operation.level:
                operation.level = operand.level + 1
            if not operand.users or operand.users[-1] is not operation:
                operand.users.append(operation)
        self.operations.append(operation)
        return operation


def _is_item(container: Any, index: Any) -> bool:
    """Say whether an item is picked from a structure that an inlined module returned."""
    return isinstance(container, (tuple, list, dict)) and isinstance(index, (int, str, slice))


def _given(capture: Capture, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a call passes by argument, or None where that is not plain."""
    try:
        return capture.parameters.bind(args, dict(kwargs))
    except TypeError:
        return None


def _received(specialization: Specialization, given: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return what each placeholder of a child's graph receives, or None where it is not one operation's value."""
    sources = map(specialization.argument, specialization.graph.find_nodes(op="placeholder"))
    received = [given.get(source.name) if isinstance(source, Argument) else None for source in sources]
    return received if all(isinstance(value, Operation) for value in received) else None


def _substitute(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    return map_leaves(lambda leaf: values[leaf] if isinstance(leaf, fx.Node) else leaf, argument)
