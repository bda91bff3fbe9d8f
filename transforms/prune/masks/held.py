"""The masks of a pruned model: to be read, saved, changed and taken off."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ....compat import modules_by_name
from ....errors import StateError, UsageError, did_you_mean, expect
from ....layers.masked import gone_of, set_gone, unmask
from ....passes.driver import Record, record_of, remember
from ....passes.pipeline import Decision
from ....runtime.state import Mask, packed
from ....runtime.values import qualified

__all__ = ["masks", "remove_masks", "set_masks"]


def masks(model: nn.Module) -> dict[str, Tensor]:
    """Return the masks of a pruned model: name of a weight -> True where it stays.

    They are plain tensors: `torch.save(masks(model), path)` keeps them beside a state dict, and `set_masks` gives them
    to another model that `prune` has run on. Without any, nothing in the model is masked.
    """
    found = (
        (qualified(path, n), flags) for path, m in modules_by_name(model).items() for n, flags in gone_of(m).items()
    )
    return {name: ~flags for name, flags in found}


def set_masks(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Give weights of a pruned model other masks; checkpoints, plans and archives follow.

    Args:
        model: as `optimize` returned it, with `prune` among the passes.
        kept: name of a weight that has a mask -> True where it stays, in its shape; others keep theirs.

    Raises:
        UsageError: the model is not one that `optimize` returned, or a mask is no tensor.
        StateError: a name has no mask, or a mask another shape; nothing is changed then.
    """
    record, known = _record(model), masks(model)
    expect(kept, Mapping, "kept", "a dictionary: name of a weight -> True where it stays")
    for name, flags in kept.items():
        expect(flags, Tensor, f"the mask of '{name}'", "a tensor: True where the weight stays")
        if name not in known:
            raise StateError(f"'{name}' has no mask in this model{did_you_mean(name, known)}")
        if flags.shape != known[name].shape:
            raise StateError(
                f"the mask of '{name}' has shape {list(flags.shape)}, the weight {list(known[name].shape)}"
            )
        if flags.isnan().any():
            raise StateError(f"the mask of '{name}' has NaN in it; give True where the weight stays")
    gone = {name: ~flags.to(known[name].device, torch.bool) for name, flags in kept.items()}
    for path, module in modules_by_name(model).items():
        mine = {name: gone.get(qualified(path, name), flags) for name, flags in gone_of(module).items()}
        if any(qualified(path, name) in gone for name in mine):
            set_gone(module, mine)
            for name in mine:
                getattr(module, name)  # puts the zeros there
    remember(model, _with(record, {name: packed(flags) for name, flags in gone.items()}))


def remove_masks(model: nn.Module) -> None:
    """Take all masks off a pruned model, in place: the zeros stay as values, and the weights can be trained freely.

    Saved and loaded again, the model has the zeros, and no masks. `fxopt.restore` undoes all other passes as well.

    Raises:
        UsageError: the model is not one that `optimize` returned.
    """
    record, names = _record(model), set(masks(model))
    for module in modules_by_name(model).values():
        if gone_of(module):
            unmask(module)
    steps = tuple(s for s in record.state_map.steps if not (isinstance(s, Mask) and s.new in names))
    decisions = tuple(each for each in record.plan.decisions if not _texts(each))
    plan, state_map = (
        dataclasses.replace(record.plan, decisions=decisions),
        dataclasses.replace(record.state_map, steps=steps),
    )
    remember(model, record.changed(plan, state_map))


def _record(model: nn.Module) -> Record:
    record = record_of(model)
    if record is None:
        raise UsageError("masks belong to the whole model; give the one that fxopt.optimize returned")
    return record


def _texts(decision: Decision) -> Mapping[str, str]:
    """Return the masks that a decision put there, by the names that the layer has for its weights."""
    if decision.site is None or (decision.pass_name, decision.status) != ("prune", "applied"):
        return {}
    return decision.site["data"].get("gone", {})


def _with(record: Record, texts: Mapping[str, str]) -> Record:
    """Return a record in which weights have these masks; of several prunings it is the last one's."""
    steps, decisions = list(record.state_map.steps), list(record.plan.decisions)
    left = dict(texts)
    for number, step in reversed(list(enumerate(steps))):
        if isinstance(step, Mask) and step.new in left:
            steps[number] = dataclasses.replace(step, gone=left.pop(step.new))
    left = dict(texts)
    for number, decision in reversed(list(enumerate(decisions))):
        decisions[number] = _decision_with(decision, left)
    plan = dataclasses.replace(record.plan, decisions=tuple(decisions))
    return record.changed(plan, dataclasses.replace(record.state_map, steps=tuple(steps)))


def _decision_with(decision: Decision, left: dict[str, str]) -> Decision:
    site: Any = decision.site
    mine = {name: qualified(site["owner"], name) for name in _texts(decision)}
    changed = {name: left.pop(path) for name, path in mine.items() if path in left}
    if not changed:
        return decision
    zeros = {name: count for name, count in site["data"].get("zeros", {}).items() if name not in changed}
    data = {**site["data"], "gone": {**site["data"]["gone"], **changed}, "zeros": zeros}
    return dataclasses.replace(decision, site={**site, "data": data})
