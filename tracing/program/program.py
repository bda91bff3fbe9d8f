"""A program: a model whose modules run from graphs, and everything passes may ask about it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from torch import fx, nn

from ...compat import submodule
from ...errors import CaptureError, InputError
from ...runtime.graphs import Capture, Miss, Region, capture_of, graph_name, misses_in, usual
from ...runtime.values import ModelNames, qualified
from ...settings import Measure
from ..examples import Generating, Inputs
from ..isolation import in_phase
from ..recording import NO_STEP, Recording, calls_of_generate, generated_calls, record
from .capturing import Opaque
from .model_capture import Unchecked, capture_model, inputs_for

__all__ = [
    "Analyses", "Analysis", "Coverage", "Opaque", "Program", "capture_program", "captured_on", "is_called",
    "outermost",
]  # fmt: skip


_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Analysis(Protocol[_T_co]):
    """A class whose `compute` works something out about a program."""

    @classmethod
    def compute(cls, program: Program) -> _T_co:
        """Work it out."""
        ...


class Searchable(Protocol[_T_co]):
    """Something that can be looked for in a program."""

    def find(self, program: Program) -> Iterable[_T_co]:
        """Return its matches."""
        ...


class Analyses:
    """Work out analyses on demand, and keep them until the program changes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[Any, Any] = {}

    def __getitem__(self, analysis: type[Analysis[_T]]) -> _T:
        if analysis not in self._known:
            self._known[analysis] = analysis.compute(self._program)
        return cast("_T", self._known[analysis])

    def forget(self) -> None:
        """Let go of everything that was worked out."""
        self._known.clear()


class Program:
    """The user's model with its graphs.

    Attributes:
        model: runs from the graphs.
        inputs: the example inputs; none if there were none.
        training: the phase that the program is being optimized for.
        measuring: whether, and how, passes for speed are timed.
        held: bytes of activations that the model, as it was given, holds after a forward in training, where measured.
        replaying: whether a plan says what is rewritten: then no site is refused for want of example inputs.
        forward_seconds: of processor time that the whole calls took, once captured; 0 where they were not made.
        opaque: name -> why that module runs its original forward.
        exact_types: the modules whose exact class may be asked for, with where: no pass may give them another.
        unchecked: what is needed to compare graphs with the original forwards, where that was not done yet.
        analyses: `program.analyses[AnalysisType]`, kept until the next change.
        version: counts changes.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Inputs, ...] = (),
        opaque: dict[str, Opaque] | None = None,
        leaves: Collection[str] = (),
        *,
        training: bool | None = None,
        names: ModelNames | None = None,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.measuring, self.replaying = Measure.YES, False
        self.held: int | None = None
        self.forward_seconds = 0.0
        self.opaque = dict(opaque or {})
        self.exact_types: Mapping[nn.Module, str] = {}
        self.unchecked: Unchecked | None = None
        self.training = model.training if training is None else training
        self.analyses = Analyses(self)
        self.version = 0
        self._leaves = tuple(leaves)
        self._names = None if names is None else (self.version, names)
        self._nodes: dict[tuple[str, int], tuple[fx.Graph, dict[str, fx.Node]]] = {}
        self._recordings: dict[frozenset[nn.Module] | None, Recording] = {}

    @property
    def whole_calls(self) -> tuple[Inputs, ...]:
        """Return those of the example inputs that are calls of the model itself, and not of a part of it."""
        return tuple(call for call in self.inputs if not call.module)

    def touch(self) -> None:
        """Note that a module or graph has changed: analyses, names and recordings are worked out anew."""
        self.version += 1
        self.analyses.forget()
        self._recordings.clear()

    def check(self) -> bool:
        """Compare graphs that were left unchecked with the original forwards; say whether any differ, and are gone."""
        if self.unchecked is None:
            return False
        found, self.unchecked = self.unchecked.check(), None
        self.forward_seconds = found.seconds
        self.touch()  # regions were made anew
        if len(found.opaque) == len(self.opaque):
            return False
        self.opaque = dict(found.opaque)
        return True

    def trust(self, forward_seconds: float) -> None:
        """Take it that graphs are their forwards, and a call takes so long: an equal model was compared."""
        if self.unchecked is not None:
            self.unchecked.recording.forget()
            self.unchecked, self.forward_seconds = None, forward_seconds

    @property
    def names(self) -> ModelNames:
        """Return the names of the model's modules as they are now."""
        if self._names is None or self._names[0] != self.version:
            self._names = (self.version, ModelNames(self.model))
        return self._names[1]

    @property
    def captures(self) -> dict[str, Capture]:
        """Return qualified name -> capture of every module that runs from a graph; "" is the root."""
        found = ((names[0], capture_of(module)) for module, names in self.names.all_of_each())
        return {name: capture for name, capture in found if capture is not None and capture.specializations}

    @property
    def graphs(self) -> dict[str, fx.Graph]:
        """Return every graph by its name; see `graph_name`."""
        return {
            graph_name(name, index): specialization.graph
            for name, capture in self.captures.items()
            for index, specialization in enumerate(capture.specializations)
        }

    def module(self, name: str) -> nn.Module:
        """Return a module by its qualified name; raise CaptureError with the nearest names if there is none."""
        module = submodule(self.model, name)
        if module is None:
            raise CaptureError(f"the model has no module {name!r}{_nearest(name, self.names.modules)}")
        return module

    def name_of(self, module: nn.Module) -> str:
        """Return the qualified name of a module, of a shared one its first; CaptureError if it is not in the model."""
        if module not in self.names:
            raise CaptureError(f"this {type(module).__name__} is not in the model")
        return self.names.name(module)

    def graph(self, owner: str, specialization: int = 0) -> fx.Graph:
        """Return a graph of the module called `owner`; raise CaptureError if it has none, or not so many."""
        capture = capture_of(self.module(owner))
        if capture is None or specialization >= len(capture.specializations):
            why = f": {self.opaque[owner].reason}" if owner in self.opaque else ""
            raise CaptureError(f"module {owner!r} has no graph {specialization}{why}")
        return capture.specializations[specialization].graph

    def node(self, owner: str, name: str, specialization: int = 0) -> fx.Node:
        """Return a node by its name, or what took its place since; else CaptureError, with the nearest names."""
        graph = self.graph(owner, specialization)
        of_graph, known = self._nodes.get((owner, specialization)) or (graph, dict[str, fx.Node]())
        # Editing makes and erases nodes: they are listed anew only where the one asked for is not known to be there.
        if of_graph is not graph or not _is_there(known.get(name), name):
            taken_over = {name: node for node in graph.nodes for name in node.meta.get("replaces", ())}
            known = taken_over | {node.name: node for node in graph.nodes}
            self._nodes[owner, specialization] = (graph, known)
        if name not in known:
            raise CaptureError(f"the graph of {owner or '(root)'!r} has no node {name!r}{_nearest(name, known)}")
        return known[name]

    def callee(self, owner: str, node: fx.Node) -> nn.Module:
        """Return the module that a node in the graph of `owner` calls; CaptureError if it calls none that is there."""
        if node.op != "call_module":
            raise CaptureError(f"node {node.name!r} in {owner or '(root)'!r} calls no module: it is a {node.op}")
        return self.module(qualified(owner, str(node.target)))

    def matches(self, pattern: Searchable[_T]) -> Iterable[_T]:
        """Return the matches of a pattern."""
        return pattern.find(self)

    def coverage(self) -> Coverage:
        """Return how much of the model runs from graphs, and why the rest does not."""
        captured = [name for name in self.captures if not isinstance(self.module(name), Region)]
        return Coverage(captured, self._leaves, tuple(self.opaque.values()), misses_in(self.names.distinct))

    def recording(self, modules: Collection[nn.Module] | None = None) -> Recording:
        """Run the model on its example inputs, in the program's phase; return how its modules (None: all) are called.

        Raises:
            InputError: if the program has no example inputs, or the model fails on them.
        """
        if not self.inputs:
            raise InputError("this needs example_inputs, but the model was captured without them")
        key = None if modules is None else frozenset(modules)
        if key not in self._recordings:
            with in_phase(self.model, self.training):
                self._recordings[key] = record(self.model, self.inputs, modules)
        return self._recordings[key]


def _is_there(node: fx.Node | None, name: str) -> bool:
    """Say whether a node is still in its graph, under the same name."""
    return node is not None and node.name == name and node.next.prev is node


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def capture_program(
    model: nn.Module, example_inputs: object = None, *, training: bool | None = None, checked: bool = True
) -> Program:
    """Give every module that can be captured its graph, in place, in the phase that `model` is in by default. Without
    `example_inputs`, arguments take their defaults, and all others are tensors. InputError if the model refuses them,
    or has lazy parameters; UsageError if they are none of the forms of `normalize_inputs`. Where they are not `checked`
    now, `Program.check` does it.
    """
    inputs = inputs_for(model, example_inputs)
    phase = model.training if training is None else training
    found, unchecked = capture_model(model, inputs, phase, checked=checked)
    program = Program(model, inputs, found.opaque, found.leaves, training=phase, names=found.names)
    program.forward_seconds, program.exact_types, program.unchecked = found.seconds, found.exact_types, unchecked
    return program


def captured_on(
    model: nn.Module, inputs: Sequence[Inputs], *, training: bool, checked: bool = True
) -> tuple[Program, str]:
    """Give a copy of the user's model its graphs, for calls of its own `generate`, too; say so where it has none."""
    made = (generated_calls(model, each) if isinstance(each, Generating) else [each] for each in inputs)
    given = [call for calls in made for call in calls]
    added, remark = ([], "") if training or len(given) != len(inputs) else calls_of_generate(model, given)
    if added:
        try:
            return capture_program(model, [*given, *added], training=training, checked=checked), remark
        except InputError as error:
            remark = f"{NO_STEP}: {error}"
    return capture_program(model, given or None, training=training, checked=checked), remark


def is_called(program: Program, name: str) -> bool:
    """Say whether all modules around it that have graphs call a module, or what holds it."""
    around = name
    while around:
        around = around.rpartition(".")[0]
        capture = capture_of(program.module(around))
        if capture is not None and capture.specializations:
            graphs = [each.graph for _, each in usual(capture.specializations)]
            called = {str(node.target) for graph in graphs for node in graph.find_nodes(op="call_module")}
            path = name[len(around) + bool(around) :].split(".")
            if not any(".".join(path[: count + 1]) in called for count in range(len(path))):
                return False
    return True


def outermost(program: Program, opened: Collection[str]) -> Iterator[str]:
    """Yield the captured modules that are called, no regions, from outside inwards. Who goes through them adds to
    `opened` the names of those that it has looked into, which are left out.
    """
    for name in sorted(program.captures, key=lambda name: (name.count(".") + bool(name), name)):
        if name not in opened and not isinstance(program.module(name), Region) and is_called(program, name):
            yield name


@dataclass(frozen=True)
class Coverage:
    """Count a model's modules by how they run: from a graph, as one operation each, or their original forward, and why.
    `missed` are the guards that turned calls away since the model was handed over, by module.
    """

    captured: Sequence[str]
    leaves: Sequence[str]
    opaque: Sequence[Opaque]
    missed: Sequence[Miss] = ()

    @property
    def share(self) -> float:
        """Return the part of the modules with a forward of the user's that runs from a graph, from 0 to 1."""
        total = len(self.captured) + len(self.opaque)
        return len(self.captured) / total if total else 1.0

    @property
    def text(self) -> str:
        """Return the figures and every reason, a line each."""
        total = len(self.captured) + len(self.opaque)
        head = f"{len(self.captured)} of {total} modules captured ({self.share:.0%}), {len(self.leaves)} leaves"
        missed = (f"  missed: {miss.module or '(root)'}: {miss}" for miss in self.missed)
        return "\n".join([head, *(f"  opaque: {opaque}" for opaque in self.opaque), *missed])

    def __str__(self) -> str:
        return self.text
