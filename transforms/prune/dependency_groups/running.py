"""Run a program's graphs node by node, or its modules' own forwards, and follow every operator on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ....compat import all_modules
from ....runtime.graphs import Capture, Region, capture_of, select
from ....runtime.guards import GuardMiss
from ....runtime.values import flatten
from ....tracing.isolation import in_phase, preserved
from ....tracing.program import GraphRunner, Program
from ....tracing.recording import calls_intercepted, copy_inputs
from .dimension_tracker import DimensionTracker
from .functions import Functions, Operators
from .sizes import Size, Source, marked

__all__ = ["CACHED", "RESULT", "cached_in", "run"]

RESULT = "its width is that of the model's result"

CACHED = "the model's result has it in a cache for the next call; give use_cache=False among the example inputs"


def run(program: Program, tracker: DimensionTracker, *, training: bool) -> set[tuple[str, int]]:
    """Run a program on its example inputs, as the tracker says by own forwards; return the graphs that ran."""
    caller = _Caller(program, tracker)
    model = program.model
    with ExitStack() as stack:
        stack.enter_context(preserved(model))
        stack.enter_context(in_phase(model, training))
        stack.enter_context(_fast_path_off())
        stack.enter_context(_attributes_marked(caller.marked()))
        stack.enter_context(calls_intercepted(caller.call))
        for call in program.whole_calls:
            inputs = copy_inputs(call)
            with torch.enable_grad(), Functions(tracker), Operators(tracker):
                result = inputs.run(model)
            tracker.operator = "the result"
            _fix(tracker, _tensors(result), RESULT)
            _fix(tracker, cached_in(result), CACHED)
    return caller.ran


def _fix(tracker: DimensionTracker, values: Iterable[Any], reason: str) -> None:
    """Say that the widths of tensors stay."""
    for tensor in values:
        for block in tracker.get(tensor).blocks if isinstance(tensor, Tensor) else ():
            tracker.fix(block.atoms, reason)


def cached_in(result: Any) -> list[Any]:
    """Return what objects in a model's result hold for the next call."""
    shown = _tensors(result)
    return [each for each in flatten(result).values() if not _is_among(each, shown)]


def _is_among(value: Any, tensors: Sequence[Tensor]) -> bool:
    return any(value is each for each in tensors)


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
            items: Sequence[Any] = value if type(value) in (tuple, list) else (value,)
            if not name.startswith("_") and items and all(type(item) is int for item in items):
                before.append((own, name, value))
                own[name] = marked(value, Source(owner, -1, name))
    try:
        yield
    finally:
        for own, name, value in before:
            own[name] = value


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a model's result, but for those that objects of other kinds hold, such as caches."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    items = cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


class _Caller:
    """Call modules, captured ones from their graphs, and know where a run is."""

    def __init__(self, program: Program, tracker: DimensionTracker) -> None:
        self._program, self._tracker = program, tracker
        self.ran: set[tuple[str, int]] = set()

    def marked(self) -> list[tuple[str, nn.Module]]:
        """Return the modules whose attributes are read by code that runs."""
        modules = [m for m in all_modules(self._program.model) if not isinstance(m, Region)]
        return [(self._name(m), m) for m in modules if self._tracker.own_forwards or _graphs_of(m) is None]

    def _name(self, module: nn.Module) -> str:
        names = self._program.names
        return names.name(module) if module in names else type(module).__name__

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        tracker, capture = self._tracker, _graphs_of(module)
        before = tracker.module, tracker.is_own_forward
        tracker.module = self._name(module)
        tracker.is_own_forward = capture is not None and tracker.own_forwards
        own = vars(module)
        replaced = {name: own[name] for name in ("forward",) if name in own}
        try:
            if capture is not None:
                own["forward"] = self._forward(module, capture)
            return original(module, *args, **kwargs)
        finally:
            tracker.module, tracker.is_own_forward = before
            if capture is not None:
                own.pop("forward", None)
                own.update(replaced)

    def _forward(self, module: nn.Module, capture: Capture) -> Callable[..., Any]:
        """Return what runs in the place of a captured module's forward."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            run_from_graph = not self._tracker.own_forwards or isinstance(module, Region)
            chosen = None
            if run_from_graph:
                chosen = select(module, args, kwargs) or select(
                    module, *pytree.tree_map_only(Size, int, (args, kwargs))
                )
            if chosen is None:
                return capture.base.forward(module, *args, **kwargs)
            specialization, values = chosen
            owner, number = self._name(module), capture.specializations.index(specialization)
            self.ran.add((owner, number))
            try:
                return _Runner(module, specialization.graph, owner, number).run(*values)
            except GuardMiss:  # the graph is not for these values, as the model finds out, too
                return capture.base.forward(module, *args, **kwargs)

        return forward


def _graphs_of(module: nn.Module) -> Capture | None:
    """Return a module's capture if it has graphs; one that an edit changed may have lost all that it had."""
    capture = capture_of(module)
    return capture if capture is not None and capture.specializations else None


class _Runner(GraphRunner):
    """Let plain numbers among arguments know where they are written; what modules are called with stays as it is."""

    def __init__(self, module: nn.Module, graph: fx.Graph, owner: str, number: int) -> None:
        super().__init__(module, graph)
        self._where = owner, number

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        source = None if n.op in ("call_module", "output") else Source(*self._where, n.name)
        return tuple(self._filled(value, source, number) for number, value in enumerate((n.args, n.kwargs)))

    def _filled(self, value: Any, source: Source | None, *way: str | int) -> Any:
        """Return arguments with the values of nodes in their places; the last step of the way to them is new."""
        if source is not None and way:
            source = dataclasses.replace(source, path=(*source.path, *way))
        if isinstance(value, fx.Node):
            found = self.env[value]
            return Size(found, found.term, source) if isinstance(found, Size) and source is not None else found
        if isinstance(value, (tuple, list)):
            given = cast("Sequence[Any]", value)
            made = [self._filled(item, source, i) for i, item in enumerate(given)]
            if isinstance(given, list):
                return made
            return cast("Any", type(given))(*made) if hasattr(given, "_fields") else tuple(made)
        if isinstance(value, Mapping):
            pairs = cast("Mapping[str, Any]", value).items()
            return {key: self._filled(item, source, key) for key, item in pairs}
        if isinstance(value, slice):
            ends = cast("Any", value)
            start, stop = (self._filled(getattr(ends, end), source, end) for end in ("start", "stop"))
            return slice(start, stop, self._filled(ends.step, None))
        return marked(value, source) if type(value) is int and source is not None else value
