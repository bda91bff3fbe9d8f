"""Which elements go: by their scores, over all layers or in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ....errors import BudgetError
from ..settings import Weights

__all__ = ["chosen", "scores_of", "weakest"]


def chosen(
    weights: Mapping[str, Tensor], gone: Mapping[str, Tensor], options: Weights, amount: float
) -> dict[str, Tensor]:
    """Return which elements of each weight are zero for good where a share is to be gone; what is gone already stays,
    and counts. Raises BudgetError where nothing would be left of a weight.
    """
    found = scores_of(weights, gone, options)
    return {name: flags | gone[name].to(flags.device) for name, flags in weakest(found, amount, options.scope).items()}


def scores_of(weights: Mapping[str, Tensor], gone: Mapping[str, Tensor], options: Weights) -> dict[str, Tensor]:
    """Return how much each element of each weight matters; what is gone matters least."""
    scores = _random_scores(weights, options.seed) if options.method == "random" else _magnitudes(weights)
    given = cast("Mapping[str, Tensor]", options.scores or {})  # a function is for structured pruning alone
    scores = {name: given.get(name, score).to(score.device, torch.float32) for name, score in scores.items()}
    lowest = torch.finfo(torch.float32).min  # below all that is there are those alone that are gone
    return {n: s.clamp(min=lowest).masked_fill(gone[n].to(s.device), -torch.inf) for n, s in scores.items()}


def _magnitudes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the absolute value of each weight: squares would rank them alike."""
    return {name: weight.detach().abs() for name, weight in weights.items()}


def _random_scores(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return numbers from 0 to 1, the same for the same seed and names in the same order, on every device."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(weight.shape, generator=generator).to(weight.device).masked_fill(weight == 0, -1)
        for name, weight in weights.items()
    }


def weakest(scores: Mapping[str, Tensor], amount: float, scope: str) -> dict[str, Tensor]:
    """Return which elements go, to the element the share asked for, of all together or of each; of equal ones the
    first. Raises BudgetError where nothing would be left of a weight.
    """
    if scope == "layer":
        gone = {name: _lowest([score], amount)[0] for name, score in scores.items()}
    else:
        gone = dict(zip(scores, _lowest(list(scores.values()), amount), strict=True))
    for name, flags in gone.items():
        if flags.numel() and bool(flags.all()):
            raise BudgetError(
                f"pass 'prune': amount={amount} leaves nothing of '{name}'; give less, scope=layer, or list the layer "
                "in keep"
            )
    return gone


def _lowest(scores: Sequence[Tensor], amount: float) -> list[Tensor]:
    """Return which elements are among the lowest of all, as many as the share says."""
    flat = np.concatenate([score.detach().float().cpu().numpy().reshape(-1) for score in scores] or [np.empty(0)])
    count = round(amount * flat.size)
    chosen = np.zeros(flat.size, dtype=bool)
    if count:
        bound = np.partition(flat, count - 1)[count - 1]
        chosen = flat < bound
        equal = np.flatnonzero(flat == bound)
        chosen[equal[: count - int(chosen.sum())]] = True
    parts = np.split(chosen, np.cumsum([score.numel() for score in scores])[:-1]) if scores else []
    return [
        torch.from_numpy(part).reshape(score.shape).to(score.device) for part, score in zip(parts, scores, strict=True)
    ]
