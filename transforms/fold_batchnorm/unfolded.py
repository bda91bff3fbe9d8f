"""Batch norms behind layers that this pass does not take for norms, so that the report names them."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F

from ...passes.sites import Refusal
from ...runtime.values import qualified
from ...tracing.program import Program
from .find import evaluated, source_of
from .parts import layer_at, norm_at

__all__ = ["unfolded"]

_REASON = "it is a call of F.batch_norm on tensors that are not the model's, or with a mode that is computed"


def unfolded(program: Program) -> Iterator[Refusal]:
    """Yield calls of `F.batch_norm` behind a layer that compute with something that is not known."""
    found: dict[str, None] = {}
    for owner in program.captures if not program.training else ():
        for _, specialization in evaluated(program, owner):
            for node in specialization.graph.find_nodes(op="call_function", target=F.batch_norm):
                if norm_at(program, owner, node) is None and layer_at(program, owner, source_of(node)) is not None:
                    found.setdefault(qualified(owner, node.name))
    return (Refusal(_REASON, place) for place in found)
