"""Pruning step by step while the model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from ....compat import modules_by_name, own_parameters
from ....errors import StateError, UsageError, expect
from ....layers.masked import gone_of
from ....passes.driver import record_of
from ....passes.pipeline import parse
from ....runtime.state import packed, unpacked
from ....runtime.values import is_sharded, qualified
from ..settings import Weights
from .held import masks, set_masks
from .ranking import chosen

__all__ = ["PruningSchedule"]


class PruningSchedule:
    """Set more and more weights of a model to zero, up to the amount that its `prune` pass asks for.

    After t of n steps the share is `amount * t / n` with `schedule=linear`, and `amount * (1 - (1 - t / n) ** 3)` with
    `schedule=cubic` (Zhu and Gupta, To prune, or not to prune, 2017, equation 1). The weakest weights go, by what they
    are then; what is gone stays so.

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
            raise UsageError(f"every={every} is more than steps={steps}; all would go at once, in the last step")
        self._options = _options(model)
        _check_masks(model)
        self.model, self.steps, self.every, self.done = model, steps, every, 0

    @property
    def amount(self) -> float:
        """Return the share of the weights that is to be gone by now."""
        share = min(self.done / self.steps, 1.0)
        return self._options.amount * (share if self._options.schedule == "linear" else 1 - (1 - share) ** 3)

    def step(self) -> None:
        """Count one training step, and prune as far as the schedule says; call it behind `optimizer.step()`.

        Raises:
            BudgetError: nothing would be left of a layer.
            UsageError: the masks are gone, or the model was sharded meanwhile.
        """
        _check_masks(self.model)
        self.done += 1
        if self.done == self.steps or (self.done < self.steps and self.done % self.every == 0):
            weights = _masked_weights(self.model)
            gone = {name: ~kept for name, kept in masks(self.model).items()}
            set_masks(self.model, {n: ~flags for n, flags in chosen(weights, gone, self._options, self.amount).items()})

    def __repr__(self) -> str:
        options, now = self._options, f"{self.done} of {self.steps} steps done, {self.amount:g} gone"
        return f"{type(self).__name__}({options.schedule} to {options.amount:g}, every {self.every}: {now})"

    def state_dict(self) -> dict[str, Any]:
        """Return how far the schedule is, and the masks: plain values, for a checkpoint."""
        found = {name: packed(flags) for name, flags in masks(self.model).items()}
        return {"done": self.done, **self._curve(), "masks": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a schedule was when `state_dict` was called; the model gets the masks of then.

        Load this before the model's state dict: weights that are masked by now, and were not then, come with that.

        Raises:
            StateError: the state is of another model or schedule; nothing is changed then.
        """
        kept = self._checked(state)
        set_masks(self.model, kept)
        self.done = state["done"]

    def _curve(self) -> dict[str, Any]:
        """Return what says how much is gone after which step."""
        return {"steps": self.steps, "amount": self._options.amount, "schedule": self._options.schedule}

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
    if not any(gone_of(module) for module in modules_by_name(model).values()):
        raise UsageError("this model has no masks (any more), so there is nothing to schedule; run prune again")


def _options(model: nn.Module) -> Weights:
    record = record_of(model)
    pipeline = () if record is None else record.plan.pipeline
    passes = [pass_ for text in pipeline if text.startswith("prune{") for pass_ in parse(text)]
    found: list[Any] = [pass_ for pass_ in passes if getattr(pass_, "schedule", "one_shot") != "one_shot"]
    if not found:
        raise UsageError(
            "this model has no pruning to schedule; optimize it with prune{schedule=cubic} or prune{schedule=linear}"
        )
    return found[-1]


def _masked_weights(model: nn.Module) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path, module in modules_by_name(model).items():
        for name in gone_of(module):
            weight = own_parameters(module)[name]
            if is_sharded(weight):
                raise UsageError(f"'{qualified(path, name)}' is sharded, so no rank can rank it; prune before sharding")
            if weight is not None:
                weights[qualified(path, name)] = weight
    return weights
