"""Pruning step by step while the model is trained."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ....compat import modules_by_name, own_parameters
from ....errors import UsageError, expect
from ....layers.masked import gone_of
from ....passes.driver import record_of
from ....passes.pipeline import parse
from ....tracing.values import is_sharded, qualified
from ..settings import Settings
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
        UsageError: no such pass ran, or the numbers are none.
    """

    def __init__(self, model: nn.Module, steps: int, every: int = 1) -> None:
        for name, number in {"steps": steps, "every": every}.items():
            expect(number, int, name, "a whole number from 1")
            if number < 1:
                raise UsageError(f"{name}={number}; give a whole number from 1")
        self._options = _options(model)
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
            UsageError: the model was sharded meanwhile.
        """
        self.done += 1
        if self.done == self.steps or (self.done < self.steps and self.done % self.every == 0):
            weights = _masked_weights(self.model)
            gone = {name: ~kept for name, kept in masks(self.model).items()}
            set_masks(self.model, {n: ~flags for n, flags in chosen(weights, gone, self._options, self.amount).items()})

    def state_dict(self) -> dict[str, int]:
        """Return how far the schedule is; the masks are the model's."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a schedule was when `state_dict` was called."""
        self.done = int(state["done"])


def _options(model: nn.Module) -> Settings:
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
