"""Run a program's graphs node by node, or its modules' own forwards, and follow every operator on the way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ....compat import all_modules
from ....runtime.graphs import Capture, Region, Specialization, capture_of, select
from ....tracing.isolation import in_phase, preserved
from ....tracing.program import Program, function_of_node
from ....tracing.recording import calls_intercepted, copy_inputs
from .dimension_tracker import DimensionTracker, Place
from .functions import Functions
from .operators import Operators
from .sizes import Size, Source, marked

__all__ = ["run"]


def run(program: Program, tracker: DimensionTracker, *, training: bool, graphs: bool) -> set[tuple[str, int]]:
    """Run a program on its example inputs; return the graphs that ran, by owner and number.

    Args:
        program: what to run.
        tracker: notes what is found.
        training: the mode to run in.
        graphs: run captured modules from their graphs; else all run their own forwards.
    """
    runner = _Runner(program, tracker, graphs=graphs)
    model = program.model
    with ExitStack() as stack:
        stack.enter_context(preserved(model))
        stack.enter_context(in_phase(model, training))
        stack.enter_context(_fast_path_off())
        stack.enter_context(_attributes_marked(runner.marked()))
        stack.enter_context(calls_intercepted(runner.call))
        for call in program.whole_calls:
            inputs = copy_inputs(call)
            with torch.enable_grad(), Functions(tracker), Operators(tracker):
                result = inputs.run(model)
            tracker.place, tracker.operator = Place(), "the result"
            for tensor in _tensors(result):
                labels = tracker.get(tensor)
                for block in labels.blocks:
                    tracker.atoms.fix(block.atoms, RESULT)
    return runner.ran


RESULT = "its width is that of the model's result"


@contextmanager
def _fast_path_off() -> Generator[None]:
    """Let torch's transformer layers run their Python code, which can be followed."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _attributes_marked(modules: Iterable[tuple[str, nn.Module]]) -> Generator[None]:
    """Let the whole numbers among modules' attributes know whose they are."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for owner, module in modules:
        own = vars(module)
        for name, value in list(own.items()):
            if name.startswith("_") or not _is_size(value):
                continue
            before.append((own, name, value))
            own[name] = marked(value, functools.partial(Source, owner, -1, name))
    try:
        yield
    finally:
        for own, name, value in before:
            own[name] = value


def _is_size(value: object) -> bool:
    if type(value) in (tuple, list):
        return bool(value) and all(type(item) is int for item in value)  # type: ignore[attr-defined]
    return type(value) is int


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a model's result; what it keeps in a cache for its next call is none of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in cast("Mapping[Any, Any]", value).values() for tensor in _tensors(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in cast("Sequence[Any]", value) for tensor in _tensors(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [tensor for field in dataclasses.fields(value) for tensor in _tensors(getattr(value, field.name))]
    return []


class _Runner:
    """Run modules from their graphs, and know where a run is."""

    def __init__(self, program: Program, tracker: DimensionTracker, *, graphs: bool) -> None:
        self._program = program
        self._tracker = tracker
        self._graphs = graphs
        self.ran: set[tuple[str, int]] = set()

    def marked(self) -> list[tuple[str, nn.Module]]:
        """Return the modules whose attributes are read by code that runs."""
        modules = [m for m in all_modules(self._program.model) if not isinstance(m, Region)]
        return [(self._name(m), m) for m in modules if not (self._graphs and _has_graphs(m))]

    def _name(self, module: nn.Module) -> str:
        names = self._program.names
        return names.name(module) if module in names else type(module).__name__

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module."""
        before = self._tracker.place
        capture = capture_of(module)
        name = self._name(module)
        try:
            if capture is None or not _has_graphs(module):
                self._tracker.place = dataclasses.replace(before, module=name)
                return original(module, *args, **kwargs)
            self._tracker.place = Place(name, None if self._graphs else name)
            return self._captured(original, module, capture, args, kwargs)
        finally:
            self._tracker.place = before

    def _captured(
        self, original: Callable[..., Any], module: nn.Module, capture: Capture, args: Any, kwargs: Any
    ) -> Any:
        run_from_graph = self._graphs or isinstance(module, Region)

        def forward(*args: Any, **kwargs: Any) -> Any:
            chosen = self._selected(module, args, kwargs) if run_from_graph else None
            if chosen is None:
                return capture.base.forward(module, *args, **kwargs)
            return self._interpreted(module, *chosen)

        own = vars(module)
        had, before = "forward" in own, own.get("forward")
        own["forward"] = forward
        try:
            return original(module, *args, **kwargs)
        finally:
            if had:
                own["forward"] = before
            else:
                own.pop("forward", None)

    def _selected(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Specialization, list[Any]] | None:
        chosen = select(module, args, kwargs)
        return chosen or select(module, _plain(args), _plain(kwargs))

    def _interpreted(self, module: nn.Module, specialization: Specialization, values: list[Any]) -> Any:
        capture = capture_of(module)
        number = 0 if capture is None else capture.specializations.index(specialization)
        owner = self._name(module)
        self.ran.add((owner, number))
        given = iter(values)
        results: dict[fx.Node, Any] = {}
        for node in specialization.graph.nodes:
            self._tracker.place = Place(owner, owner, number, node.name)
            if node.op == "placeholder":
                results[node] = next(given)
            elif node.op == "output":
                return _filled(node.args[0], results)
            else:
                results[node] = self._run(module, node, results, functools.partial(Source, owner, number, node.name))
        return None

    def _run(self, module: nn.Module, node: fx.Node, results: Mapping[fx.Node, Any], source: Any) -> Any:
        written_by = None if node.op == "call_module" else source
        args = _filled(node.args, results, written_by, (0,))
        kwargs = _filled(dict(node.kwargs), results, written_by, (1,))
        return function_of_node(node, module)(*args, **kwargs)


def _has_graphs(module: nn.Module) -> bool:
    """Say whether a module runs graphs; one that an edit changed may have lost all that it had."""
    capture = capture_of(module)
    return capture is not None and bool(capture.specializations)


def _filled(value: Any, results: Mapping[fx.Node, Any], source: Any = None, path: tuple[str | int, ...] = ()) -> Any:
    """Return a node's arguments, in which plain numbers know where they are written."""
    if isinstance(value, fx.Node):
        found = results[value]
        return Size(found, found.term, source(path)) if isinstance(found, Size) and source is not None else found
    if isinstance(value, (tuple, list)):
        given = cast("Sequence[Any]", value)
        made = [_filled(item, results, source, (*path, i)) for i, item in enumerate(given)]
        if isinstance(given, list):
            return made
        return cast("Any", type(given))(*made) if hasattr(given, "_fields") else tuple(made)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return {key: _filled(item, results, source, (*path, key)) for key, item in pairs}
    if isinstance(value, slice):
        ends = cast("Any", value)
        start, stop = (_filled(getattr(ends, end), results, source, (*path, end)) for end in ("start", "stop"))
        return slice(start, stop, _filled(ends.step, results))
    return marked(value, source, path) if type(value) is int and source is not None else value


def _plain(value: Any) -> Any:
    """Return arguments whose sizes are plain numbers."""
    if isinstance(value, Size):
        return int(value)
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    if type(value) is not dict:
        return value
    return {key: _plain(item) for key, item in cast("dict[Any, Any]", value).items()}
