"""Sites and refusals, what plans keep of them, and the words of the contract."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import fx, nn

from ...errors import CaptureError, MatchFailure, PlanError, UsageError
from ...runtime.graphs import capture_of, graph_name
from ...tracing.program import Program
from .causes import Cause, Reason

__all__ = [
    "VOLATILE", "Goal", "Numerics", "OwnForward", "Phase", "Refusal", "Site", "StaleSite", "as_plain", "is_volatile",
]  # fmt: skip


class Numerics(enum.Enum):
    """What a rewrite promises about results."""

    EXACT = "exact"
    """Bitwise the same, the random stream included."""
    REASSOCIATED = "reassociated"
    """The same function in exact arithmetic; rounding may differ."""
    APPROXIMATE = "approximate"
    """Another function within an error budget that the pass's options state."""
    SEMANTIC = "semantic"
    """Another function by design."""

    @property
    def keeps_function(self) -> bool:
        """Say whether results are as before, but for rounding."""
        return self in (Numerics.EXACT, Numerics.REASSOCIATED)


class Goal(enum.Enum):
    """What a rewrite is for; it decides how the rewrite is measured."""

    SPEED = "speed"
    MEMORY = "memory"
    SIZE = "size"
    PARALLEL = "parallel"


class Phase(enum.Enum):
    """When a rewrite is valid."""

    EVAL = "eval"
    TRAIN = "train"
    BOTH = "both"

    @classmethod
    def meant(cls, phase: str | Phase | None) -> Phase | None:
        """Return what a user means by a phase or its name, or raise UsageError; None is the model's own mode."""
        if phase is None:
            return None
        words = {"train": cls.TRAIN, "training": cls.TRAIN, "eval": cls.EVAL, "inference": cls.EVAL}
        found = words.get(phase) if isinstance(phase, str) else phase
        if found not in (cls.TRAIN, cls.EVAL):
            shown = (
                f"phase={phase!r}" if isinstance(phase, (str, int, Phase)) else f"phase of type {type(phase).__name__}"
            )
            raise UsageError(f"{shown}; use 'train', 'eval', or None for the model's own mode")
        return found

    @property
    def covers_training(self) -> bool:
        return self is not Phase.EVAL

    @property
    def covers_evaluation(self) -> bool:
        return self is not Phase.TRAIN


class OwnForward(enum.Enum):
    """What the original forward of a rewritten module is worth for a call that no graph fits."""

    RIGHT = "right"
    """It gives the same: it may run."""
    ACCEPTABLE = "acceptable"
    """It gives something else that the user can do with (the unquantized function, say): it may run."""
    WRONG = "wrong"
    """It must not run: the call raises GuardError."""


@dataclass(frozen=True)
class Refusal:
    """Why a place that looks right is left, and the node or module at fault.

    `reason`: one clause without a full stop, which is of a kind, `cause`; or a reason that has its values.
    """

    reason: str | Reason
    at: str | fx.Node
    cause: Cause = Cause.NOT_APPLICABLE

    @property
    def why(self) -> Reason:
        """Return the reason as a value."""
        return Reason(self.cause, text=self.reason) if isinstance(self.reason, str) else self.reason


class StaleSite(MatchFailure):
    """A site is no longer what was found: it overlaps with one that was rewritten before it."""


@dataclass(frozen=True)
class Site:
    """One place that a pass wants to rewrite. Nodes are kept by name: it survives copies of its graph.

    Attributes:
        owner: qualified name of the module whose graph holds the nodes ("" is the root), or which is rewritten whole;
            of a site with parts, of the module around all of them.
        nodes: label -> name of a node in that graph; "call/node" is one in the graph of the child that `call` calls.
        specialization: which of the owner's graphs (0 unless training and evaluation differ).
        choices: the lowerings that `rewrite` can produce, in order of preference; empty if there is one only.
        choice: the lowering that `rewrite` shall produce now.
        phase: narrows the pass's own phase for this site.
        required: the user asked for this choice by name: it is timed and reported, but kept where it is slower.
        detail: one clause for the report ("128 members, 4 parameters each").
        label: what the report calls the site; the owner's name by default.
        kind: equal for alike sites of one owner, or at one place in several: what is measured of one holds for all,
            though their data differ. None is like no other.
        parts: the places in several modules that are rewritten as one; see `Site.over`.
        data: plain values that `find` decided on (kept channels, scales); plans save them, and replaying uses them.
        found: what `find` learned there, for `rewrite` or for the figures; None where a plan is replayed.
        is_there: says whether what was found at the site is still there, once other sites have been rewritten.
        on_read: called before a node is looked up, while the site is rewritten: copies of graphs are handed out then.
    """

    program: Program = field(repr=False, compare=False)
    owner: str
    nodes: Mapping[str, str]
    specialization: int = 0
    choices: tuple[str, ...] = ()
    choice: str | None = None
    phase: Phase | None = None
    required: bool = False
    detail: str = ""
    label: str = ""
    kind: Hashable = None
    parts: tuple[Site, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    found: Any = field(default=None, repr=False, compare=False)
    is_there: Callable[[Site], bool] | None = field(default=None, repr=False, compare=False)
    on_read: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", as_plain(self.data, "site data"))
        labels = [label for site in (self, *self.parts) for label in site.nodes]
        repeated = next((label for label in labels if labels.count(label) > 1), None) if self.parts else None
        if repeated is not None:
            raise UsageError(f"two parts of a site have a node called {repeated!r}; give each another label")

    @classmethod
    def over(cls, program: Program, *parts: Site, **options: Any) -> Site:
        """Return one site over places in several modules, with different labels of nodes: it lands whole or not at all.

        It is verified at the nearest module around all of them that runs itself. `options`: other fields.
        """
        if not parts:
            raise UsageError("a site over several modules needs at least one part")
        paths = [part.owner.split(".") if part.owner else [] for part in parts]
        shared = next((n for n, names in enumerate(zip(*paths, strict=False)) if len(set(names)) > 1), None)
        around = paths[0][: min(map(len, paths)) if shared is None else shared]
        while around and type(program.module(".".join(around))).forward is nn.Module.forward:
            around.pop()  # a list or dictionary of modules is never called itself
        return cls(program, ".".join(around), {}, parts=parts, **options)

    def __getitem__(self, label: str) -> fx.Node:
        """Return the node called `label`, looked up in the graph as it is now; of any part."""
        if self.on_read is not None:
            self.on_read()
        site = self.part(label)
        return site.program.node(site.owner, site.nodes[label], site.specialization)

    def part(self, label: str) -> Site:
        """Return the part that has the node called `label`; a site without parts is its only one."""
        for site in (self, *self.parts):
            if label in site.nodes:
                return site
        known = ", ".join(label for site in (self, *self.parts) for label in site.nodes)
        raise UsageError(f"the site has no node called {label!r}; its nodes are {known or 'none'}")

    @property
    def places(self) -> tuple[Site, ...]:
        """Return the parts, or the site itself where it is in one module."""
        return self.parts or (self,)

    @property
    def graph(self) -> fx.Graph:
        if self.on_read is not None:
            self.on_read()
        return self.program.graph(self.owner, self.specialization)

    def module(self, label: str) -> nn.Module:
        """Return the module that the call_module node `label` calls."""
        return self.program.callee(self.part(label).owner, self[label])

    @property
    def key(self) -> str:
        """Name the site: stable over runs of the same model, and printable."""
        owner = graph_name(self.owner or "(root)", self.specialization)
        if self.parts:
            keys = [part.key for part in self.parts]
            digest = hashlib.sha256("+".join(keys).encode()).hexdigest()[:8]
            return f"{owner}:[{keys[0]}..{keys[-1]}({len(keys)})]{digest}" if len(keys) > 2 else f"{owner}:{keys}"
        names = sorted(self.nodes.values())
        if not names:
            return owner
        span = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}({len(names)})"
        return f"{owner}:{span}"

    def read_through(self, on_read: Callable[[], None]) -> Site:
        """Return the same site, which calls a function before it looks up a node."""
        parts = tuple(part.read_through(on_read) for part in self.parts)
        return replace(self, parts=parts, on_read=on_read)

    def overlaps(self, item: Site | Refusal) -> bool:
        """Say whether the two have a node in common; a refusal has none."""
        nodes = {(place.owner, name) for place in self.places for name in place.nodes.values()}
        places = item.places if isinstance(item, Site) else ()
        return any((place.owner, name) in nodes for place in places for name in place.nodes.values())

    def check_there(self) -> None:
        """Raise StaleSite where the site is no longer what was found, after others have been rewritten."""
        for label, name in ((label, name) for place in self.places for label, name in place.nodes.items()):
            try:
                node = self[label]
            except CaptureError as error:
                raise StaleSite(f"a site that was rewritten before it took '{name}' away") from error
            if self.is_there is None and node.name != name:
                raise StaleSite(f"a site that was rewritten before it replaced '{name}'")
        if self.is_there is not None and not self.is_there(self):
            raise StaleSite("a site that was rewritten before it changed what was found here")

    # -- in a plan -------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return all that says where the site is and what was decided on there, as plain JSON values."""
        return {
            "owner": self.owner, "nodes": dict(self.nodes), "specialization": self.specialization,
            "phase": None if self.phase is None else self.phase.value, "required": self.required,
            "parts": [part.to_json() for part in self.parts], "data": self.data,
        }  # fmt: skip

    @classmethod
    def from_json(cls, program: Program, data: object) -> Site:
        """Return the site that `to_json` described, or raise PlanError."""
        wanted = {
            "owner": str, "nodes": dict, "specialization": int, "phase": (str, type(None)), "required": bool,
            "parts": list, "data": dict,
        }  # fmt: skip
        fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        for name, kind in wanted.items():
            if name not in fields or not isinstance(fields[name], kind):
                raise PlanError(f"a site in the plan has no valid '{name}'")
        given = {name: fields[name] for name in ("owner", "nodes", "specialization", "required", "data")}
        parts = tuple(cls.from_json(program, part) for part in fields["parts"])
        try:
            phase = None if fields["phase"] is None else Phase(fields["phase"])
        except ValueError as error:
            raise PlanError(f"a site in the plan has no valid 'phase': {error}") from error
        return cls(program, phase=phase, parts=parts, **given)


def as_plain(value: Any, where: str) -> Any:
    """Return a value as JSON gives it back, tuples as lists; raise UsageError, naming `where`, for any other."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [as_plain(item, f"{where}[{number}]") for number, item in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        odd = next((key for key, _ in items if type(key) is not str), None)
        if odd is not None:
            raise UsageError(f"{where} has the key {odd!r}; a plan stores texts as keys")
        return {key: as_plain(item, f"{where}[{key!r}]") for key, item in items}
    advice = "; use .tolist()" if hasattr(value, "tolist") else ""
    shown = f"{value}" if type(value) is float else f"a {type(value).__name__}"
    raise UsageError(f"{where} is {shown}, which a plan cannot store: plain values only{advice}")


VOLATILE = "its attributes are set while the model runs"


def is_volatile(module: nn.Module) -> bool:
    """Say whether one of a module's own graphs sets attributes, or was traced with some that were set before."""
    capture = capture_of(module)
    return capture is not None and any(specialization.volatile for specialization in capture.specializations)
