"""Find what a pass changed behind the back of its edit: tensors, attributes, children, graphs; and put it back."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from ...compat import DispatchMode, modules_by_name, own_buffers, own_parameters, written_arguments
from ...errors import MatchFailure
from ...tracing.graphs import Capture, capture_of
from ...tracing.program import Program
from ...tracing.recording import AttributeState, ParameterData, change_count
from ...tracing.values import qualified, tensors_in

__all__ = ["UnnotedChange", "Watch", "only_reading", "watching"]

_KINDS = {
    "_parameters": ("put another tensor in the place of the parameter '{}'", "edit.set_tensor"),
    "_buffers": ("put another tensor in the place of the buffer '{}'", "edit.set_tensor"),
    "_modules": ("put another module in the place of '{}'", "edit.replace_module or edit.add_module"),
    "": ("set the attribute '{}'", "edit.set_attribute"),
}
_OTHERWISE = "changed what is in '{}'", "edit.set_attribute with a new value"
_IN_PLACE = "wrote into '{}'", "edit.set_tensor with a new tensor"
_GRAPH = "changed the graph of '{}' itself", "the nodes of edit.graph, which site[...] gives, too"


class UnnotedChange(MatchFailure):
    """A pass changed something otherwise than through its edit.

    Attributes:
        what: it did, a clause without its subject.
        instead: what to use in `rewrite`.
    """

    def __init__(self, kind: tuple[str, str], name: str) -> None:
        self.what, self.instead = kind[0].format(name), kind[1]
        super().__init__(f"the pass {self.what} without its edit knowing; use {self.instead}")


class Watch:
    """Hold what a part of a program is, to see later what became of it.

    Args:
        program: which is about to be rewritten.
        name: of the module that is watched, with all inside it.
    """

    def __init__(self, program: Program, name: str) -> None:
        inside = modules_by_name(program.module(name))
        self._names = {module: qualified(name, path) for path, module in inside.items()}
        self._first = {module: AttributeState(module) for module in self._names}
        self._expected = dict(self._first)
        self._graphs = [_Graph(capture, number, self._names[m]) for m, capture, number in _graphs_of(self._names)]
        self._tensors = _named_tensors(self._names)
        self.data = ParameterData([tensor for tensor, _ in self._tensors.values()])

    def accept(self, modules: Iterable[nn.Module] = ()) -> None:
        """Take what modules hold now as what they should; of all of them, where none is named."""
        for module in tuple(modules) or tuple(self._expected):
            if module in self._expected:
                self._expected[module] = AttributeState(module)

    def check_module(self, module: nn.Module) -> None:
        """Make sure that a module holds what it should.

        Raises:
            UnnotedChange: if it does not.
        """
        state = self._expected.get(module)
        for where, name in () if state is None else state.differences():
            known = where in _KINDS
            raise UnnotedChange(
                _KINDS[where] if known else _OTHERWISE, qualified(self._names[module], name if known else where)
            )

    def check(self) -> None:
        """Make sure that nothing was changed but what was accepted.

        Raises:
            UnnotedChange: naming the first change, and what to use instead.
        """
        for key in self.data.changed():
            raise UnnotedChange(_IN_PLACE, self._tensors[key][1])
        for module in self._expected:
            self.check_module(module)
        for graph in self._graphs:
            if graph.is_changed():
                raise UnnotedChange(_GRAPH, graph.owner or "(root)")

    def restore(self) -> None:
        """Put everything back as it was at first."""
        for state in self._first.values():
            state.restore()
        self.data.restore()
        for graph in self._graphs:
            graph.restore()


@contextmanager
def watching(program: Program, name: str) -> Generator[Watch]:
    """Watch a part of a program while a pass rewrites it."""
    watch = Watch(program, name)
    with ExitStack() as stack:
        stack.enter_context(watch.data.watched())
        stack.enter_context(_Writes(watch.data))
        yield watch


@contextmanager
def only_reading(program: Program) -> Generator[None]:
    """Watch a program while a pass looks for sites; the pass may run the model.

    Raises:
        UnnotedChange: if the pass changed anything.
    """
    watch = Watch(program, "")
    renormalised = {id(m.weight) for m in program.names.distinct if getattr(m, "max_norm", None) is not None}
    parameters = {name: p for name, p in program.names.parameters().items() if id(p) not in renormalised}
    counts = {name: change_count(parameter) for name, parameter in parameters.items()}
    with watch.data.watched():
        yield
    try:
        for name, parameter in parameters.items():
            if change_count(parameter) != counts[name]:
                raise UnnotedChange(_IN_PLACE, name)
        watch.check()
    except UnnotedChange:
        watch.restore()
        raise


class _Writes(DispatchMode):
    """Keep what tensors hold before an operation writes into their memory."""

    def __init__(self, data: ParameterData) -> None:
        super().__init__()
        self._data = data

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_arguments(func)
        if written:
            values = (*enumerate(args), *kwargs.items())
            for tensor in tensors_in([value for key, value in values if key in written]):
                self._data.keep_memory(tensor)
        return func(*args, **kwargs)


class _Graph:
    """A graph, and what its nodes were."""

    def __init__(self, capture: Capture, number: int, owner: str) -> None:
        self.owner = owner
        self._capture, self._number = capture, number
        self._graph = capture.specializations[number].graph
        self._nodes = [(node, node.target, node.args, node.kwargs, node.name) for node in self._graph.nodes]

    def is_changed(self) -> bool:
        if len(self._graph.nodes) != len(self._nodes):
            return True
        return any(
            node is not kept or node.args is not args or node.kwargs is not kwargs or node.target is not target
            for node, (kept, target, args, kwargs, _) in zip(self._graph.nodes, self._nodes, strict=True)
        )

    def restore(self) -> None:
        """Put a graph like the one that was in its place, where it was changed."""
        if not self.is_changed():
            return
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node, target, args, kwargs, name in self._nodes:
            values = fx.map_arg((args, kwargs), new.__getitem__)
            new[node] = graph.create_node(node.op, target, *values, name=name, type_expr=node.type)
            new[node].meta = dict(node.meta)
        specializations = self._capture.specializations
        if specializations[self._number].graph is self._graph:
            specializations[self._number] = replace(specializations[self._number], graph=graph)


def _graphs_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Capture, int]]:
    """Return each graph of some modules once; modules may share their captures."""
    seen: dict[int, tuple[nn.Module, Capture, int]] = {}
    for module in modules:
        capture = capture_of(module)
        for number, each in enumerate(() if capture is None else capture.specializations):
            if capture is not None:
                seen.setdefault(id(each.graph), (module, capture, number))
    return list(seen.values())


def _named_tensors(modules: dict[nn.Module, str]) -> dict[int, tuple[Tensor, str]]:
    """Return id -> tensor and its qualified name."""
    found: dict[int, tuple[Tensor, str]] = {}
    for module, path in modules.items():
        for name, value in (*own_parameters(module).items(), *own_buffers(module).items(), *vars(module).items()):
            if isinstance(value, Tensor):
                found.setdefault(id(value), (value, qualified(path, name)))
    return found
