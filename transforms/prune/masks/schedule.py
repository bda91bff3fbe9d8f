"""The masks of a pruned model: to be read, saved, changed and taken off; and pruning step by step in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....compat import modules_by_name
from ....errors import StateError, UsageError, did_you_mean, expect
from ....layers.masked import gone_of, set_gone, unmask
from ....passes.driver import remember
from ....passes.pipeline import parse
from ....runtime.record import Decision, Record, record_of
from ....runtime.state import Mask, StateStep, packed, unpacked
from ....runtime.values import is_sharded, qualified
from ..options import Options
from .ranking import Values, chosen, layer_adaptive
from .targets import Target, masked_targets

__all__ = ["PruningSchedule", "masks", "progress", "remove_masks", "set_masks"]


def masks(model: nn.Module) -> dict[str, Tensor]:
    """Return the masks of a pruned model: name of a weight -> True where it stays.

    Plain tensors, to be saved beside a state dict; `set_masks` gives them to another model that `prune` has run on.
    """
    found = _masked(model).items()
    return {qualified(path, name): ~flags for path, module in found for name, flags in gone_of(module).items()}


def set_masks(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Give weights of a pruned model, as `optimize` returned it, other masks; checkpoints, plans and archives follow.

    `kept` is name of a weight that has a mask -> True where it stays, in its shape; others keep theirs.

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
    for path, module in _masked(model).items():
        mine = {name: gone.get(qualified(path, name), flags) for name, flags in gone_of(module).items()}
        if any(qualified(path, name) in gone for name in mine):
            set_gone(module, mine)
            for name in mine:
                getattr(module, name)  # puts the zeros there
    remember(model, _with(record, {name: packed(flags) for name, flags in gone.items()}))


def remove_masks(model: nn.Module) -> None:
    """Take all masks off a pruned model, in place: the zeros stay as values, and the weights can be trained freely.

    `fxopt.restore` undoes all other passes as well. Raises UsageError if `optimize` did not return the model.
    """
    record, names = _record(model), set(masks(model))
    for module in _masked(model).values():
        unmask(module)
    steps = [s for s in record.state_map.steps if not (isinstance(s, Mask) and s.new in names)]
    remember(model, _changed(record, steps, [each for each in record.plan.decisions if not _texts(each)]))


def _masked(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with masks, by name."""
    return {path: module for path, module in modules_by_name(model).items() if gone_of(module)}


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
    return _changed(record, steps, decisions)


def _changed(record: Record, steps: Sequence[StateStep], decisions: Sequence[Decision]) -> Record:
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


def progress(schedule: str, share: float) -> float:
    """Return which share of the amount is gone after a share of the steps."""
    return share if schedule == "linear" else 1 - (1 - share) ** 3


class PruningSchedule:
    """Set more and more weights of a model to zero, up to the amount that its `prune` pass asks for.

    After t of n steps the share is `amount * t / n` with `schedule=linear`, and `amount * (1 - (1 - t / n) ** 3)` with
    `schedule=cubic` (Zhu and Gupta, To prune, or not to prune, 2017, equation 1). The weakest weights go, by what they
    are then; what is gone stays so. Of N:M patterns the number that stays falls from M to N along the same curve (Kao
    et al., Training Recipe for N:M Structured Sparsity with Decaying Pruning Mask, 2022, section 3).

    Args:
        model: as `optimize` returned it, after `prune{schedule=linear}` or `cubic`.
        steps: after how many calls of `step` the whole amount is gone.
        every: how many calls lie between two changes of the masks.

    Raises:
        UsageError: no such pass ran, no weight has a mask, or the numbers are none.
    """

    def __init__(self, model: nn.Module, steps: int, every: int = 1) -> None:
        for name, number in {"steps": steps, "every": every}.items():
            expect(number, int, name, "a whole number from 1")
            if number < 1:
                raise UsageError(f"{name}={number}; give a whole number from 1")
        if every > steps:
            raise UsageError(f"every={every} is more than steps={steps}; all weights would be pruned in the last step")
        self._options = _options(model)
        _check_masks(model)
        self.model, self.steps, self.every, self.done = model, steps, every, 0

    @property
    def amount(self) -> float:
        """Return the share of the weights that is to be gone by now."""
        return self._whole * self._progress

    @property
    def _whole(self) -> float:
        kept, of = self._options.kept_of
        return 1 - kept / of if self._options.method == "nm" else self._options.amount

    @property
    def _progress(self) -> float:
        return progress(self._options.schedule, min(self.done / self.steps, 1.0))

    def step(self) -> None:
        """Count one training step, and prune as far as the schedule says; call it behind `optimizer.step()`.

        Raises BudgetError (nothing would be left of a layer) or UsageError (masks are gone, or the model is sharded).
        """
        _check_masks(self.model)
        self.done += 1
        if self.done == self.steps or (self.done < self.steps and self.done % self.every == 0):
            gone = chosen(_found(self.model), self._options, _values(self._options), self._progress)
            set_masks(self.model, {name: ~flags for name, flags in gone.items()})

    def __repr__(self) -> str:
        options, now = self._options, f"{self.done} of {self.steps} steps done, {self.amount:g} gone"
        return f"{type(self).__name__}({options.schedule} to {self._whole:g}, every {self.every}: {now})"

    def state_dict(self) -> dict[str, Any]:
        """Return how far the schedule is, and the masks: plain values, for a checkpoint."""
        found = {name: packed(flags) for name, flags in masks(self.model).items()}
        return {"done": self.done, **self._curve(), "masks": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a schedule was when `state_dict` was called; the model gets the masks of then.

        Load this before the model's state dict. Raises StateError, with nothing changed, for another model or schedule.
        """
        kept = self._checked(state)
        set_masks(self.model, kept)
        self.done = state["done"]

    def _curve(self) -> dict[str, Any]:
        """Return what says how much is gone after which step."""
        return {"steps": self.steps, "amount": self._whole, "schedule": self._options.schedule}

    def _checked(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the masks of a state that fits."""
        mine = self.state_dict()
        if not isinstance(cast("object", state), Mapping) or mine.keys() - state.keys():
            raise StateError(f"this is no state of a PruningSchedule, which has {', '.join(mine)}")
        for name, wanted in self._curve().items():
            if state[name] != wanted:
                raise StateError(f"the state is of a schedule with {name}={state[name]}, and this one has {wanted}")
        differing = sorted(mine["masks"].keys() ^ state["masks"].keys())
        if differing:
            raise StateError(f"the state is of another model: only one of them has masks of '{differing[0]}'")
        return {name: unpacked(state["masks"][name], flags.shape) for name, flags in masks(self.model).items()}


def _check_masks(model: nn.Module) -> None:
    if not _masked(model):
        raise UsageError("this model has no masks (any more), so there is nothing to schedule; run prune again")


def _options(model: nn.Module) -> Options:
    record = record_of(model)
    pipeline = () if record is None else record.plan.pipeline
    passes = [pass_ for text in pipeline if text.startswith("prune{") for pass_ in parse(text)]
    found: list[Any] = [pass_ for pass_ in passes if getattr(pass_, "schedule", "one_shot") != "one_shot"]
    if not found:
        raise UsageError(
            "this model has no pruning to schedule; optimize it with prune{schedule=cubic} or prune{schedule=linear}"
        )
    return found[-1]


def _values(options: Options) -> Values:
    return lambda _, weight: layer_adaptive(weight) if options.criterion == "lamp" else weight.abs()


def _found(model: nn.Module) -> list[Target]:
    found = list(masked_targets(model))
    for target in found:
        if is_sharded(target.weight):
            raise UsageError(f"'{target.path}' is sharded, so no rank can rank it; prune before sharding")
    return found
