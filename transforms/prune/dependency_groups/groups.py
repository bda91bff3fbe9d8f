"""Which slices of which tensors belong together: plain values, the seam between the analysis and what removes them.

A group has `size` units. Everything that mentions a unit goes when the unit goes: slices of tensors (`Cut`), sizes in
graphs (`Number`), sizes in attributes (`Attribute`). A field `units` says, index by index, which unit of the group an
index belongs to; -1 is none of them: the index stays. Sizes become what they were minus the removed indices, so several
groups that meet in one tensor or size may be cut one after another. Modules are named by their first names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..options import Kind

__all__ = ["Attribute", "Coupling", "Cut", "Group", "Kind", "Norm", "Number", "Refused", "Router"]


@dataclass(frozen=True)
class Cut:
    """One dimension of one parameter or buffer; of a tied tensor under its first name."""

    tensor: str
    dim: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Number:
    """A size that a graph holds as a plain number, or computes: an argument of a view, split, slice, expand."""

    owner: str  # the module whose graph it is; modules that are alike may share the graph
    specialization: int
    node: str
    path: tuple[str | int, ...]  # from `(args, kwargs)`: `(0, 1, 2)`, `(1, "groups")`; in a slice, "start" or "stop"
    units: tuple[int, ...]  # what it counts


@dataclass(frozen=True)
class Attribute:
    """A plain attribute of a module that is such a size (`out_channels`, `num_heads`), or an item (`index`) of one."""

    module: str
    name: str
    index: int | None
    units: tuple[int, ...]


@dataclass(frozen=True)
class Norm:
    """A statistic that runs over the units of a group: of the kept ones alone, it is another one."""

    module: str  # the innermost that computes it
    kind: Literal["layer", "group", "rms", "mean"]  # the function, or a plain mean
    units: tuple[int, ...]


@dataclass(frozen=True)
class Router:
    """What sends each token to `top_k` experts; without some of them it gives these logits of minus infinity."""

    module: str  # the linear layer that gives the logits
    place: str  # the module that chooses, the same or one around it
    top_k: int


@dataclass(frozen=True)
class Group:
    """Units that are removed together wherever they are mentioned."""

    name: str  # of the layer that makes the units
    kind: Kind
    size: int
    cuts: tuple[Cut, ...]
    numbers: tuple[Number, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    norms: tuple[Norm, ...] = ()
    replaced: tuple[str, ...] = ()  # modules whose code cannot run with other widths: `ResizedAttention` comes there
    hard_coded: tuple[tuple[str, str], ...] = ()  # modules whose own forward has a size written in its code, and where
    router: Router | None = None  # of experts
    listed: str | None = None  # of experts that are modules, their list; `KeptExperts` comes in its place

    blocks: tuple[tuple[str, int | None], ...] = ()  # whole blocks, with the length of the tuple that each gives

    @property
    def least(self) -> int:
        """Say how many units have to stay: as many experts as a token goes to."""
        return 1 if self.router is None else self.router.top_k


@dataclass(frozen=True)
class Refused:
    """A layer whose units cannot be removed."""

    layer: str
    reason: str  # one clause that names the operation at fault
    by_design: bool = False  # the layer makes the model's result, whose width stays


@dataclass(frozen=True)
class Coupling:
    """The groups of a model in the order in which it computes them, and the layers that are in none."""

    groups: tuple[Group, ...] = ()
    refused: tuple[Refused, ...] = ()

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)
