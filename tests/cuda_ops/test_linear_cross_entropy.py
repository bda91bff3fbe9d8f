"""The loss of a linear head in chunks against the plain one: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.cuda_ops import linear_cross_entropy
from fxopt.cuda_ops.linear_cross_entropy.chunks import Head, gradients
from fxopt.passes.timing import LiveBytes


def plain(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def head(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    x, weight, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((6, 7, 12), (19, 12), (19,)))
    target = torch.randint(0, 19, (6, 7))
    return x, weight, target.where(target != 3, -100), bias


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 5])
def test_loss_and_gradients_are_those_of_the_plain_head(reduction: str, smoothing: float, chunk: int | None):
    x, weight, target, bias = head()
    got = linear_cross_entropy(x, weight, target, bias, reduction=reduction, label_smoothing=smoothing, chunk=chunk)
    expected = plain(x, weight, target, bias, reduction=reduction, label_smoothing=smoothing).view(got.shape)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn_like(got)
    given = [x, weight, bias]
    torch.testing.assert_close(
        torch.autograd.grad(got, given, upstream), torch.autograd.grad(expected, given, upstream)
    )
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(x, weight, target, bias, reduction=reduction, label_smoothing=smoothing).view_as(got),
            got,
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "weights": {"class_weight": torch.rand(19, dtype=torch.float64)},
    "softcap": {"softcap": 1.5},
    "z-loss": {"z_loss": 0.1},
    "all": {"class_weight": torch.rand(19, dtype=torch.float64), "softcap": 1.5, "z_loss": 0.1},
}


def written_out(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor, *, reduction: str, smoothing: float,
    class_weight: Tensor | None = None, softcap: float = 0.0, z_loss: float = 0.0,
) -> Tensor:  # fmt: skip
    logits, target = F.linear(x, weight, bias).flatten(0, -2), target.flatten()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = F.cross_entropy(logits, target, class_weight, reduction=reduction, label_smoothing=smoothing)
    squares = z_loss * logits.logsumexp(-1).square().where(target != -100, 0)
    return loss + {"none": squares, "sum": squares.sum(), "mean": squares.sum() / (target != -100).sum()}[reduction]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_of_classes_softcap_and_z_loss(options: str, reduction: str, smoothing: float):
    x, weight, target, bias = head()
    chosen: dict[str, Any] = {"reduction": reduction, **OPTIONS[options]}
    got = linear_cross_entropy(x, weight, target, bias, label_smoothing=smoothing, chunk=5, **chosen)
    expected = written_out(x, weight, target, bias, smoothing=smoothing, **chosen).view(got.shape)
    torch.testing.assert_close(got, expected)
    given, upstream = [x, weight, bias], torch.randn_like(got)
    found = torch.autograd.grad(got, given, upstream, create_graph=True)
    first = torch.autograd.grad(expected, given, upstream, create_graph=True)
    torch.testing.assert_close(found, first)
    second = [torch.autograd.grad(sum(each.square().sum() for each in of), given) for of in (found, first)]
    torch.testing.assert_close(*second)
    with torch.no_grad():
        again = linear_cross_entropy(x, weight, target, bias, label_smoothing=smoothing, **chosen)
    torch.testing.assert_close(again, got)


@pytest.mark.parametrize("name", ["", "_step", "_sum", "_backward"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_each_operator_passes_opcheck(name: str, requires_grad: bool):
    x, weight, bias = (torch.randn(shape, requires_grad=requires_grad) for shape in ((6, 4), (5, 4), (5,)))
    given = (x, weight, bias, torch.tensor([0, 1, -100, 4, 3, 2]), torch.rand(5), -100, 0.1, 2.0, 0.01, 0)
    operator = getattr(torch.ops.fxopt, f"linear_cross_entropy{name}").default
    torch.library.opcheck(operator, (torch.rand(6), *given) if name == "_backward" else given)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"class_weight": torch.rand(4)}, r"class_weight is torch.float32 of shape \(4,\); expected floats of shape"),
        ({"class_weight": torch.ones(19, dtype=torch.int64)}, "class_weight is torch.int64"),
        ({"class_weight": torch.rand(19).requires_grad_()}, "class_weight gets no gradient"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"z_loss": -1.0}, "z_loss -1.0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], reason: str):
    with pytest.raises(fxopt.UsageError, match=reason):
        linear_cross_entropy(*head(), **options)


def test_gradients_can_be_taken_twice_over():
    x, weight, target, _ = head()
    loss = linear_cross_entropy(x, weight, target)
    first = torch.autograd.grad(2 * loss, x, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(2 * loss, x), rtol=0, atol=0)


def test_narrow_dtypes_sum_in_float32():
    x, weight, target, bias = (each.bfloat16() if each.is_floating_point() else each for each in head())
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    got = linear_cross_entropy(x, weight, target, bias, chunk=2)
    assert got.dtype == torch.float32
    exact = plain(x.double(), weight.double(), target, bias.double())
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)
    for one, other in zip(torch.autograd.grad(got, [x, weight]), torch.autograd.grad(exact, [x, weight]), strict=True):
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


def test_autocast_takes_products_in_its_dtype():
    x, weight, target, bias = head(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = linear_cross_entropy(x, weight, target, bias), plain(x, weight, target, bias)
    torch.testing.assert_close(got, expected.float(), rtol=1e-2, atol=1e-2)
    assert torch.autograd.grad(got, weight)[0].dtype == torch.float32


def test_autocast_leaves_float64_alone():
    x, weight, target, bias = head(torch.float64)
    expected = linear_cross_entropy(x, weight, target, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(x, weight, target, bias), expected)


def test_all_rows_ignored_is_what_torch_says():
    x, weight, target, _ = head()
    ignored = torch.full_like(target, -100)
    assert linear_cross_entropy(x, weight, ignored).isnan()
    assert linear_cross_entropy(x, weight, ignored, reduction="sum") == 0


def test_a_step_takes_a_fifth_of_the_memory_and_less():
    """Count what is alive at once beside rows, weight and their gradients, operator by operator within the chunks."""
    rows, features, classes = 512, 8, 32_768
    x, weight = torch.randn(rows, features), torch.randn(classes, features)
    target = torch.randint(0, classes, (rows,))
    beside = 2 * 4 * features * (rows + classes)
    with LiveBytes() as whole:
        leaves = [each.requires_grad_() for each in (x, weight)]
        whole.expect(leaves)
        torch.autograd.grad(plain(x, weight, target), leaves)
    with LiveBytes() as chunked, torch.no_grad():
        chunked.expect(leaves)
        gradients(Head(x, weight, None, target, None, -100, 0.0, 0.0, 0.0, 32), None)
    assert (chunked.peak - beside) * 5 <= whole.peak - beside


def test_a_graph_captured_without_gradients_computes_them_in_the_forward():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(12, 19)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(x, self.head.weight, target, self.head.bias)

    model = Loss()
    x, _, target, _ = head(torch.float32)
    with torch.no_grad():
        captured = fxopt.capture(model, (x.detach(), target)).model
    with torch.profiler.profile() as profile:
        got = torch.autograd.grad(captured(x, target), captured.head.weight)
    called = {event.key for event in profile.key_averages() if event.key.startswith("fxopt::")}
    assert "fxopt::linear_cross_entropy_step" in called
    assert "fxopt::linear_cross_entropy_backward" not in called
    torch.testing.assert_close(
        got, torch.autograd.grad(plain(x, model.head.weight, target, model.head.bias), model.head.weight)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_that_are_ignored_count_nowhere_whatever_they_hold(reduction):
    x, weight = torch.randn(4, 3), torch.randn(5, 3, requires_grad=True)
    x[1], x[3] = float("inf"), float("nan")
    x.requires_grad_()
    target = torch.tensor([0, -100, 4, -100])
    linear_cross_entropy(x, weight, target, reduction=reduction).sum().backward()
    found = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    kept = target >= 0
    F.cross_entropy(F.linear(x[kept], weight), target[kept], reduction=reduction).sum().backward()
    torch.testing.assert_close(found, (x.grad, weight.grad))


def test_the_mean_of_no_rows_is_nan_and_has_gradients_of_zero():
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.full((4,), -100))
    loss.backward()
    assert loss.isnan()
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sums_of_gradients_that_overflow_float16_are_divided_first(reduction):
    x, weight = torch.full((2000, 4), 100.0).half(), torch.zeros(5, 4).half().requires_grad_()
    linear_cross_entropy(x, weight, torch.zeros(2000).long(), reduction=reduction).mean().backward()
    expected = torch.full((5, 4), 20.0)
    expected[0] = -80.0
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2e-3, atol=0)
