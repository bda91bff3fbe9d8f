"""Which convolutions a model has, where their inputs come from, and who needs images in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from ...passes.rewriting import LayerCall, call_of_layer, objection_to_module, readers_in
from ...passes.sites import Refusal, Site
from ...runtime.graphs import Region
from ...tracing.program import Program

__all__ = ["found_in"]

_Graph = tuple[str, int]
"""Owner of a graph, and which one of its graphs it is."""


def found_in(program: Program) -> Iterator[Site | Refusal]:
    """Yield all convolutions of a model as one site, and those that stay as they are."""
    calls: dict[_Graph, list[LayerCall]] = {}
    for number, call, module, base in _convolutions(program):
        reason = objection_to_module(module, base)
        if reason:
            yield Refusal(reason, call.qualified_name)
        else:
            calls.setdefault((call.owner, number), []).append(call)
    if calls:
        yield _site(program, calls)


def _site(program: Program, calls: Mapping[_Graph, Sequence[LayerCall]]) -> Site:
    """Return the site: the convolutions, and who needs images in order."""
    read = readers_in(program, {graph: {each.node for each in found} for graph, found in calls.items()})
    parts: list[Site] = []
    for owner, number in dict.fromkeys((*calls, *read)):
        graph, prefix = (owner, number), f"{len(parts)}."
        given = {f"conv.{n}": each.node.name for n, each in enumerate(calls.get(graph, []))}
        labels = {f"{prefix}{label}": name for label, name in {**given, **read.get(graph, {})}.items()}
        parts.append(Site(program, owner, labels, number))
    count = len({each.qualified_name for found in calls.values() for each in found})
    return Site.over(program, *parts, detail=f"{count} convolution{'s' * (count > 1)}")


def _convolutions(program: Program) -> Iterator[tuple[int, LayerCall, nn.Module, type[nn.Module]]]:
    """Yield the calls of modules that convolve images: number of the graph, call, module and its class of torch.nn."""
    for owner, capture in program.captures.items():
        if isinstance(program.module(owner), Region):
            continue
        for number, specialization in enumerate(capture.specializations):
            for node in specialization.graph.find_nodes(op="call_module"):
                call = call_of_layer(program, owner, node)
                if call is not None and call.rank > 1 and call.x is not None and call.module and call.base:
                    yield number, call, call.module, call.base
