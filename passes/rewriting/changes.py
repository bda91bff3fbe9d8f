"""What a pass changed, through its edit or behind its back, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...compat import DispatchMode
from ...compat.operators import written_arguments
from ...errors import MatchFailure
from ...runtime.values import ChangeCounts, ModelNames, qualified, tensors_in
from ...tracing.isolation import AttributeState, ParameterData
from ...tracing.program import Program
from .snapshot import GraphState, ModuleState, Snapshot

__all__ = ["ChangeWatch", "Journal", "UnnotedChange", "only_reading", "watching"]


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
    """A pass changed something otherwise than through its edit: `what` it did, a clause, and what to use `instead`."""

    def __init__(self, kind: tuple[str, str], name: str) -> None:
        self.what, self.instead = kind[0].format(name), kind[1]
        super().__init__(f"the pass {self.what} without its edit knowing; use {self.instead}")


class ChangeWatch:
    """Hold what a module of a program, with all inside it, is, to see later what became of it."""

    def __init__(self, snapshot: Snapshot, program: Program, name: str) -> None:
        names = ModelNames(program.module(name)) if name else program.names
        self._names = {module: qualified(name, paths[0]) for module, paths in names.all_of_each()}
        self._states = snapshot.settled(self._names) if name else snapshot.whole(program)
        self._accepted: dict[nn.Module, AttributeState] = {}
        self.data = ParameterData(tensor for state in self._states for _, tensor in state.tensors())

    def accept(self, modules: Iterable[nn.Module] = ()) -> None:
        """Take what modules hold now as what they should; of all of them, where none is named."""
        for module in tuple(modules) or tuple(self._names):
            if module in self._names:
                self._accepted[module] = AttributeState(module)

    def check_module(self, module: nn.Module) -> None:
        """Raise UnnotedChange if a module does not hold what it should."""
        if module not in self._names:
            return
        state = self._accepted.get(module) or self._states.by_module[module].attributes
        if state.is_same():
            return
        for where, name in state.differences():
            known = where in _KINDS
            raise UnnotedChange(
                _KINDS[where] if known else _OTHERWISE, qualified(self._names[module], name if known else where)
            )

    def check(self) -> list[ModuleState]:
        """Return what the changed modules were; raise UnnotedChange for the first change that was not accepted."""
        for key in self.data.changed():
            raise UnnotedChange(_IN_PLACE, self._name_of(key))
        changed = self._states.changed()
        for module in dict.fromkeys((*(state.module for state in changed), *self._accepted)):
            self.check_module(module)
        for owner, graph in self._graphs():
            if not graph.is_same():
                raise UnnotedChange(_GRAPH, owner or "(root)")
        return changed

    def restore(self) -> None:
        """Put everything back as it was at first."""
        for state in self._states.changed():
            state.restore()
        self.data.restore()
        for _, graph in self._graphs():
            graph.restore()

    def _graphs(self) -> Iterator[tuple[str, GraphState]]:
        """Yield each graph once, with the name of the first module that has it."""
        first: dict[GraphState, nn.Module] = {}
        for state in self._states:
            for graph in state.graphs:
                first.setdefault(graph, state.module)
        return ((self._names[module], graph) for graph, module in first.items())

    def _name_of(self, tensor: int) -> str:
        named = ((state.module, *each) for state in self._states for each in state.tensors())
        return next(qualified(self._names[module], name) for module, name, value in named if id(value) == tensor)


@contextmanager
def watching(snapshot: Snapshot, program: Program, name: str) -> Generator[ChangeWatch]:
    """Watch a part of a program while a pass rewrites it."""
    watch = ChangeWatch(snapshot, program, name)
    with watch.data.watched(), _Writes(watch.data):
        yield watch


@contextmanager
def only_reading(program: Program, snapshot: Snapshot) -> Generator[None]:
    """Watch a program while a pass looks for sites, and may run the model; UnnotedChange if it changed anything."""
    watch = ChangeWatch(snapshot, program, "")
    renormalised = {id(m.weight) for m in program.names.distinct if vars(m).get("max_norm") is not None}
    parameters = {name: p for name, p in program.names.parameters().items() if id(p) not in renormalised}
    counts = ChangeCounts(parameters.values())
    with watch.data.watched():
        yield
    try:
        for written in counts.changed():
            raise UnnotedChange(_IN_PLACE, next(name for name, each in parameters.items() if each is written))
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


class Journal:
    """Note changes, each with what takes it back; the snapshot forgets what is changed, and `watch` finds the rest."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.watch: ChangeWatch | None = None
        self._before: list[ModuleState] = []
        self._undo: list[Callable[[], object]] = []
        self._kept: set[nn.Module] = set()
        self._changed: dict[nn.Module, None] = {}

    @property
    def changed(self) -> Collection[nn.Module]:
        """Return the modules that are changed."""
        return self._changed.keys()

    def note(self, undo: Callable[[], object]) -> None:
        """Note a change by what takes it back."""
        self._undo.append(undo)

    def keep(self, before: Iterable[ModuleState]) -> None:
        """Note what modules were before all changes: of that nothing is left out when these are taken back."""
        self._before += before
        self._forget([state.module for state in self._before])
        self._look_again()

    @contextmanager
    def changing(self, *modules: nn.Module) -> Generator[None]:
        """Note what modules hold before a change that is made inside; raise UnnotedChange if one was not noted."""
        for module in modules:
            if self.watch is not None:
                self.watch.check_module(module)
            if module not in self._kept:
                self._kept.add(module)
                self.note(self.snapshot.of(module).attributes.restore)
            self._changed[module] = None
        yield
        self.accept(*modules)

    def accept(self, *modules: nn.Module) -> None:
        """Take what modules hold now as noted; of all of them, where none is named."""
        if self.watch is not None:
            self.watch.accept(modules)
        self._forget(modules)
        if not modules:
            self.snapshot.forget()

    def _forget(self, modules: Collection[nn.Module]) -> None:
        self._changed.update(dict.fromkeys(modules))
        if modules:
            self.snapshot.forget(*modules)

    def _look_again(self) -> None:
        """Let the snapshot know what changed modules are from now on."""
        for module in self._changed:
            self.snapshot.of(module)

    def undo(self) -> None:
        """Take all changes back, the last one first."""
        while self._undo:
            self._undo.pop()()
        for state in self._before:
            state.restore()
        self._forget(self._changed)
        self._look_again()
        self.clear()

    def clear(self) -> None:
        """Let go of what was there before: the changes stay."""
        self._undo.clear()
        self._before.clear()
        self._kept.clear()
        self._changed.clear()
