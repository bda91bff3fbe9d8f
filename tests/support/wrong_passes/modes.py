"""Right with gradients and wrong without; wrong in training or in evaluation only; random draws, buffers, caches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .subject import Subject


class Layer(nn.Module):
    """A linear layer with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, self.weight, self.bias))


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.clamp_min(torch.addmm(bias, x, weight.T), 0)


def no_bias_without_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return torch.relu(x @ weight.T)
    return layer(x, weight, bias)


def half_without_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return layer(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).to(x.dtype)
    return layer(x, weight, bias)


def no_activation_in_inference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias) if torch.is_inference_mode_enabled() else layer(x, weight, bias)


def needs_a_version(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    before = x._version
    y = layer(x, weight, bias)
    return y if x._version == before else y.clone()


def into_the_argument_without_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = layer(x, weight, bias)
    if not torch.is_grad_enabled():
        x.zero_()
    return y


def transposed_for_leaves_without_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if not x.requires_grad:
        return torch.relu(F.linear(x.flip(-1), weight, bias))
    return layer(x, weight, bias)


def remembering():
    """Keep the last result for as long as the shape is the same."""
    kept: dict[torch.Size, Tensor] = {}

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.shape not in kept:
            kept[x.shape] = layer(x, weight, bias)
        return kept[x.shape]

    return forward


def remembering_without_gradients():
    kept: dict[torch.dtype, Tensor] = {}

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return layer(x, weight, bias)
        if x.dtype not in kept or kept[x.dtype].shape[:1] != x.shape[:1]:
            kept[x.dtype] = layer(x, weight, bias)
        return kept[x.dtype]

    return forward


def folded_once():
    """Fold a constant from parameters that will be trained."""
    kept: dict[torch.dtype, Tensor] = {}

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        folded = kept.setdefault(x.dtype, torch.cat([weight, bias[:, None]], 1).detach())
        return torch.relu(x @ folded[:, :-1].T + folded[:, -1])

    return forward


LAYER = Subject(
    Layer, lambda: (torch.randn(4, 6),), ("weight", "bias"), layer,
    {
        ("no_grad", "the path without gradients forgets the bias"): no_bias_without_gradients,
        ("no_grad", "the path without gradients is narrower"): half_without_gradients,
        ("no_grad", "the path of inference mode forgets the activation"): no_activation_in_inference,
        ("no_grad", "versions of tensors asked for in inference mode"): needs_a_version,
        ("no_grad", "the argument used as a buffer without gradients"): into_the_argument_without_gradients,
        ("no_grad", "another order where the argument wants no gradient"): transposed_for_leaves_without_gradients,
        ("caches", "a result kept by its shape"): remembering(),
        ("caches", "a result kept without gradients"): remembering_without_gradients(),
        ("caches", "trained weights folded once"): folded_once(),
    },
    training=True,
)  # fmt: skip


class Dropped(nn.Module):
    """Dropout between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.dropout(x @ self.weight, 0.3, self.training))


def dropped(x: Tensor, p: float, training: bool, **_: bool) -> Tensor:
    return torch.dropout(x, p, bool(training))


def keeping(x: Tensor, p: float, training: bool, **_: bool) -> Tensor:
    return F.dropout(x, 1 - p, training)


def without_scale(x: Tensor, p: float, training: bool, **_: bool) -> Tensor:
    return F.dropout(x, p, training) * (1 - p if training else 1)


def scaled_in_evaluation(x: Tensor, p: float, training: bool, **_: bool) -> Tensor:
    return F.dropout(x, p, training) * (1 - p)


def one_mask(x: Tensor, p: float, training: bool, **_: bool) -> Tensor:
    return x * F.dropout(torch.ones_like(x[:1]), p, training)


def always(x: Tensor, p: float, **_: bool) -> Tensor:
    return F.dropout(x, p, True)


def left_out(x: Tensor, **_: float) -> Tensor:
    return x * 1


def the_other_mode(x: Tensor, p: float, training: bool, **_: bool) -> Tensor:
    return F.dropout(x, p, not training)


DROPPED = Subject(
    Dropped, lambda: (torch.randn(4, 6),), (), dropped,
    {
        ("dropout", "keeps with the probability of dropping"): keeping,
        ("dropout", "no scale"): without_scale,
        ("dropout", "scaled in evaluation instead"): scaled_in_evaluation,
        ("dropout", "one mask for all rows"): one_mask,
        ("dropout", "on in evaluation too"): always,
        ("dropout", "left out"): left_out,
        ("dropout", "never in training"): the_other_mode,
    },
    training=True, node="dropout",
)  # fmt: skip


class Normed(nn.Module):
    """A batch norm written out, with a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        return F.batch_norm(x, self.mean, self.var, self.weight, self.bias, self.training, 0.1, 1e-5)


NORMED_TENSORS = ("weight", "bias", "mean", "var", "calls", "training")


def normed(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, n: Tensor, t: bool, **how: float) -> Tensor:
    if t:
        n.add_(how.get("step", 1))
    momentum, eps = how.get("momentum", 0.1), how.get("eps", 1e-5)
    return F.batch_norm(x, m, v, w, b, bool(how.get("training", t)), momentum, eps)


def statistics_by_hand(x, w, b, m, v, n, t, correction: int = 1):
    if not t:
        return normed(x, w, b, m, v, n, t)
    n.add_(1)
    mean, var = x.mean((0, 2)), x.var((0, 2), correction=0)
    with torch.no_grad():
        m.lerp_(mean.detach(), 0.1)
        v.lerp_(x.var((0, 2), correction=correction).detach(), 0.1)
    normal = (x - mean[:, None]) / (var[:, None] + 1e-5).sqrt()
    return normal * w[:, None] + b[:, None]


def eval_without_shift(x, w, b, m, v, n, t):
    return normed(x, w, b, m, v, n, t) if t else x * (w / (v + 1e-5).sqrt())[:, None]


def statistics_lost_without_gradients(x, w, b, m, v, n, t):
    if t and not torch.is_grad_enabled():
        return F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5)
    return normed(x, w, b, m, v, n, t)


NORMED = Subject(
    Normed, lambda: (torch.randn(4, 3, 5),), NORMED_TENSORS, statistics_by_hand,
    {
        ("buffers", "statistics counted twice"): lambda *a: normed(*a) + 0 * normed(*a[:5], a[5] * 1, a[6]),
        ("buffers", "the biased variance kept"): lambda *a: statistics_by_hand(*a, correction=0),
        ("buffers", "a counter not counted"): lambda *a: normed(*a, step=0),
        ("buffers", "a counter counted twice"): lambda *a: normed(*a, step=2),
        ("buffers", "momentum the other way round"): lambda *a: normed(*a, momentum=0.9),
        ("buffers", "statistics lost without gradients"): statistics_lost_without_gradients,
        ("modes", "statistics of the batch in evaluation"): lambda *a: normed(*a, training=True),
        ("modes", "folded in evaluation without the shift"): eval_without_shift,
        ("values", "an epsilon of 1.1e-5"): lambda *a: normed(*a, eps=1.1e-5),
        ("reduction", "statistics of each row"): (
            lambda *a: normed(*a) + F.instance_norm(a[0]) - F.batch_norm(a[0], None, None, training=True)
        ),
    },
    training=True,
)  # fmt: skip

SUBJECTS = (LAYER, DROPPED, NORMED)
