"""A module's dataflow with captured children and `torch.nn` leaves inlined, worked out once for modules of a kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from .... import operators
from ....compat import submodule
from ....passes.rewriting import Checks, Opener, bound, reason_against_inlining, received, unmet_guards, writes
from ....runtime.graphs import Capture, Specialization, capture_of
from ....runtime.guards import SELF, Attribute, Guard, Item, Source, is_outside, module_at, require
from ....runtime.values import map_leaves
from ....tracing.analyses import StructuralHash
from ....tracing.program import Program
from ....tracing.rules import leaf_graph
from .dataflow import InlinedGraph, Operation, module_operator, operations_in

__all__ = ["child_guard", "inlined_graph", "is_passed_on"]

_Way = tuple[InlinedGraph, Sequence[Any], Sequence[Guard]]
"""How a call is inlined: what is inserted, what its placeholders receive, and the conditions that are passed on."""

_NAMED = ("call_module", "get_attr")
"""The kinds of operations whose target is a name in the module tree."""


class InlinedGraphs:
    """The inlined graphs of a program, worked out once for all modules of a kind until the program changes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._hash = program.analyses[StructuralHash]
        self._owners: dict[tuple[str, int, bool], InlinedGraph] = {}
        self._known: dict[tuple[int, fx.Graph, bool, bool], InlinedGraph] = {}
        self.ways: dict[tuple[int, int, bool, bool] | None, _Way] = {}  # positions of arguments for what is received
        self._reasons: dict[int, str | None] = {}

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
        """Return the inlined form of a graph; `may_restart`: the caller may start over where a check in it fails."""
        key = self._hash.of(module), graph, may_restart, flipped
        if key not in self._known:
            builder = _Builder(self, module, may_restart, flipped)
            self._known[key] = builder.inlined(graph)
        return self._known[key]

    def kind(self, module: nn.Module) -> int:
        """Return the number that a module has in common with those that are alike."""
        return self._hash.of(module)

    def reason_against(self, module: nn.Module) -> str | None:
        """Return why a module must stay one call, or None."""
        kind = self.kind(module)
        if kind not in self._reasons:
            self._reasons[kind] = reason_against_inlining(module)
        return self._reasons[kind]


def inlined_graph(program: Program, owner: str, specialization: int = 0, *, flipped: bool = False) -> InlinedGraph:
    """Return what a module computes with what it calls opened, in its mode or, if `flipped`, in the other one."""
    return program.analyses[InlinedGraphs].of_owner(owner, specialization, flipped)


class _Builder(Opener):
    """Append the operations of a graph. A place is what goes before their names, and the owner's node."""

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

    def inlined(self, graph: fx.Graph) -> InlinedGraph:
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            values[node] = self.value(node, ("", node.name), values)
        results = {node.name: value for node, value in values.items()}
        return InlinedGraph(
            tuple(self.operations), results, self.closed, self.conditional, self.modules, self.assumed,
            self.may_restart,
        )  # fmt: skip

    def opened(self, node: fx.Node, place: tuple[str, str], args: Any, kwargs: Any) -> tuple[Any] | None:
        """Inline a module call, or say why not and return None."""
        prefix, call = place
        module, path = self.child(str(node.target)), str(node.target)
        reason = self.graphs.reason_against(module)
        if reason is not None:
            self.closed[prefix + node.name] = reason
            return None
        # Nothing is known of values but which argument each is: calls of modules of a kind are inlined alike.
        plain = not kwargs and all(type(value) is Operation for value in args) and len(set(args)) == len(args)
        alike = (self.graphs.kind(module), len(args), self.may_restart, self.flipped) if plain else None
        known, before = self.graphs.ways.get(alike), len(self.operations)
        way = known or self.way(node, module, args, kwargs, place)
        if way is None:
            return None
        inner, inputs, passed_on = way
        if known is not None:
            inputs = [args[position] for position in inputs]
        elif alike is not None and len(self.operations) == before:  # else this call is checked by itself
            self.graphs.ways[alike] = inner, [args.index(value) for value in inputs], passed_on
        if passed_on:
            self.assumed.setdefault(call, []).extend(child_guard(guard, path) for guard in passed_on)
        result = self.insert(inner, inputs, prefix=f"{prefix}{node.name}/", path=path, call=call)
        if isinstance(result, Operation) and result.example is None:
            result.example = node.meta.get("val")  # leaves are traced without example values
        return (result,)

    def way(self, node: fx.Node, module: nn.Module, args: Any, kwargs: Any, place: tuple[str, str]) -> _Way | None:
        """Append what checks that a module may be inlined for a call, and return how it is; None, and why, if not."""
        capture = capture_of(module)
        if capture is None:
            graph = None if module_operator(module) is not None else leaf_graph(module)
            count = 0 if graph is None else len(graph.find_nodes(op="placeholder"))
            plain = not kwargs and len(args) == count and all(isinstance(value, Operation) for value in args)
            return None if graph is None or not plain else (self.inside(module, graph), args, ())
        given = bound(capture, args, kwargs)
        if given is None:
            return None
        specialization = _specialization_of_call(module, capture, given, self.flipped)
        if specialization is None:
            self.conditional[place[0] + node.name] = "it has different graphs for different calls"
            return None
        graph, inputs = specialization.graph, received(specialization, given, Operation)
        if inputs is None or not isinstance(graph.output_node().args[0], (fx.Node, tuple, list, dict)):
            return None
        refusal = self.check(node, module, specialization, given, place)
        if refusal is not None:
            self.conditional[place[0] + node.name] = refusal
            return None
        return self.inside(module, graph), inputs, [guard for guard in specialization.guards if is_passed_on(guard)]

    def inside(self, module: nn.Module, graph: fx.Graph) -> InlinedGraph:
        return self.graphs.of(module, graph, self.may_restart, self.flipped)

    def insert(self, inner: InlinedGraph, inputs: Sequence[Operation], *, prefix: str, path: str, call: str) -> Any:
        """Append what a called module computes; return what it outputs. Names get `prefix`, those of modules `path`."""
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
            copied = Operation(
                prefix + o.name, o.kind, target, args, kwargs, o.operator, o.node, call, len(self.operations),
                sources, example=o.example, mutates=o.mutates, pattern=o.pattern or o,
            )  # fmt: skip
            values.append(self.add(copied))
        return None

    def check(
        self,
        node: fx.Node,
        module: nn.Module,
        specialization: Specialization,
        given: Mapping[str, Any],
        place: tuple[str, str],
    ) -> str | None:
        """Append what checks that a module's graph holds for a call, or return under what it does."""
        guards = [guard for guard in unmet_guards(module, specialization, given) if not is_passed_on(guard)]
        if guards:
            graph, values = fx.Graph(), {n: value for n, value in given.items() if isinstance(value, Operation)}
            inputs = {name: graph.placeholder(name) for name in values}
            if not (self.may_restart and Checks(graph).write(guards, inputs)):
                return f"its graph holds only where {guards[0]} ({guards[0].reason})"
            graph.output(None)
            self.run(graph, (f"{place[0]}{node.name}/check_", place[1]), list(values.values()))
        elif not self.may_restart and specialization.graph.find_nodes(op="call_function", target=require, sort=False):
            return "it checks values between writes, and its caller cannot start again after a write"
        return None

    def child(self, name: str) -> nn.Module:
        found = submodule(self.root, name)
        if found is None:
            raise LookupError(f"there is no module '{name}'")
        return found

    def made(self, node: fx.Node, place: tuple[str, str], args: Any, kwargs: Any) -> Operation:
        prefix, call = place
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


def _specialization_of_call(
    module: nn.Module, capture: Capture, given: Mapping[str, Any], flipped: bool
) -> Specialization | None:
    """Return the graph that a module runs for a call in its mode (or the other one); None: that depends."""
    in_mode = [each for each in capture.specializations if each.runs_in_mode(module, flipped=flipped)]
    if len(in_mode) == 1:
        return in_mode[0]
    return next((each for each in in_mode if all(map(is_passed_on, unmet_guards(module, each, given)))), None)


def is_passed_on(guard: Guard) -> bool:
    """Say whether a module that opens another takes this condition for its own: nothing else asks for it there."""
    sources = list(guard.sources())
    return guard.asks_for_training or any(is_outside(each) or _is_of_a_child(each) for each in sources)


def _is_of_a_child(source: Source) -> bool:
    match source:
        case Attribute(Item(Attribute(_, "_modules")), name):
            return name != "_modules"
        case _:
            return False


def child_guard(guard: Guard, path: str) -> Guard:
    """Return a child's condition as one of the module that holds it at `path`."""
    return guard.over({SELF: module_at(path.split("."))})
