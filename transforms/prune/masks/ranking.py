"""Which elements go: by their scores, over all layers or in each, or N of every M neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ....errors import BudgetError
from ..options import Options

__all__ = ["chosen", "order_of_inputs", "scores_of", "weakest", "weakest_of"]


def chosen(
    weights: Mapping[str, Tensor], gone: Mapping[str, Tensor], options: Options, amount: float
) -> dict[str, Tensor]:
    """Return which elements of each weight are zero for good, what is gone by now included; see `weakest`."""
    found = scores_of(weights, gone, options)
    return {name: flags | gone[name].to(flags.device) for name, flags in weakest(found, amount, options.scope).items()}


def scores_of(weights: Mapping[str, Tensor], gone: Mapping[str, Tensor], options: Options) -> dict[str, Tensor]:
    """Return how much each element of each weight matters; what is gone matters least."""
    scores = {name: weight.detach().abs() for name, weight in weights.items()}  # squares would rank them alike
    if options.method == "random":
        scores = _random_scores(weights, options.seed)
    given = cast("Mapping[str, Tensor]", options.scores or {})  # a function is for structured pruning alone
    scores = {name: given.get(name, score).to(score.device, torch.float32) for name, score in scores.items()}
    lowest = torch.finfo(torch.float32).min  # below all that is there are those alone that are gone
    return {n: s.clamp(min=lowest).masked_fill(gone[n].to(s.device), -torch.inf) for n, s in scores.items()}


def _random_scores(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return numbers from 0 to 1, the same for the same seed and names in the same order, on every device."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(weight.shape, generator=generator).to(weight.device).masked_fill(weight == 0, -1)
        for name, weight in weights.items()
    }


def weakest(scores: Mapping[str, Tensor], amount: float, scope: str) -> dict[str, Tensor]:
    """Return which elements go, of all together or of each; of equal ones the first. BudgetError: none would stay."""
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


_ROWS = 128
"""So many rows of a matrix stand for all of them in the search."""
_ROUNDS = 16
"""So often each group of inputs is paired with another in one sweep."""
_SWEEPS = 4
_LEAST = 1e-3
"""A sweep that gains less than this share ends the search."""


def weakest_of(scores: Tensor, inputs: int, kept: int, of: int, order: Tensor | None = None) -> Tensor:
    """Return which elements go where `kept` of every `of` stay along dimension `inputs`, as they lie or in an order."""
    last = scores.movedim(inputs, -1)
    ordered = last if order is None else last.index_select(-1, order.to(last.device))
    groups = ordered.reshape(*ordered.shape[:-1], -1, of)
    gone = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, groups.topk(kept, -1).indices, False)
    gone = gone.reshape(ordered.shape)
    if order is not None:
        gone = torch.empty_like(gone).index_copy_(-1, order.to(gone.device), gone)
    return gone.movedim(-1, inputs).contiguous()


def order_of_inputs(scores: Tensor, inputs: int, kept: int, of: int, seed: int = 0) -> Tensor:
    """Return an order of a layer's inputs in which `kept` of every `of` keep more of the scores than as they lie.
    Greedy swaps between random pairs of groups: Pool and Yu, Channel Permutations for N:M Sparsity, 2021, section 3.
    """
    rows = scores.detach().float().movedim(inputs, -1).flatten(0, -2).cpu().clamp(min=0)
    rows = rows[:: max(1, len(rows) // _ROWS)][:_ROWS]
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(rows.shape[1]).reshape(-1, of)
    if len(groups) < 2:
        return groups.flatten()
    for _ in range(_SWEEPS):
        gained = sum(_exchange(rows, groups, kept, generator) for _ in range(min(_ROUNDS, len(groups))))
        if gained < _LEAST * float(rows.sum()):
            break
    return groups.flatten()


def _exchange(rows: Tensor, groups: Tensor, kept: int, generator: torch.Generator) -> float:
    """Let random pairs of groups exchange one input each, in place; return what that gains."""
    shuffled = torch.randperm(len(groups), generator=generator)[: len(groups) // 2 * 2].reshape(2, -1)
    first, second = groups[shuffled[0]], groups[shuffled[1]]
    now = _kept(rows[:, first], kept) + _kept(rows[:, second], kept)
    gains = _after(rows, first, second, kept) + _after(rows, second, first, kept).transpose(1, 2) - now[:, None, None]
    best, place = gains.flatten(1).max(1)
    take = best > 0
    pairs, mine, theirs = take.nonzero()[:, 0], place[take] // groups.shape[1], place[take] % groups.shape[1]
    a, b = first[pairs, mine].clone(), second[pairs, theirs].clone()
    groups[shuffled[0][pairs], mine], groups[shuffled[1][pairs], theirs] = b, a
    return float(best[take].sum())


def _after(rows: Tensor, mine: Tensor, theirs: Tensor, kept: int) -> Tensor:
    """Return what each group keeps with its i-th input replaced by the j-th of another: [pairs, i, j]."""
    size = mine.shape[1]
    changed = mine[:, None, None, :].repeat(1, size, size, 1)
    place = torch.arange(size)
    changed[:, place, :, place] = theirs[None].expand(size, -1, -1)
    return _kept(rows[:, changed], kept)


def _kept(values: Tensor, kept: int) -> Tensor:
    """Return the sum of the largest of each group, over all rows."""
    return values.topk(kept, -1).values.sum(-1).sum(0)
