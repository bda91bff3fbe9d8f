"""The modules that a graph calls with numbers of 8 bits, or no longer calls: it holds while they are as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ....compat import has_global_hooks, has_hooks
from ....layers.members import settings_of
from ....passes.rewriting import Edit
from ....passes.sites import Site
from ....runtime.guards import Attribute, Call, Guard, Lacks, Source, Truth, exactly, key_of, module_at, of_class
from ....runtime.values import user_class

__all__ = ["members", "unchanged_guards"]

_READ = {"layer": (), "norm": ("eps",), "relu": ()}
"""Which settings count, by what a module is in a chain; of operations between layers all do."""


def members(site: Site, edit: Edit) -> dict[str, str]:
    """Return the modules of a chain, by their paths from its owner: "layer", "norm", "relu", "between" or "view"."""
    nodes = {label: edit.graph_node(label) for label in site.nodes}
    return {str(node.target): label.partition(".")[0] for label, node in nodes.items() if node.op == "call_module"}


def unchanged_guards(owner: nn.Module, called: Mapping[str, str]) -> list[Guard]:
    """Return guards on what a chain stands on: with hooks, other modules or settings the module's own forward runs.

    Args:
        owner: of the graph.
        called: path of a module -> what it is in the chain.
    """
    anywhere = Guard(Call(has_global_hooks, ()), Truth(False), "hooks on all modules would meet numbers of 8 bits")
    found = [anywhere]
    for path, what in called.items():
        module = owner.get_submodule(path)
        names = _READ.get(what, settings_of(module))
        found += _as_it_is(module_at(path.split(".")), module, [name for name in names if name != "inplace"])
    return found


def _as_it_is(place: Source, module: nn.Module, names: list[str]) -> Iterator[Guard]:
    yield of_class(place, user_class(type(module)), "quantize has written what it computes into the graph")
    yield Guard(Call(has_hooks, (place,)), Truth(False), "a hook would meet numbers of 8 bits, or never run")
    yield Guard(Attribute(place, "__dict__"), Lacks(key_of("forward")), "quantize has read its own forward")
    for name in names:
        yield from exactly(Attribute(place, name), getattr(module, name))
