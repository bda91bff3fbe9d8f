"""The pass: convolutions on images that lie in memory channels last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from ..operators import laid_last
from ..passes.contract import Pass
from ..passes.rewriting import Edit, LayerCall, call_of_layer, lay_out_readers, readers_in, reason_against_module
from ..passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ..runtime.graphs import Region
from ..tracing.program import Program

__all__ = ["ChannelsLast"]

_Graph = tuple[str, int]
"""Owner of a graph, and which one of its graphs it is."""


@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Lay images channels last in memory, from the first convolution to what needs them in the order of dimensions.

    Before: y = conv(x)        After: y = conv(laid_last(x))
    Parameters stay what and where they are, so optimizers and checkpoints have nothing to know.
    Refuses: convolutions with hooks or parametrizations, and subclasses with a forward of their own.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    phase: ClassVar[Phase] = Phase.BOTH
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT
    profiles_itself: ClassVar[bool] = True  # what one convolution gains the next one needs: the whole model tells

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        return _found_in(program)

    def rewrite(self, site: Site, edit: Edit) -> None:
        for place in site.parts:
            with edit.at(place):
                for label in place.nodes:
                    if ".conv." in label:
                        _lay_last(edit, edit.graph_node(label))
                lay_out_readers(edit, place.nodes)


def _lay_last(edit: Edit, convolution: fx.Node) -> None:
    """Give a convolution images that lie channels last."""
    x = convolution.all_input_nodes[0]
    if x.target is laid_last:
        return
    laid = next((user for user in x.users if user.target is laid_last), None) or edit.call(laid_last, x)
    laid.meta["val"] = x.meta.get("val")
    convolution.replace_input_with(x, laid)


def _found_in(program: Program) -> Iterator[Site | Refusal]:
    """Yield all convolutions of a model as one site, and those that stay as they are."""
    calls: dict[_Graph, list[LayerCall]] = {}
    for number, call, module, base in _convolutions(program):
        reason = reason_against_module(module, base)
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
