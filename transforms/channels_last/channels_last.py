"""The pass: convolutions on images that lie in memory channels last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...operators import laid_last
from ...passes.contract import Pass
from ...passes.rewriting import Edit, lay_out_readers
from ...passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ...tracing.program import Program
from .find import found_in

__all__ = ["ChannelsLast"]


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
        return found_in(program)

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
