"""Which slices of which tensors belong together: plain values, the seam between the analysis and what removes them.

A group has `size` units. Everything that mentions a unit goes when the unit goes: slices of tensors (`Cut`), sizes in
graphs (`Number`), sizes in attributes (`Attribute`). A field `units` says, index by index, which unit of the group an
index belongs to; -1 is none of them: the index stays. Sizes become what they were minus the removed indices, so several
groups that meet in one tensor or size may be cut one after another. Modules are named by their first names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..settings import Kind

__all__ = ["Attribute", "Coupling", "Cut", "Group", "Kind", "Norm", "Number", "Refused", "Router"]


@dataclass(frozen=True)
class Cut:
    """One dimension of one parameter or buffer; of a tied tensor under its first name."""

    tensor: str
    dim: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Number:
    """A size that a graph holds as a plain number, or computes: an argument of a view, split, slice, expand.

    Attributes:
        owner: the module whose graph it is; modules that are alike may share the graph.
        specialization: which of its graphs.
        node: the name of the node.
        path: the way to the number from `(args, kwargs)`: `(0, 1, 2)` is `args[1][2]`, `(1, "groups")` is
            `kwargs["groups"]`; in a slice, "start" or "stop".
        value: the number as it is.
        units: what it counts.
    """

    owner: str
    specialization: int
    node: str
    path: tuple[str | int, ...]
    value: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Attribute:
    """A plain attribute of a module that is such a size (`out_channels`, `num_heads`), or an item (`index`) of one."""

    module: str
    name: str
    index: int | None
    units: tuple[int, ...]


@dataclass(frozen=True)
class Norm:
    """A statistic that runs over the units of a group: of the kept ones alone, it is another one. The module is the
    innermost that computes it; the kind names the function, or a plain mean.
    """

    module: str
    kind: Literal["layer", "group", "rms", "mean"]
    units: tuple[int, ...]


@dataclass(frozen=True)
class Router:
    """What sends each token to `top_k` experts: without some of them it is the same with logits of minus infinity for
    these. A linear layer (`module`) gives the logits, and the same module, or one around it (`place`), chooses.
    """

    module: str
    place: str
    top_k: int


@dataclass(frozen=True)
class Group:
    """Units that are removed together wherever they are mentioned.

    Attributes:
        name: of the layer that makes the units.
        kind: what a unit is: a channel of convolutions, an attention head, a hidden unit of linears, a whole expert.
        size: how many units there are.
        cuts: the tensors.
        numbers: the sizes in graphs.
        attributes: the sizes in attributes.
        norms: the statistics that run over the units.
        replaced: the modules of torch whose code cannot run with other widths (`nn.MultiheadAttention`), by name:
            `ResizedAttention.of(module)` comes in their place before they are cut.
        hard_coded: the modules whose own forward has a size written in its code, by name, with that place: once the
            units are cut, only their graphs are right.
        router: of experts, what sends tokens to them.
        listed: of experts that are modules, the list that they are items of; `KeptExperts` comes in its place.
    """

    name: str
    kind: Kind
    size: int
    cuts: tuple[Cut, ...]
    numbers: tuple[Number, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    norms: tuple[Norm, ...] = ()
    replaced: tuple[str, ...] = ()
    hard_coded: tuple[tuple[str, str], ...] = ()
    router: Router | None = None
    listed: str | None = None

    @property
    def least(self) -> int:
        """Say how many units have to stay: as many experts as a token goes to."""
        return 1 if self.router is None else self.router.top_k


@dataclass(frozen=True)
class Refused:
    """A layer whose units cannot be removed; the reason is one clause that names the operation at fault. Nothing is at
    fault (`by_design`) where the layer makes the model's result, whose width stays.
    """

    layer: str
    reason: str
    by_design: bool = False


@dataclass(frozen=True)
class Coupling:
    """The groups of a model in the order in which it computes them, and the layers that are in none."""

    groups: tuple[Group, ...] = ()
    refused: tuple[Refused, ...] = ()

    def group(self, name: str) -> Group:
        """Return the group of that name."""
        return next(group for group in self.groups if group.name == name)
