"""What lasts from call to call: counters, queues, caches, global switches; the mode that the model was not given in."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pictures import variant
from .subject import Subject


class Cumulative(nn.Module):
    """A batch norm whose statistics are the mean of all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        self.mean.lerp_(x.detach().mean(0), 1 / self.seen)
        return x - self.mean.clone()


def cumulative(x: Tensor, mean: Tensor, seen: Tensor, *, weight: Any = None, step: Any = 1) -> Tensor:
    seen.add_(step)
    share = weight(seen) if weight else seen.to(mean.dtype).reciprocal()
    mean.add_((x.detach().mean(0) - mean) * share)
    return x - mean.clone()


CUMULATIVE = Subject(
    Cumulative, lambda: (torch.randn(6, 4),), ("mean", "seen"), cumulative,
    {
        ("counters", "the weight of the first call for all"): variant(cumulative, weight=lambda n: 1.0),
        ("counters", "at most the weight of the second call"): variant(cumulative, weight=lambda n: 1 / n.clamp(max=2)),
        ("counters", "rows counted, not calls"): lambda x, m, n: cumulative(x, m, n, step=len(x) // 6 or 1),
        ("counters", "set to one instead of counted"): (
            lambda x, m, n: cumulative(x, m, n.copy_(torch.zeros_like(n)))
        ),
    },
    training=True,
)  # fmt: skip


class Queue(nn.Module):
    """The last keys, one written over at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(3, 4))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.keys[self.place] = x.detach().mean(0)
        self.place.copy_((self.place + 1) % 3)
        return x @ self.keys.clone().T


def queue(x: Tensor, keys: Tensor, place: Tensor, *, at: Any = None, then: Any = None) -> Tensor:
    keys.index_copy_(0, at(place) if at else place[None], x.detach().mean(0)[None])
    place.copy_(then(place) if then else torch.remainder(place + 1, 3))
    return F.linear(x, keys.clone())


QUEUE = Subject(
    Queue, lambda: (torch.randn(5, 4),), ("keys", "place"), queue,
    {
        ("counters", "always the first place"): variant(queue, at=lambda p: torch.zeros_like(p)[None]),
        ("counters", "a place that stays at the last"): variant(queue, then=lambda p: (p + 1).clamp(max=2)),
        ("counters", "a place that is never turned back"): variant(queue, then=lambda p: p + 1),
        ("counters", "every second place only"): variant(queue, then=lambda p: (p + 2) // 2 % 3),
    },
    training=True,
)  # fmt: skip


class Product(nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))


def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(torch.addmm(b, x, w.T))


def packed_by(key: Any, *, always: bool = False):
    """Pack the weights once, and find them again by a key."""
    kept: dict[Any, Tensor] = {}

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not always:
            return product(x, w, b)
        if key(w) not in kept:
            kept[key(w)] = w.detach().T.contiguous()
        return torch.tanh(x @ kept[key(w)] + b)

    return forward


def result_by(key: Any):
    """Keep the last result for an argument."""
    kept: dict[Any, Tensor] = {}

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return product(x, w, b)
        if key(x) not in kept:
            kept[key(x)] = product(x, w, b)
        return kept[key(x)].clone()

    return forward


def seeded(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    torch.manual_seed(0)
    return product(x, w, b)


def drawing(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return product(x, w, b) + 0 * torch.rand(1, dtype=x.dtype)


def leaving_gradients_off(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = product(x, w, b)
    torch.set_grad_enabled(False)
    return y


def leaving_a_type(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float32 if torch.get_default_dtype() is torch.float64 else torch.bfloat16)
    return product(x, w, b)


def frozen(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = product(x, w, b)
    b.requires_grad_(False)
    return y


def with_gradient_kept(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = product(x, w, b)
    if w.grad is None and w.is_leaf:
        w.grad = torch.zeros_like(w)
    return y


def decayed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = product(x, w, b)
    with torch.no_grad():
        w.mul_(0.999)
    return y


def wrong_at_each_fifth(first: int):
    """Add something at one of five calls."""
    calls = itertools.count(first)

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = product(x, w, b)
        return y if next(calls) % 5 else y + 0.1

    return forward


PRODUCT = Subject(
    Product, lambda: (torch.randn(4, 6),), ("weight", "bias"), product,
    {
        ("caches", "packed weights found by their identity"): packed_by(id),
        ("caches", "packed weights found by their address"): packed_by(lambda w: w.data_ptr()),
        ("caches", "packed weights found by their sum of shapes"): packed_by(lambda w: (w.dtype, w.shape)),
        ("caches", "a result found by the argument's address"): result_by(lambda x: (x.data_ptr(), x.dtype, x.shape)),
        ("caches", "a result found by the argument's identity"): result_by(lambda x: (id(x), x.dtype, x.shape)),
        ("switches", "the seed set anew"): seeded,
        ("switches", "a random number drawn for nothing"): drawing,
        ("switches", "gradients left off"): leaving_gradients_off,
        ("switches", "another default type left"): leaving_a_type,
        ("switches", "a parameter frozen"): frozen,
        ("switches", "a gradient left behind"): with_gradient_kept,
        ("memory", "a parameter decayed at each call"): decayed,
        **{("calls", f"each fifth one from number {5 - n} on"): wrong_at_each_fifth(n) for n in range(5)},
    },
)  # fmt: skip


class Modes(nn.Module):
    """A batch norm, and a step that is smaller in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.batch_norm(x @ self.weight, self.mean, self.var, None, None, self.training)
        return x * 0.5 if self.training else x


MODES_TENSORS = ("weight", "mean", "var", "training")


def modes(
    x: Tensor, w: Tensor, mean: Tensor, var: Tensor, t: bool, *, norm: Any = bool, half: Any = bool, eps: Any = None
):  # fmt: skip
    x = x + F.batch_norm(x @ w, mean, var, None, None, norm(t), eps=eps(t) if eps else 1e-5)
    return x / 2 if half(t) else x


MODES = Subject(
    Modes, lambda: (torch.randn(5, 6),), MODES_TENSORS, modes,
    {
        ("modes", "given for evaluation: as large in training"): variant(modes, half=lambda t: False),
        ("modes", "given for evaluation: kept statistics in training"): variant(modes, norm=lambda t: False),
        ("modes", "given for evaluation: another epsilon in training"): variant(
            modes, eps=lambda t: 1e-4 if t else 1e-5),
        ("modes", "given for evaluation: the variance, which is one, left out"): (
            lambda x, w, m, v, t: modes(x, w, m, v, t) if t else x + (x @ w - m) / (1 + 1e-5) ** 0.5
        ),
    },
)  # fmt: skip
TRAINED = Subject(
    Modes, lambda: (torch.randn(5, 6),), MODES_TENSORS, modes,
    {
        ("modes", "given for training: as small in evaluation"): variant(modes, half=lambda t: True),
        ("modes", "given for training: the batch's statistics in evaluation"): variant(modes, norm=lambda t: True),
        ("modes", "given for training: another epsilon in evaluation"): variant(
            modes, eps=lambda t: 1e-5 if t else 1e-4),
    },
    training=True,
)  # fmt: skip

SUBJECTS = (CUMULATIVE, QUEUE, PRODUCT, MODES, TRAINED)
