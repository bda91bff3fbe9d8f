"""Batch norms in places that this pass does not fold, so that the report names them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch.nn.functional as F
from torch import fx, nn

from ...passes.sites import Refusal
from ...tracing.program import Program
from ...tracing.values import qualified
from .find import LAYERS, evaluated

__all__ = ["unfolded"]

_KINDS = tuple(dict.fromkeys(kind for kinds in LAYERS.values() for kind in kinds))


def unfolded(program: Program, folded: Collection[nn.Module]) -> Iterator[Refusal]:
    """Yield norms that are functions behind a layer, and modules before one, which nobody looked at yet."""
    found: dict[str, str] = {}
    for owner in program.captures if not program.training else ():
        for _, specialization in evaluated(program, owner):
            for node in specialization.graph.nodes:
                place, reason = _reason(program, owner, node, folded)
                if reason:
                    found.setdefault(place, reason)
    return (Refusal(reason, place) for place, reason in found.items())


def _reason(program: Program, owner: str, node: fx.Node, folded: Collection[nn.Module]) -> tuple[str, str]:
    """Return where a norm stands and why it stays, or that there is nothing to say."""
    before = node.all_input_nodes[0] if node.all_input_nodes else None
    if before is None or before.op != "call_module":
        return "", ""
    producer = program.callee(owner, before)
    if node.target is F.batch_norm and isinstance(producer, _KINDS):
        return qualified(owner, node.name), "it is a call of F.batch_norm; give it a module, nn.BatchNorm, to fold it"
    callee = program.callee(owner, node) if node.op == "call_module" else None
    if isinstance(callee, _KINDS) and isinstance(producer, tuple(LAYERS)) and producer not in folded:
        name = qualified(owner, str(before.target))
        return name, f"it stands before '{node.target}', and only norms behind a layer are folded"
    return "", ""
