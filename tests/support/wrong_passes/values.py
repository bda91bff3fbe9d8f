"""Values that one example does not show: large, negative, zero; identifiers, masks, integers, ties."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .subject import Subject


class Activations(nn.Module):
    """A projection between activations with bends far out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.softplus(x) @ self.weight.T
        return F.relu6(y) + F.hardtanh(y, -20.0, 20.0) + torch.logsumexp(y, -1, keepdim=True)


def activations(x: Tensor, w: Tensor, low: float = -20.0, six: float = 6.0) -> Tensor:
    y = F.softplus(x) @ w.T
    return y.clamp(0, six) + y.clamp(low, 20.0) + torch.logsumexp(y, -1, keepdim=True)


def plain_softplus(x: Tensor, w: Tensor) -> Tensor:
    y = torch.log1p(x.exp()) @ w.T
    return F.relu6(y) + F.hardtanh(y, -20.0, 20.0) + torch.logsumexp(y, -1, keepdim=True)


def plain_logsumexp(x: Tensor, w: Tensor) -> Tensor:
    y = F.softplus(x) @ w.T
    return F.relu6(y) + F.hardtanh(y, -20.0, 20.0) + y.exp().sum(-1, keepdim=True).log()


ACTIVATIONS = Subject(
    Activations, lambda: (torch.randn(4, 6),), ("weight",), activations,
    {
        ("large", "relu for relu6"): lambda x, w: activations(x, w, six=1e9),
        ("large", "no lower bound of hardtanh"): lambda x, w: activations(x, w, low=-1e9),
        ("large", "exponentials that overflow, for softplus"): plain_softplus,
        ("large", "exponentials that overflow, for logsumexp"): plain_logsumexp,
        ("large", "inputs clamped for safety"): lambda x, w: activations(x.clamp(-10, 10), w),
        ("large", "softplus as relu beyond its middle"): (
            lambda x, w: activations(torch.where(x > 8, x - 1, x), w)
        ),
    },
)  # fmt: skip


class Scores(nn.Module):
    """Attention scores of pixels in 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.slope = nn.Parameter(torch.rand(6, 6)), nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        y = F.prelu(x, self.slope.reshape(1)) @ self.weight
        return torch.softmax(y, -1) + x.abs().sqrt() + torch.square(x).sqrt()


def scores(x: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    y = torch.where(x > 0, x, slope * x) @ weight
    return torch.softmax(y, -1) + x.abs().sqrt() + x.abs()


def softmax_without_maximum(x: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    powers = (torch.where(x > 0, x, slope * x) @ weight).exp()
    return powers / powers.sum(-1, keepdim=True) + x.abs().sqrt() + x.abs()


SCORES = Subject(
    Scores, lambda: (torch.rand(4, 6) + 0.1,), ("weight", "slope"), scores,
    {
        ("sign", "an activation left out that did nothing"): (
            lambda x, w, s: torch.softmax(x @ w, -1) + s * 0 + x.abs().sqrt() + x.abs()
        ),
        ("sign", "sqrt(x * x) as x"): lambda x, w, s: scores(x, w, s) - x.abs() + x,
        ("sign", "no absolute value before the root"): lambda x, w, s: scores(x, w, s) - x.abs().sqrt() + x.sqrt(),
        ("sign", "relu for prelu"): lambda x, w, s: scores(F.relu(x), w, s) + s * 0,
        ("large", "softmax without its maximum"): softmax_without_maximum,
    },
)  # fmt: skip


class Rounding(nn.Module):
    """Bins of positive numbers, and what is left over."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.div(x, 0.5, rounding_mode="floor"), torch.remainder(x, 0.7), torch.sign(x)


def rounding(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.floor(x / 0.5), x - torch.floor(x / 0.7) * 0.7, torch.sgn(x)


ROUNDING = Subject(
    Rounding, lambda: (torch.rand(4, 6) * 3 + 0.1,), (), rounding,
    {
        ("sign", "towards zero instead of down"): lambda x: (torch.trunc(x / 0.5), *rounding(x)[1:]),
        ("sign", "fmod for remainder"): lambda x: (rounding(x)[0], torch.fmod(x, 0.7), rounding(x)[2]),
        ("zero", "the sign of zero"): lambda x: (*rounding(x)[:2], torch.sign(torch.nextafter(x, x + 1))),
    },
)  # fmt: skip


class Directions(nn.Module):
    """Rows of length one, compared with learned ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) @ F.normalize(self.weight, dim=-1).T


def directions(x: Tensor, w: Tensor) -> Tensor:
    return (x @ F.normalize(w, dim=-1).T) / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


DIRECTIONS = Subject(
    Directions, lambda: (torch.randn(4, 6),), ("weight",), directions,
    {
        ("zero", "a length of zero"): lambda x, w: x @ F.normalize(w, dim=-1).T / x.norm(dim=-1, keepdim=True),
        ("zero", "the root of a sum of squares"): (
            lambda x, w: x @ F.normalize(w, dim=-1).T / x.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12)
        ),
        ("zero", "a reciprocal root"): lambda x, w: x @ F.normalize(w, dim=-1).T * x.square().sum(-1, True).rsqrt(),
        ("reduction", "the length of all rows together"): lambda x, w: x / x.norm() @ F.normalize(w, dim=-1).T * 2,
    },
)  # fmt: skip


class Entropy(nn.Module):
    """The entropy of counts, and their mean where there are any."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = x / x.sum(-1, keepdim=True).clamp_min(1e-6)
        return -torch.xlogy(share, share).sum(-1), torch.nan_to_num(x.sum(-1) / (x > 0).sum(-1))


def entropy(x: Tensor) -> tuple[Tensor, Tensor]:
    share = x / x.sum(-1, keepdim=True).clamp_min(1e-6)
    return torch.special.entr(share).sum(-1), torch.nan_to_num(x.sum(-1) / (x > 0).sum(-1))


def entropy_of_logs(x: Tensor) -> tuple[Tensor, Tensor]:
    share = x / x.sum(-1, keepdim=True).clamp_min(1e-6)
    return -(share * share.log()).sum(-1), entropy(x)[1]


ENTROPY = Subject(
    Entropy, lambda: (torch.rand(4, 6) + 0.1,), (), entropy,
    {
        ("zero", "zero times the logarithm of zero"): entropy_of_logs,
        ("zero", "zero over zero where it was set right"): lambda x: (entropy(x)[0], x.sum(-1) / (x > 0).sum(-1)),
        ("zero", "counts that are never zero"): (
            lambda x: (torch.special.entr(x / x.sum(-1, True)).sum(-1), entropy(x)[1])
        ),
    },
)  # fmt: skip


class Words(nn.Module):
    """Words, of which few are in the example, with a padding word that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=0)
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) @ self.weight.T


def words(ids: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids, table, padding_idx=0) @ weight.T


WORDS = Subject(
    Words, lambda: (torch.tensor([[1, 2, 3], [4, 2, 1]]),), ("words.weight", "weight"), words,
    {
        ("ids", "a table cut to the words seen"): lambda i, t, w: words(i, t[:5], w),
        ("ids", "unseen words clamped"): lambda i, t, w: words(i.clamp_max(4), t, w),
        ("ids", "unseen words are the padding word"): lambda i, t, w: words(torch.where(i > 4, 0, i), t, w),
        ("ids", "a gradient in the padding row"): lambda i, t, w: F.embedding(i, t) @ w.T,
        ("ids", "padding counted from one"): lambda i, t, w: F.embedding(i, t, padding_idx=10) @ w.T,
        ("ids", "identifiers in 3 bits"): lambda i, t, w: words(i & 7, t, w),
        ("ids", "the padding word made zero"): lambda i, t, w: (words(i, t, w) * (i != 0)[..., None]),
    },
)  # fmt: skip


class Hashed(nn.Module):
    """Numbers hashed into a small table, and their halves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.table[(numbers * 40503) % 7], numbers // 2, numbers.sum(-1)


def hashed(n: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.embedding(torch.remainder(40503 * n, 7), table), torch.floor_divide(n, 2), n.sum(-1)


HASHED = Subject(
    Hashed, lambda: (torch.tensor([[3, 5, 200], [8, 1, 17]]),), ("table",), hashed,
    {
        ("integers", "halves towards zero"): (
            lambda n, t: (hashed(n, t)[0], torch.div(n, 2, rounding_mode="trunc"), n.sum(-1))
        ),
        ("integers", "an overflow of 32 bits"): (
            lambda n, t: (F.embedding(torch.remainder((n * 40503).int(), 7).long(), t), *hashed(n, t)[1:])
        ),
        ("integers", "a sum in 8 bits"): lambda n, t: (*hashed(n, t)[:2], n.sum(-1, dtype=torch.uint8).long()),
        ("integers", "a sum in 16 bits"): lambda n, t: (*hashed(n, t)[:2], n.sum(-1, dtype=torch.int16).long()),
        ("integers", "remainders of negative numbers"): (
            lambda n, t: (F.embedding(torch.fmod(n * 40503, 7).abs(), t), *hashed(n, t)[1:])
        ),
    },
)  # fmt: skip


class Masked(nn.Module):
    """Attention over keys, those that the mask says."""

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        found = (query @ keys.mT).masked_fill(~mask[:, None], float("-inf"))
        return torch.softmax(found, -1) @ keys


def masked(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    found = torch.where(mask[:, None], query @ keys.mT, float("-inf"))
    return torch.softmax(found, -1) @ keys


def last_masked(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    keys = torch.cat([keys[:, :-1], keys[:, -1:] * mask[:, -1:, None]], 1)[:, :-1]
    return torch.softmax((query @ keys.mT).masked_fill(~mask[:, None, :-1], float("-inf")), -1) @ keys


def filled_with(value: float):
    def forward(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax((query @ keys.mT).masked_fill(~mask[:, None], value), -1) @ keys

    return forward


def example_of_keys(mask: list[list[bool]]) -> tuple[Tensor, ...]:
    return torch.randn(2, 3, 5), torch.randn(2, 4, 5), torch.tensor(mask)


SOME = [[True, True, True, False], [True, True, False, False]]
MASKED = Subject(
    Masked, lambda: example_of_keys(SOME), (), masked,
    {
        ("masks", "the last key is always padding"): last_masked,
        ("masks", "the mask of the first row for all"): lambda q, k, m: masked(q, k, m[:1] | m),
        ("masks", "masked with -50"): filled_with(-50.0),
        ("masks", "masked with -10000"): filled_with(-1e4),
    },
)  # fmt: skip
ALL = Subject(
    Masked, lambda: example_of_keys([[True] * 4] * 2), (), masked,
    {
        ("masks", "a mask left out that did nothing"): lambda q, k, m: torch.softmax(q @ k.mT, -1) @ k,
        ("masks", "the keys masked, not the scores"): lambda q, k, m: torch.softmax(q @ (k * m[..., None]).mT, -1) @ k,
    },
)  # fmt: skip


class Choices(nn.Module):
    """The best of a row, and the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.weight.T
        return y.argmax(-1), torch.where(y == y.amax(-1, keepdim=True), 1.0, 0.0).sum(-1)


def choices(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, weight)
    return y.max(-1).indices, (y == y.max(-1, keepdim=True).values).to(torch.get_default_dtype()).sum(-1)


CHOICES = Subject(
    Choices, lambda: (torch.randn(4, 6),), ("weight",), choices,
    {
        ("ties", "the last of the best"): (
            lambda x, w: (4 - F.linear(x, w).flip(-1).argmax(-1), choices(x, w)[1])
        ),
        ("ties", "the best counted once"): lambda x, w: (choices(x, w)[0], torch.ones(x.shape[:-1]).to(x)),
    },
)  # fmt: skip

SUBJECTS = (
    ACTIVATIONS, SCORES, ROUNDING, DIRECTIONS, ENTROPY, WORDS, HASHED, MASKED, ALL, CHOICES,
)  # fmt: skip
