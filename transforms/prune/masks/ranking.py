"""Which elements go: by their scores, over all layers or in each, or N of every M neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ....errors import BudgetError, UsageError
from ..options import Options
from .targets import Target

__all__ = ["Values", "chosen", "layer_adaptive", "order_of_inputs", "scores_of", "weakest", "weakest_of"]


Values = Callable[[str, Tensor], Tensor]
"""How much each element of a weight matters, by the weight's name."""


def chosen(found: Sequence[Target], options: Options, values: Values, progress: float = 1.0) -> dict[str, Tensor]:
    """Return which elements of each weight are zero for good, what is gone by now included.

    `progress`: how much of the amount goes, from 0 to 1; of N:M, how far the number that stays falls from M to N.
    """
    scores = scores_of(found, options, values)
    if options.method == "nm":
        kept, of = options.kept_of
        kept = of - round(progress * (of - kept))
        flags = {t.path: weakest_of(scores[t.path], t.inputs, kept, of) for t in found}
    else:
        shares = {t.path: progress * options.share_of(t.owner) for t in found}
        flags = weakest(scores, shares, options, {t.path: t.inputs for t in found})
    return {t.path: flags[t.path] | t.gone.to(flags[t.path].device) for t in found}


def scores_of(found: Sequence[Target], options: Options, values: Values) -> dict[str, Tensor]:
    """Return how much each element of each weight matters; what is gone matters least."""
    weights, gone = {t.path: t.weight for t in found}, {t.path: t.gone for t in found}
    if options.method == "random":
        scores = _random_scores(weights, options.seed)
    else:
        scores = {name: _numbers(name, values(name, weight.detach())) for name, weight in weights.items()}
    given = cast("Mapping[str, Tensor]", options.scores or {})  # a function is for structured pruning alone
    scores = {name: given.get(name, score).to(score.device, torch.float32) for name, score in scores.items()}
    lowest = torch.finfo(torch.float32).min  # below all that is there are those alone that are gone
    return {n: s.clamp(min=lowest).masked_fill(gone[n].to(s.device), -torch.inf) for n, s in scores.items()}


def layer_adaptive(sizes: Tensor) -> Tensor:
    """Return the square of each size over the sum of those that are as large or larger.

    Lee et al., Layer-adaptive Sparsity for the Magnitude-based Pruning (LAMP), 2021, equation 2.
    """
    squares, order = sizes.detach().double().square().flatten().sort()
    rest = squares.flip(0).cumsum(0).flip(0)
    share = torch.where(rest > 0, squares / rest.clamp(min=torch.finfo(torch.float64).tiny), 0)
    return torch.empty_like(share).index_copy_(0, order, share).reshape(sizes.shape)


def _numbers(name: str, scores: Tensor) -> Tensor:
    if bool(scores.isnan().any()):
        raise UsageError(f"pass 'prune': the scores of '{name}' have NaN; look for NaN or infinity in the data")
    return scores


def _random_scores(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return numbers from 0 to 1, the same for the same seed and names in the same order, on every device."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(weight.shape, generator=generator).to(weight.device).masked_fill(weight == 0, -1)
        for name, weight in weights.items()
    }


def weakest(
    scores: Mapping[str, Tensor], shares: Mapping[str, float], options: Options, inputs: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return which elements go, of all together, of each weight or of each of its rows; of equal ones the first.

    `inputs`: the dimension of each weight along which its inputs lie. BudgetError: nothing of a layer would stay.
    """
    if options.scope == "row":
        gone = {name: _lowest_of_rows(score, inputs[name], shares[name]) for name, score in scores.items()}
    elif options.scope == "layer":
        gone = {name: _lowest([score], shares[name])[0] for name, score in scores.items()}
    else:
        gone = dict(zip(scores, _lowest(list(scores.values()), max(shares.values(), default=0.0)), strict=True))
    for name, flags in gone.items():
        if flags.numel() and bool(flags.all()):
            raise BudgetError(
                f"pass 'prune': amount={shares[name]:g} leaves nothing of '{name}'; give less, scope=layer, or "
                "list the layer in keep"
            )
    return gone


def _lowest_of_rows(scores: Tensor, inputs: int, share: float) -> Tensor:
    """Return which elements are among the lowest of what one output is computed from."""
    outputs_first = scores.transpose(0, 1) if inputs == 0 else scores
    rows = outputs_first.flatten(inputs or 1)
    gone = torch.zeros_like(rows, dtype=torch.bool)
    gone.scatter_(-1, rows.argsort(dim=-1, stable=True)[..., : round(share * rows.shape[-1])], True)
    gone = gone.reshape(outputs_first.shape)
    return (gone.transpose(0, 1) if inputs == 0 else gone).contiguous()


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
