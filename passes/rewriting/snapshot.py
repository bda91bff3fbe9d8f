"""What a model looked like: kept from site to site, and taken anew only of what a rewrite has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor, fx, nn

from ...compat import own_buffers, own_parameters
from ...runtime.graphs import Capture, capture_of
from ...tracing.isolation import AttributeState, Contents
from ...tracing.program import Program

__all__ = ["GraphState", "ModuleState", "ModuleStates", "Snapshot"]


class GraphState:
    """A graph, and what its nodes were."""

    def __init__(self, capture: Capture, number: int) -> None:
        self._capture, self._number = capture, number
        self._graph = capture.specializations[number].graph
        self._nodes = [(node, node.target, node.args, node.kwargs, node.name) for node in self._graph.nodes]

    def is_same(self) -> bool:
        """Say whether nothing has changed."""
        return len(self._graph.nodes) == len(self._nodes) and all(
            node is kept and node.args is args and node.kwargs is kwargs and node.target is target
            for node, (kept, target, args, kwargs, _) in zip(self._graph.nodes, self._nodes, strict=True)
        )

    def restore(self) -> None:
        """Put a graph like the one that was in its place, where it was changed."""
        if self.is_same():
            return
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, target, args, kwargs, name in self._nodes:
            values = fx.map_arg((args, kwargs), new.__getitem__)
            new[node] = graph.create_node(node.op, target, *values, name=name, type_expr=node.type)
            new[node].meta = dict(node.meta)
        specializations = self._capture.specializations
        if specializations[self._number].graph is self._graph:
            specializations[self._number] = replace(specializations[self._number], graph=graph)


class ModuleState:
    """What a module was: its class, attributes, children, hooks and mode, and its tensors' gradients, but no data."""

    __slots__ = ("_capture", "attributes", "cls", "flags", "graphs", "module")

    def __init__(self, module: nn.Module, graphs: list[GraphState]) -> None:
        self.module, self.attributes, self.graphs = module, AttributeState(module), graphs
        self.cls, self._capture = type(module), capture_of(module)
        held = (*own_parameters(module).values(), *own_buffers(module).values())
        self.flags: _Flags = [(t, t.requires_grad, t.grad) for t in held if t is not None and t.is_leaf]

    def is_same(self) -> bool:
        """Say whether nothing has changed of it; its graphs are asked for themselves."""
        if type(self.module) is not self.cls or not self.attributes.is_same():
            return False
        return _are_same(self.flags)

    def restore(self) -> None:
        """Put everything back but the graphs."""
        self.attributes.restore(exact=True)
        if type(self.module) is not self.cls and capture_of(self.module) is self._capture:
            object.__setattr__(self.module, "__class__", self.cls)  # no own way of setting attributes is asked
        for tensor, wanted, gradient in self.flags:
            if tensor.requires_grad != wanted:
                tensor.requires_grad_(wanted)
            if tensor.grad is not gradient:
                tensor.grad = gradient

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that it had, with their names in it: registered ones first, then those in attributes."""
        for values in (*self.attributes.registered, self.attributes.copy):
            for name, value in values.items():
                if isinstance(value, Tensor):
                    yield name, value


_Flags = list[tuple[Tensor, bool, Tensor | None]]


def _are_same(flags: _Flags) -> bool:
    for tensor, wanted, gradient in flags:
        if tensor.requires_grad is not wanted or tensor.grad is not gradient:
            return False
    return True


class ModuleStates:
    """What several modules are, to see in one go that nothing has changed of any."""

    def __init__(self, by_module: dict[nn.Module, ModuleState]) -> None:
        self.by_module = by_module
        attributes = [state.attributes for state in by_module.values()]
        self._namespaces = Contents([each.namespace for each in attributes], named=True)
        self._containers = Contents([container for each in attributes for container in each.containers])
        self._classes = [state.cls for state in by_module.values()]
        self._flags = [flag for state in by_module.values() for flag in state.flags]

    def __iter__(self) -> Iterator[ModuleState]:
        return iter(self.by_module.values())

    def are_same(self) -> bool:
        """Say whether nothing has changed."""
        if not (self._namespaces.are_same() and self._containers.are_same()):
            return False
        if list(map(type, self.by_module)) != self._classes:
            return False
        return _are_same(self._flags)

    def changed(self) -> list[ModuleState]:
        """Return what those were that have changed."""
        return [] if self.are_same() else [state for state in self if not state.is_same()]


class Snapshot:
    """Hold what modules were when they were last asked for, until a rewrite changes them with its edit's knowledge.
    Whatever else differs was changed behind an edit's back.
    """

    def __init__(self) -> None:
        self._states: dict[nn.Module, ModuleState] = {}
        self._graphs: dict[fx.Graph, GraphState] = {}
        self._whole: ModuleStates | None = None

    def of(self, module: nn.Module) -> ModuleState:
        """Return what a module was; what it is now, where that is not known."""
        state = self._states.get(module)
        if state is None:
            state = self._states[module] = ModuleState(module, self._graphs_of(module))
        return state

    def _graphs_of(self, module: nn.Module) -> list[GraphState]:
        """Return the states of a module's graphs; modules may share them."""
        capture = capture_of(module)
        graphs = [] if capture is None else [each.graph for each in capture.specializations]
        for number, graph in enumerate(graphs):
            if capture is not None and graph not in self._graphs:
                self._graphs[graph] = GraphState(capture, number)
        return [self._graphs[graph] for graph in graphs]

    def settled(self, modules: Iterable[nn.Module]) -> ModuleStates:
        """Return what modules were, having put back what was changed since behind the edits' backs."""
        return ModuleStates({module: self._settled(module) for module in modules})

    def whole(self, program: Program) -> ModuleStates:
        """Return what all modules of a program were, having put back what was changed since."""
        if self._whole is None or not self._whole.are_same():
            self._whole = self.settled(program.names.distinct)
        return self._whole

    def put_back(self) -> None:
        """Put back what was changed since behind the edits' backs of all that is known."""
        if self._whole is None or not self._whole.are_same():
            self.settled(list(self._states))

    def _settled(self, module: nn.Module) -> ModuleState:
        state = self.of(module)
        if state.is_same():
            return state
        state.restore()
        self._states.pop(module)
        return self.of(module)

    def forget(self, *modules: nn.Module) -> None:
        """Take what modules are now as what they should be; of all of them, where none is named."""
        self._whole = None
        if not modules:
            self._states.clear()
        for module in modules:
            self._states.pop(module, None)
