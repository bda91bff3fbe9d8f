"""N of M: of every M inputs of a layer, each output reads N; and the order of inputs in which the least is lost."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["order_of_inputs", "weakest_of"]

_ROWS = 128
"""So many rows of a matrix stand for all of them in the search."""
_ROUNDS = 16
"""So often each group of inputs is paired with another in one sweep."""
_SWEEPS = 4
_LEAST = 1e-3
"""A sweep that gains less than this share ends the search."""


def weakest_of(scores: Tensor, inputs: int, kept: int, of: int, order: Tensor | None = None) -> Tensor:
    """Return which elements go where `kept` of every `of` inputs stay, which lie along the dimension `inputs` and are
    grouped in an order, by default as they lie.
    """
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

    Groups are paired, and each pair exchanges the two inputs that gain the most, as long as that gains: the greedy
    search over channel swaps of Pool and Yu, Channel Permutations for N:M Sparsity, 2021, section 3, over random pairs.
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
