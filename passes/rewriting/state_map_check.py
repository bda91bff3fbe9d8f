"""Tensors that a pass added to a model, or took away, without saying how checkpoints follow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from ...compat import own_buffers, own_children, own_parameters
from ...errors import MatchFailure
from ...runtime.graphs import Region
from ...runtime.state import ADDED_TENSORS, Holder, StateMap, absent_from_checkpoints

__all__ = ["added_tensors", "check_mapped", "lasting_shapes"]

Shapes = dict[str, torch.Size]


def lasting_shapes(holder: Holder) -> Shapes:
    """Return the shape of each tensor that a holder writes into a state dict, by its name; regions borrow theirs."""
    found: Shapes = {}
    for prefix, module in _modules(holder):
        transient = absent_from_checkpoints(module)
        for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            if tensor is not None and name not in transient:
                found[prefix + name] = tensor.shape
    return found


def added_tensors(holder: Holder) -> frozenset[str]:
    """Return the names of the tensors that passes gave to a holder's modules: no checkpoint from before has them."""
    own = ((prefix, vars(module).get(ADDED_TENSORS, ())) for prefix, module in _modules(holder))
    return frozenset(prefix + name for prefix, names in own for name in names)


def _modules(holder: Holder) -> Iterator[tuple[str, nn.Module]]:
    pending = [(holder.inside, holder.module)]
    for prefix, module in pending:
        for name, child in own_children(module).items():
            if child is not None and not isinstance(child, Region):
                pending.append((f"{prefix}{name}.", child))
        yield prefix, module


def check_mapped(
    before: Mapping[str, torch.Size], after: Mapping[str, torch.Size], state_map: StateMap, added: Collection[str] = ()
) -> None:
    """Raise MatchFailure if the steps of a rewrite do not account for the tensors that it left."""
    _check_added(after.keys() - before.keys(), state_map, added)
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


def _check_added(new: Collection[str], state_map: StateMap, added: Collection[str]) -> None:
    """Let tensors that an earlier pass added stay: checkpoints from before could not be brought through a step."""
    beside = {name.rpartition(".")[0] for name in added}
    changed = [name for step in state_map.steps for name in step.sources if name in added]
    changed += [name for name in new if name.rpartition(".")[0] in beside]
    if changed:
        module = changed[0].rpartition(".")[0]
        raise MatchFailure(
            f"an earlier pass made '{module}', and no checkpoint from before holds its tensors: it stays as it is"
        )
