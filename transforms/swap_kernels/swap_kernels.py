"""Find what is computed by several operations, and put the operator that computes it in their place."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx, nn

from ...cuda_ops import KERNELS, Kernel
from ...errors import MatchFailure, UsageError, did_you_mean
from ...passes.contract import Pass, check_option_types
from ...passes.rewriting import Edit
from ...passes.sites import Goal, Numerics, Phase, Refusal, Site
from ...tracing.program import CallSites, Program
from .decompositions import is_cast
from .find import occurrence
from .occurrences import Occurrence

__all__ = ["SwapKernels"]

_GROUP = "fxopt.kernels"
"""The entry-point group of kernels from other distributions; fxopt's own win where names are equal."""


@dataclass(frozen=True)
class SwapKernels(Pass):
    """Compute norms, gated activations, rotary positions and losses of linear heads by operators that have kernels.

    Before: y = weight * (x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))        After: y = rms_norm(x, weight, eps)
    Refuses: operations whose results something else reads too, and operands that the operator does not take.

    Options:
        kernels: names of those to look for, or kernels themselves; all, if none is named.
    """

    kernels: tuple[str, ...] = ()
    _given: tuple[Kernel, ...] = field(default=(), init=False, compare=False, repr=False)

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.BOTH

    def __post_init__(self) -> None:
        if isinstance(self.kernels, (tuple, list)):
            listed: tuple[object, ...] = tuple(self.kernels)
            object.__setattr__(self, "_given", tuple(each for each in listed if isinstance(each, Kernel)))
            names = (each.name if isinstance(each, Kernel) else each for each in listed)
            object.__setattr__(self, "kernels", tuple(names))
            check_option_types(self)
            _kernels_named(self.kernels, self._given)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        kernels = _kernels_named(self.kernels, self._given)
        items = [
            item
            for owner, capture in program.captures.items()
            for number, specialization in enumerate(capture.specializations)
            for item in _in_graph(program, owner, number, specialization.graph, kernels)
        ]
        idle = _never_called_then(program, [item for item in items if isinstance(item, Site)])
        yield from (item for item in items if not isinstance(item, Site) or program.module(item.owner) not in idle)

    def rewrite(self, site: Site, edit: Edit) -> None:
        (kernel,) = _kernels_named([site.data["kernel"]], self._given)
        found = occurrence(edit.program, site.owner, site["result"], kernel)
        if not isinstance(found, Occurrence):
            raise MatchFailure(found or f"{kernel.name} is not there any more")
        found.write(edit)


def _never_called_then(program: Program, sites: Sequence[Site]) -> set[nn.Module]:
    """Return the modules whose every call is part of a site: nothing is to be swapped inside of them."""
    swapped = Counter(site.module("result") for site in sites if site["result"].op == "call_module")
    calls = program.analyses[CallSites]
    return {module for module, count in swapped.items() if len(calls.of(module)) == count}


def _in_graph(
    program: Program, owner: str, number: int, graph: fx.Graph, kernels: Sequence[Kernel]
) -> Iterator[Site | Refusal]:
    """Yield what is found in a graph, the whole before its parts: a cast of the result belongs to it."""
    taken, refused = set[fx.Node](), dict[fx.Node, Refusal]()
    for node in reversed(graph.nodes):
        for kernel in kernels if node not in taken else ():
            found = occurrence(program, owner, node, kernel)
            if isinstance(found, Occurrence) and taken.isdisjoint(found.covered):
                taken.update(found.covered)
                nodes = {"result": node.name}
                data = {"kernel": kernel.name}
                yield Site(program, owner, nodes, number, detail=kernel.name, kind=kernel.name, data=data)
                break
            if isinstance(found, str) and not is_cast(node):  # what is cast is looked at itself
                refused.setdefault(node, Refusal(f"{kernel.name}: {found}", node))
    yield from (refusal for node, refusal in refused.items() if node not in taken)


def _kernels_named(names: Sequence[str], given: Sequence[Kernel] = ()) -> list[Kernel]:
    """Return the kernels of these names, all if there are none; those `given` need not be known, and win."""
    own = {kernel.name: kernel for kernel in (*KERNELS, *given)}
    if names and own.keys() >= set(names):
        return [own[name] for name in names]  # reading what all distributions offer takes longer than a swap
    others = {e.name: e for e in importlib.metadata.entry_points(group=_GROUP) if e.name not in own}
    for name in names:
        if name not in own and name not in others:
            raise UsageError(f"swap_kernels: unknown kernel {name!r}{did_you_mean(name, [*own, *others])}")
    return [own[name] if name in own else _loaded(others[name]) for name in names or [*own, *others]]


def _loaded(entry: importlib.metadata.EntryPoint) -> Kernel:
    where = f"kernel {entry.name!r} ({entry.value})"
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where} cannot be loaded: {error}") from error
    if not isinstance(found, Kernel) or found.name != entry.name:
        raise UsageError(f"{where} is no fxopt.cuda_ops.Kernel of that name")
    return found
