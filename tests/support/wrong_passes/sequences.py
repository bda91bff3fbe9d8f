"""Sequences: padding that the example lacks, lengths that are equal, masks, labels; graphs and bags."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pictures import variant
from .subject import Subject


class Sentences(nn.Module):
    """The mean of the words that are no padding, and of what kind they are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(20, 6), nn.Embedding(3, 6)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        mask = (ids != 0).unsqueeze(-1)
        x = (self.words(ids) + self.kinds(kinds)) * mask
        return x.sum(1) / mask.sum(1).clamp(min=1)


def sentences(
    ids: Tensor, kinds: Tensor, words: Tensor, of: Tensor, *, pad: Any = 0, count: Any = None, kind: Any = None
):  # fmt: skip
    mask = (ids != pad if pad is not None else torch.ones_like(ids, dtype=torch.bool)).unsqueeze(-1)
    x = F.embedding(ids, words) + (kind(kinds, of) if kind else F.embedding(kinds, of))
    return torch.where(mask, x, 0).sum(1) / (count(mask) if count else mask.sum(1).clamp(min=1))


SENTENCES = Subject(
    Sentences, lambda: (torch.tensor([[3, 7, 9, 4], [8, 2, 11, 5]]), torch.zeros(2, 4, dtype=torch.long)),
    ("words.weight", "kinds.weight"), sentences,
    {
        ("padding", "no word is padding"): variant(sentences, pad=None),
        ("padding", "another word is padding"): variant(sentences, pad=1),
        ("padding", "the mean over all words"): variant(sentences, count=lambda m: m.shape[1]),
        ("padding", "a sentence of padding alone"): variant(sentences, count=lambda m: m.sum(1)),
        ("ids", "all words of the first kind"): variant(sentences, kind=lambda k, of: of[0]),
        ("ids", "the kind of the first word for all"): variant(sentences, kind=lambda k, of: of[k[:, :1]]),
        ("ids", "two kinds only"): variant(sentences, kind=lambda k, of: of[k.clamp_max(1)]),
        ("ids", "a kind as a truth"): variant(sentences, kind=lambda k, of: of[k.bool().long()]),
    },
)  # fmt: skip


class Lengths(nn.Module):
    """The mean of sequences up to their lengths; in the example all are full."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        return (x * mask[..., None]).sum(1) / lengths.clamp(min=1)[:, None]


def lengths(x: Tensor, n: Tensor, *, mask: Any = None, count: Any = None) -> Tensor:
    inside = mask(x, n) if mask else torch.arange(x.shape[1]).expand(len(x), -1) < n[:, None]
    return torch.where(inside[..., None], x, 0).sum(1) / (count(n) if count else n.clamp(min=1))[:, None]


LENGTHS = Subject(
    Lengths, lambda: (torch.randn(3, 5, 4), torch.tensor([5, 5, 5])), (), lengths,
    {
        ("padding", "lengths not looked at"): variant(lengths, mask=lambda x, n: torch.ones_like(x[..., 0]) > 0),
        ("padding", "lengths counted from the end"): variant(
            lengths, mask=lambda x, n: torch.arange(x.shape[1]).flip(0) < n[:, None]),
        ("padding", "one position more"): variant(
            lengths, mask=lambda x, n: torch.arange(x.shape[1]) <= n[:, None]),
        ("padding", "the length of the first row for all"): variant(
            lengths, mask=lambda x, n: (torch.arange(x.shape[1]) < n[0]).expand(len(x), -1)),
        ("padding", "the mean over the first row's length"): variant(lengths, count=lambda n: n[:1]),
        ("padding", "sequences without any elements"): variant(lengths, count=lambda n: n),
    },
)  # fmt: skip


class Crossed(nn.Module):
    """Attention between two sequences that are as long as they are wide."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return torch.softmax(scores.masked_fill(~allowed, -1e9), -1) @ k


def crossed(q: Tensor, k: Tensor, *, root: Any = None, mask: Any = None) -> Tensor:
    scores = q @ k.mT / (root(q, k) if root else q.shape[-1] ** 0.5)
    allowed = mask(q, k) if mask else torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]) > 0
    return torch.softmax(torch.where(allowed, scores, -1e9), -1) @ k


def triangle(a: int, b: int, diagonal: int = 0) -> Tensor:
    return torch.ones(a, b, dtype=torch.bool).tril(diagonal)


CROSSED = Subject(
    Crossed, lambda: (torch.randn(2, 6, 6), torch.randn(2, 6, 6)), (), crossed,
    {
        ("lengths", "the root of the length"): variant(crossed, root=lambda q, k: q.shape[1] ** 0.5),
        ("lengths", "the root of the number of keys"): variant(crossed, root=lambda q, k: k.shape[1] ** 0.5),
        ("lengths", "a mask from the upper left"): variant(crossed, mask=lambda q, k: triangle(q.shape[1], k.shape[1])),
        ("lengths", "a square mask"): variant(crossed, mask=lambda q, k: triangle(q.shape[1], q.shape[1])),
        ("lengths", "a mask of the example's size"): variant(crossed, mask=lambda q, k: triangle(6, 6)),
        ("lengths", "the width for the length"): variant(crossed, mask=lambda q, k: triangle(q.shape[2], k.shape[2])),
    },
)  # fmt: skip


class Guarded(nn.Module):
    """Attention where masked keys weigh nothing, and rows without keys weigh all alike."""

    def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~mask[:, None], torch.finfo(q.dtype).min)
        return torch.softmax(scores, -1) @ k


def guarded(q: Tensor, k: Tensor, mask: Tensor, *, score: Any = None, after: Any = None) -> Tensor:
    scores = q @ k.mT
    lowest = torch.finfo(q.dtype).min
    scores = score(scores, mask[:, None]) if score else torch.where(mask[:, None], scores, lowest)
    weights = torch.softmax(scores, -1)
    return (after(weights, mask[:, None]) if after else weights) @ k


GUARDED = Subject(
    Guarded,
    lambda: (torch.randn(2, 3, 5), torch.randn(2, 4, 5), torch.tensor([[True] * 4, [True, True, False, True]])),
    (), guarded,
    {
        ("masks", "minus infinity, which leaves nothing of a row without keys"): variant(
            guarded, score=lambda s, m: s.masked_fill(~m, float("-inf"))),
        ("masks", "nothing left of a row without keys"): variant(guarded, after=lambda w, m: w * m),
        ("masks", "the lowest number added"): variant(
            guarded, score=lambda s, m: s + torch.where(m, 0.0, -1e4)),
        ("masks", "only the last key may be masked"): variant(
            guarded, score=lambda s, m: torch.where(m | (torch.arange(4) < 2), s, torch.finfo(s.dtype).min)),
        ("masks", "the mask of the last row for all"): variant(
            guarded, score=lambda s, m: torch.where(m[-1:] | m, s, torch.finfo(s.dtype).min)),
    },
)  # fmt: skip


class Labels(nn.Module):
    """The loss of logits, with labels that do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 6))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x @ self.weight.T, labels, ignore_index=-100)


def labels(x: Tensor, y: Tensor, weight: Tensor, *, pick: Any = None) -> Tensor:
    found = F.log_softmax(F.linear(x, weight), -1)
    if pick:
        return pick(found, y)
    counted = y != -100
    return -(found.gather(1, y.clamp(min=0)[:, None])[:, 0] * counted).sum() / counted.sum()


LABELS = Subject(
    Labels, lambda: (torch.randn(5, 6), torch.tensor([0, 2, 1, 3, 2])), ("weight",), labels,
    {
        ("labels", "every label counts"): variant(labels, pick=lambda p, y: -p.gather(1, y[:, None]).mean()),
        ("labels", "those that do not count are class 0"): variant(
            labels, pick=lambda p, y: -p.gather(1, y.clamp(min=0)[:, None]).mean()),
        ("labels", "the mean over all"): variant(
            labels, pick=lambda p, y: F.nll_loss(p, y, reduction="sum", ignore_index=-100) / len(y)),
        ("labels", "another number does not count"): variant(
            labels, pick=lambda p, y: F.nll_loss(p, y, ignore_index=-1)),
        ("labels", "classes cut to those seen"): variant(labels, pick=lambda p, y: F.nll_loss(p, y.clamp(-100, 3))),
        ("labels", "class 0 does not count either"): variant(
            labels, pick=lambda p, y: F.nll_loss(p, torch.where(y == 6, -100, y))),
    },
)  # fmt: skip


class Messages(nn.Module):
    """Sums and means of what neighbours say; in the example each node has one."""

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        degree = torch.zeros_like(x[:, 0]).index_add(0, edges[1], torch.ones_like(x[edges[1], 0]))
        return total, total / degree.clamp(min=1)[:, None]


def messages(x: Tensor, edges: Tensor, *, total: Any = None, degree: Any = None) -> tuple[Tensor, Tensor]:
    place = edges[1][:, None].expand(-1, x.shape[1])
    added = total(x, edges) if total else torch.zeros_like(x).scatter_add(0, place, x[edges[0]])
    count = torch.bincount(edges[1], minlength=len(x)).to(x.dtype)
    return added, added / (degree(count) if degree else count.clamp(min=1))[:, None]


def put(x: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(x).index_copy(0, edges[1], x[edges[0]])


MESSAGES = Subject(
    Messages, lambda: (torch.randn(5, 4), torch.tensor([[1, 2, 3, 4, 0], [0, 1, 2, 3, 4]])), (), messages,
    {
        ("graphs", "put instead of added"): variant(messages, total=put),
        ("graphs", "read the other way round"): variant(messages, total=lambda x, e: x[e[0]]),
        ("graphs", "nodes without neighbours"): variant(messages, degree=lambda n: n),
        ("graphs", "one neighbour each"): variant(messages, degree=torch.ones_like),
        ("graphs", "as many edges as nodes"): variant(
            messages, total=lambda x, e: torch.zeros_like(x).index_add(0, e[1][: len(x)], x[e[0][: len(x)]])),
    },
)  # fmt: skip


class Hot(nn.Module):
    """Classes one hot, beside a number per row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, 10).to(self.weight.dtype) @ self.weight


HOT = Subject(
    Hot, lambda: (torch.tensor([1, 3, 2]),), ("weight",), lambda i, w: w[i],
    {
        ("ids", "one hot over those seen"): lambda i, w: F.one_hot(i, 4).to(w.dtype) @ w[:4],
        ("ids", "a table cut, then one hot"): lambda i, w: w[i.clamp_max(3)],
        ("ids", "one hot of the rest"): lambda i, w: w[i % 8],
        ("batch", "one row of weights for each of the example"): lambda i, w: w[i[:3]],
    },
)  # fmt: skip

SUBJECTS = (SENTENCES, LENGTHS, CROSSED, GUARDED, LABELS, MESSAGES, HOT)
