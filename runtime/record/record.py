"""What an optimized model remembers of how it became what it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, UntypedStorage, nn

from ...compat import modules_by_name, storage_id
from ...errors import StateError
from ..state import RECORD_KEY, StateMap
from .plan import Plan
from .views import GraphView

__all__ = ["REPEATED", "PassTrace", "Record", "record_of", "state_map_of"]


REPEATED = "when the plan was made"
"""How rewrites that a plan repeats were checked."""


@dataclass(frozen=True)
class PassTrace:
    """What one pass took and did."""

    name: str  # the pass as text, options included
    seconds: float  # verification and measurement included
    decided: int  # how many sites and refusals it had
    applied: int  # how many rewrites of it stand


_Place = tuple[int, int, tuple[int, ...]]
"""Which memory a tensor is in, where it begins there, and its shape."""


@dataclass(frozen=True)
class _Original:
    """The parameters of a model, without weak references: asked, or known by their places in memory."""

    model: ReferenceType[nn.Module]
    places: Mapping[str, tuple[ReferenceType[UntypedStorage], _Place]]

    @staticmethod
    def of(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> _Original:
        found = ((name, parameter, _place(parameter)) for name, parameter in parameters.items())
        return _Original(
            ref(model),
            {name: (ref(tensor.untyped_storage()), place) for name, tensor, place in found if place is not None},
        )

    def names_of(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, str]]:
        """Yield id and name of those of some tensors that are parameters of the model."""
        model = self.model()
        asked = {} if model is None or record_of(model) is not None else {id(p): n for n, p in model.named_parameters()}
        placed = {place: name for name, (memory, place) in self.places.items() if memory() is not None}
        for tensor in tensors:
            place = _place(tensor)
            name = asked.get(id(tensor)) or (placed.get(place) if place is not None else None)
            if name is not None:
                yield id(tensor), name


def _place(tensor: Tensor) -> _Place | None:
    """Return where a tensor is; a sparse one is nowhere, nor is one that has no shape yet."""
    try:
        return storage_id(tensor), int(tensor.storage_offset()), tuple(tensor.shape)
    except (NotImplementedError, ValueError, RuntimeError):
        return None


@dataclass(frozen=True, eq=False)
class Record:
    """Everything that reports, checkpoints and replays need, and no tensor that holds data."""

    plan: Plan  # every decision, in the order taken
    state_map: StateMap  # from the original names and tensors to today's
    # of each changed graph, by its module's qualified name ("" is the root), what it was before each pass that changed
    # it, with the position of the pass in the plan; and what it is now
    graph_versions: Mapping[str, Sequence[tuple[int, GraphView]]]
    graphs_after: Mapping[str, GraphView]
    coverage: str  # in words, how much of the model was captured
    parameters_before: int  # numbers of parameter tensors, tied ones counted once
    parameters_after: int
    # "before_ms", "after_ms", "speedup" on the example inputs; the same under "calls" of a "prompt" and a
    # "step"; "sizes": ratios on other sizes and layouts, "untimed_sizes": why not
    timings: Mapping[str, Any] | None = None
    # of a training step in bytes: "live_before", "live_after" the forward, "peak_before", "peak_after"
    memory: Mapping[str, int] | None = None
    # from the capture on: "seconds" of "budget_s", "forward_ms" (with backward in training), "stages" in seconds; what
    # was compared "otherwise" for want of time; before that "capture_s"
    spent: Mapping[str, Any] | None = None
    checked: str = "not at all"  # what rewrites were verified in: "float64", "float32", or why they were not
    eval_only: tuple[str, ...] = ()  # the passes whose rewrites hold in evaluation mode only
    finished_by: tuple[str, ...] = ()  # the passes that acted on the finished model; nothing can be done after them
    # for each of these passes, in words, how the model was compared with that before
    finishing: dict[str, str] = field(default_factory=dict[str, str])
    traces: tuple[PassTrace, ...] = ()
    # the original structure, on the meta device; to be copied before it is changed
    skeleton: nn.Module = field(default_factory=nn.Module, repr=False)
    # name, source line and reason of each module that could not be captured
    opaque: tuple[tuple[str, str, str], ...] = ()
    attributes: frozenset[str] = frozenset()  # qualified names of the attributes that passes gave other values
    remark: str = ""  # what the user should know of the example calls, or ""
    # what became of the optimizer that was given; empty where there was none
    optimizer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # the parameters whose hooks could not be registered on the result
    lost_hooks: list[str] = field(default_factory=list[str])
    # what was asked for in the last call and changed nothing, a line each
    idle: list[str] = field(default_factory=list[str])
    earlier_passes: int = 0  # how many passes of the plan ran in earlier calls
    cached: str = ""  # when it was decided, as a date with a time, where the cache of decisions told it; "" if now
    # the forms of the example calls, without data; empty where JSON has no form for them
    calls: Sequence[Mapping[str, Any]] = ()
    _originals: list[_Original] = field(default_factory=list["_Original"], init=False, repr=False)

    @property
    def graphs_before(self) -> dict[str, GraphView]:
        """Return each changed graph as it was at first."""
        return {name: versions[0][1] for name, versions in self.graph_versions.items()}

    def remember(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note the model's parameters by name, for optimizers over them; neither is kept alive."""
        earlier = record_of(model)
        self._originals.extend([_Original.of(model, parameters)] if earlier is None else earlier._originals)

    def original_names(self, tensors: Iterable[Tensor]) -> dict[int, str]:
        """Return id -> original name for those of some tensors that are parameters of the original."""
        given = list(tensors)
        return {number: name for original in self._originals for number, name in original.names_of(given)}

    def changed(self, plan: Plan, state_map: StateMap | None = None, **others: Any) -> Record:
        """Return the record of the same model with other decisions, and what else is to be other."""
        new = replace(self, plan=plan, state_map=self.state_map if state_map is None else state_map, **others)
        new._originals.extend(self._originals)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_originals"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _originals=[])


def record_of(model: nn.Module) -> Record | None:
    """Return the record of an optimized model, or None if it is not one (a part of one is not)."""
    return getattr(model, "__dict__", {}).get(RECORD_KEY)


def needed_record(model: nn.Module) -> Record:
    """Return the record of an optimized model, or raise a StateError that says where one is, if it is inside."""
    record = record_of(model)
    if record is None:
        raise StateError(f"this {type(model).__name__} was not optimized by fxopt; {_what_to_give(model)}")
    return record


def _what_to_give(model: nn.Module) -> str:
    """Say where the optimized model is: inside a wrapper, perhaps."""
    modules = modules_by_name(model) if isinstance(model, nn.Module) else {}
    inside = (name for name, module in modules.items() if record_of(module) is not None)
    name = next(inside, None)
    if name is None:
        return "give the whole model that fxopt.optimize returned"
    return f"the model that fxopt.optimize returned is its '{name}': give that one"


def state_map_of(model: nn.Module) -> StateMap | None:
    """Return the map from an optimized model's original names to today's, or None for any other model."""
    record = record_of(model)
    return None if record is None else record.state_map
