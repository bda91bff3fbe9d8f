"""The pass: convolutions of PyTorch Geometric over compressed rows of the graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..passes.contract import Pass
from ..passes.rewriting import Edit
from ..passes.sites import Goal, Numerics, OwnForward, Phase, Refusal, Site
from ..runtime.graphs import own_class, specializations_of
from ..runtime.values import user_class
from ..tracing.program import Program

__all__ = ["SparseMessagePassing"]

_MESSAGE_PASSING = "torch_geometric.nn.conv.message_passing"


@dataclass(frozen=True)
class SparseMessagePassing(Pass):
    """Sum over neighbours in compressed rows, made once for each graph, without a message for each edge.

    Before: y = conv(x, edge_index)        After: the same call; the layer keeps the rows of `edge_index`
    Refuses: layers other than GCNConv, SAGEConv, GINConv, RGCNConv, GATConv, GATv2Conv and HGTConv, classes derived
    from these, hooks on messages, aggregations other than sums and means.
    """

    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED
    goal: ClassVar[Goal] = Goal.SPEED
    own_forward: ClassVar[OwnForward | None] = OwnForward.RIGHT

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        names = program.names
        for module in names.distinct:
            yield from _found(program, names.name(module), module)

    def rewrite(self, site: Site, edit: Edit) -> None:
        from ..layers.message_passing import compressed

        trains = site.phase is not Phase.EVAL
        edit.replace_module("", compressed(edit.owner, edit.program.model, trains=trains))
        edit.trainable = True  # otherwise the layer's own forward runs in training


def _found(program: Program, name: str, module: nn.Module) -> Iterator[Site | Refusal]:
    """Yield a site for a layer that goes over rows, and a reason for other message passing."""
    if not _passes_messages(module):
        return
    from ..layers.message_passing import CONVOLUTIONS, is_compressed, not_supported

    base = user_class(type(module))
    if is_compressed(module):
        yield Refusal("it goes over compressed rows already", name)
    elif f"{base.__module__}.{base.__qualname__}" not in CONVOLUTIONS:
        known = ", ".join(each.rpartition(".")[2] for each in CONVOLUTIONS)
        yield Refusal(f"{base.__name__} is none of {known}; its messages may differ", name)
    elif not _runs_its_own_forward(module):
        yield Refusal("another pass has rewritten it", name)
    else:
        reason = not_supported(module)
        label = f"{base.__name__} over compressed rows"
        phase = Phase.BOTH if program.training else Phase.EVAL
        yield Site(program, name, {}, detail=label, phase=phase) if reason is None else Refusal(reason, name)


def _runs_its_own_forward(module: nn.Module) -> bool:
    """Say whether a module runs the code of its class, though its tensors may be others since an earlier `prune`."""
    return own_class(module).forward is user_class(type(module)).forward and not specializations_of(module)


def _passes_messages(module: nn.Module) -> bool:
    """Tell whether a module is message passing; PyTorch Geometric is not imported for it."""
    loaded = sys.modules.get(_MESSAGE_PASSING)
    return loaded is not None and isinstance(module, loaded.MessagePassing)
