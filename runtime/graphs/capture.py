"""The graphs of a module: which there are, when each holds, and whose they are."""

from __future__ import annotations

import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn

from ...errors import CaptureError
from ...operators import Keeping
from ..guards import SELF, Argument, Guard, Source, is_training, reader
from ..values import Signature, class_recipe, signature_of
from .contexts import Context
from .inactive import is_unchanged
from .portable import PortableGraph, copy_graph

__all__ = [
    "Capture", "RegionPlan", "Specialization", "capture_of", "check_picklable", "forget_derived", "graph_name",
    "required_capture", "specializations_of", "usual", "with_graph", "with_specializations",
]  # fmt: skip


@dataclass
class Specialization:
    """One graph of a module, and when it holds."""

    guards: tuple[Guard, ...]
    graph: fx.Graph
    # where the value of each placeholder is in the forward's arguments
    arguments: Mapping[str, Source] = field(default_factory=dict[str, Source])
    reads: frozenset[str] = frozenset()  # plain attributes whose value, and children whose class, is part of the graph
    volatile: bool = False  # what it computes hangs on attributes that are set while the model runs

    @property
    def is_delegated(self) -> bool:
        """Say whether an engine computes regions of it."""
        return any(getattr(node.target, "operator", "") == "delegated" for node in self.graph.nodes)

    def argument(self, placeholder: fx.Node) -> Source:
        """Return where the value of a placeholder is in the forward's arguments."""
        return self.arguments.get(placeholder.name) or Argument(str(placeholder.target))

    def fits(self, names: Mapping[str, Any]) -> bool:
        """Say whether all guards hold for a call whose arguments (and `self`) are `names`."""
        read = reader(names)
        return all(guard.holds_as_read(read) for guard in self.guards)

    def runs_in_mode(self, module: nn.Module, *, flipped: bool = False) -> bool:
        """Say whether it is for the mode that `module` and its children are in or, if `flipped`, for the other."""

        def read(source: Source) -> Any:
            if source == SELF:
                return module
            value = source.read(read)
            return value is not flipped if is_training(source) else value

        asked = (guard for guard in self.guards if guard.asks_for_training)
        return all(guard.holds_as_read(read) for guard in asked)


@dataclass(frozen=True, eq=False)
class RegionPlan:
    """How to make a region that a graph calls: `borrowed` are the names that the owner has for what it calls."""

    context: Context
    capture: Capture
    borrowed: Sequence[str]


@dataclass(eq=False)
class Capture:
    """The graphs of one module, or of several equal ones."""

    base: type[nn.Module]  # the class that the module has without its graphs
    specializations: list[Specialization]  # the first whose guards hold is run; with none the original forward is
    signature: Signature | None = None  # arguments of the forward, where they differ from those of `base.forward`
    # reason -> how often none held while the model was being worked on
    misses: Counter[str] = field(default_factory=Counter[str])
    dropped: str = ""  # why graphs were dropped after capture; a call that none of those left fits is a miss then
    lost: str = ""  # why the original forward must not run in the place of the graphs; empty if it may
    # the module that may edit the graphs in place; None while they may be shared
    owner: weakref.ref[nn.Module] | None = None
    compiled: type[nn.Module] | None = None  # the class made from the graphs; None where it is not up to date
    rewritten: bool = False  # a graph was put in here in the place of one that was captured
    inactive: bool = False  # the original forward runs, and the graphs are only kept; see `deactivate`
    # by the names that graphs call them by, those to give a module that has none of them yet
    regions: Mapping[str, RegionPlan] = field(default_factory=dict[str, RegionPlan])
    _parameters: Signature | None = None
    _rebased: dict[type[nn.Module], Capture] = field(default_factory=dict[type[nn.Module], "Capture"])

    @property
    def parameters(self) -> Signature:
        """Return the arguments of the forward."""
        if self._parameters is None:
            self._parameters = self.signature or signature_of(self.base.forward)
        return self._parameters

    @property
    def reads(self) -> frozenset[str]:
        """Return the plain attributes whose values are part of a graph: setting one drops that graph."""
        return frozenset(name for specialization in self.specializations for name in specialization.reads)

    @property
    def is_whole(self) -> bool:
        """Say whether none of the graphs was dropped after capture, and there is one."""
        return bool(self.specializations) and not self.dropped

    def forget_derived(self) -> None:
        """Let the tensors that rewritten graphs derive from others be made anew."""
        for node in (node for each in self.specializations if self.rewritten for node in each.graph.nodes):
            if isinstance(node.target, Keeping):
                node.target.forget_all()

    def forget_gone(self) -> None:
        """Let rewritten graphs let go of what they derived from tensors that nobody holds any more."""
        for node in (node for each in self.specializations if self.rewritten for node in each.graph.nodes):
            if isinstance(node.target, Keeping):
                node.target.forget_gone()

    def copy(self) -> Capture:
        """Return a capture of the same graphs; both count as shared from now on."""
        self.owner = None
        return self._with(list(self.specializations))

    def rebased(self, base: type[nn.Module]) -> Capture:
        """Return a capture of the same graphs for another class; modules that share this one share that one too."""
        if self.owner is None and base in self._rebased:
            return self._rebased[base]
        shared = self.owner is None
        new = self.copy()
        new.base, new.compiled, new._parameters = base, None, None
        if shared:
            self._rebased[base] = new
        return new

    def set_inactive(self, inactive: bool) -> Capture:
        """Return a capture of the same graphs from which modules do not run, or run again."""
        return replace(self.copy(), inactive=inactive, compiled=None)

    def private(self) -> Capture:
        """Return a capture of copies of the graphs; names and meta are kept."""
        return self._with(
            [replace(v, graph=copy_graph(v.graph), arguments=dict(v.arguments)) for v in self.specializations]
        )

    def _with(self, specializations: list[Specialization]) -> Capture:
        return replace(
            self,
            specializations=specializations,
            misses=Counter(self.misses),
            owner=None,
            _parameters=None,
            _rebased={},
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        memo[id(self)] = new = self.copy()
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        check_picklable(self.base)
        specializations = [
            (v.guards, PortableGraph(v.graph), dict(v.arguments), v.reads, v.volatile) for v in self.specializations
        ]
        kept = (self.signature, self.misses, self.dropped, self.lost, self.rewritten, self.inactive, self.regions)
        return _rebuild_capture, (class_recipe(self.base), specializations, *kept)


def check_picklable(base: type[nn.Module]) -> None:
    """Raise a PicklingError for a `GraphModule`, whose class is made for itself alone."""
    if issubclass(base, fx.GraphModule):
        raise pickle.PicklingError(
            "an optimized torch.fx.GraphModule cannot be pickled; use fxopt.save(model, path), fxopt.export, or "
            "torch.save(model.state_dict(), path)"
        )


def _rebuild_capture(
    recipe: tuple[Callable[..., type[nn.Module]], tuple[Any, ...]],
    specializations: list[tuple[tuple[Guard, ...], PortableGraph, dict[str, Source], frozenset[str], bool]],
    signature: Signature | None,
    misses: Counter[str],
    dropped: str,
    lost: str,
    rewritten: bool,
    inactive: bool,
    regions: Mapping[str, RegionPlan],
) -> Capture:
    make, given = recipe
    rebuilt = [
        Specialization(guards, graph.graph(), args, reads, volatile)
        for guards, graph, args, reads, volatile in specializations
    ]
    return Capture(
        make(*given), rebuilt, signature, misses, dropped, lost, rewritten=rewritten, inactive=inactive, regions=regions
    )


def capture_of(module: nn.Module) -> Capture | None:
    """Return the graphs that `module` runs from, or None; while it is inactive, those it would run from."""
    capture: Capture | None = module.__dict__.get("_fxopt_capture")
    return capture if capture is None or is_unchanged(module, capture.base) else None


def forget_derived(module: Any) -> None:
    """Let what the graphs of a module, if it has any, derive from its tensors be made anew."""
    capture: Capture | None = module.__dict__.get("_fxopt_capture")
    if capture is not None:
        capture.forget_derived()


def specializations_of(module: nn.Module) -> Sequence[Specialization]:
    """Return the graphs that `module` runs from, each with what it is for; none if it was not captured."""
    capture = capture_of(module)
    return () if capture is None else capture.specializations


def usual(specializations: Sequence[Specialization]) -> list[tuple[int, Specialization]]:
    """Return the graphs that calls mostly run, with their numbers: behind graphs with regions for an engine, the others
    are for calls that these do not take.
    """
    numbered = list(enumerate(specializations))
    delegated = [each for each in numbered if each[1].is_delegated] if len(numbered) > 1 else []
    return delegated or numbered


def graph_name(owner: str, number: int) -> str:
    """Return what a graph of a module is called: the second one of "a" is "a#1"."""
    return f"{owner}#{number}" if number else owner


def required_capture(module: nn.Module) -> Capture:
    """Return the graphs that `module` runs from, or raise a CaptureError."""
    capture = capture_of(module)
    if capture is None:
        raise CaptureError(f"this {type(module).__name__} has no graph: it was not captured, or it is a leaf")
    return capture


def with_graph(module: nn.Module, specialization: int, graph: fx.Graph | None = None) -> None:
    """Give `module` graphs of its own: copies, or in the place of one of them another graph; see `recompile`."""
    specializations = required_capture(module).specializations
    with_specializations(
        module,
        [
            replace(v, graph=copy_graph(v.graph) if graph is None or number != specialization else graph)
            for number, v in enumerate(specializations)
        ],
    )


def with_specializations(module: nn.Module, specializations: Sequence[Specialization]) -> None:
    """Give `module` other graphs, which nobody else may have; see `recompile`."""
    capture = required_capture(module)
    specializations = [replace(v, arguments=dict(v.arguments)) for v in specializations]
    new = replace(  # it runs from its graphs again, where it was inactive
        capture.copy(), specializations=specializations, owner=weakref.ref(module), compiled=None, rewritten=True,
        inactive=False,
    )  # fmt: skip
    module.__dict__["_fxopt_capture"] = new
