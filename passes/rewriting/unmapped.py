"""Tensors that a pass added to a model, or took away, without saying how checkpoints follow."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...compat import own_buffers, own_children, own_parameters
from ...errors import MatchFailure
from ...tracing.graphs import Region
from ..state import Holder, StateMap, absent_from_checkpoints

__all__ = ["check_mapped", "lasting_shapes"]

Shapes = dict[str, torch.Size]


def lasting_shapes(holder: Holder) -> Shapes:
    """Return the shape of each tensor that a holder writes into a state dict, by its qualified name.

    What regions borrow is written by whom they borrow it from.
    """
    found: Shapes = {}
    pending = [(holder.inside, holder.module)]
    for prefix, module in pending:
        transient = absent_from_checkpoints(module)
        for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            if tensor is not None and name not in transient:
                found[prefix + name] = tensor.shape
        children = own_children(module).items()
        pending += [(f"{prefix}{n}.", child) for n, child in children if child is not None and not _borrows(child)]
    return found


def _borrows(module: nn.Module) -> bool:
    return isinstance(module, Region)


def check_mapped(before: Mapping[str, torch.Size], after: Mapping[str, torch.Size], state_map: StateMap) -> None:
    """Make sure that the steps of a rewrite account for the tensors that it left.

    Raises:
        MatchFailure: naming one that no step makes, takes away or gives its shape.
    """
    expected: dict[str, torch.Size | None] = dict(before)
    for step in state_map.steps:
        for name in step.sources:
            expected.pop(name, None)
        expected.update(dict.fromkeys(step.targets))
    expected.update((alias, None) for alias, name in state_map.aliases if expected.get(name, alias) is None)
    aliases = {name for pair in state_map.aliases for name in pair}
    for name, shape in after.items():
        if name not in expected and name not in aliases:
            raise MatchFailure(
                f"the pass adds '{name}', and no step says what it is in a checkpoint: record one "
                "(edit.record_state), derive the tensor (edit.derive), or make it a buffer with persistent=False"
            )
        known = expected.get(name)
        if known is not None and known != shape:
            raise MatchFailure(
                f"the pass gives '{name}' the shape {list(shape)} instead of {list(known)}, and no step says how: "
                "record one (edit.set_tensor, edit.record_state)"
            )
    lost = next((name for name in expected if name not in after), None)
    if lost is not None and lost in before:
        raise MatchFailure(
            f"the pass takes '{lost}' away, and no step says what became of it: record one (edit.record_state), or "
            "checkpoints lose it"
        )
