"""swap_kernels: the loss of a linear head, where nothing else reads the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent

CLASSES = 11


class Loss(nn.Module):
    """A head, and a function of what it is given."""

    def __init__(self, function: Callable[..., Any], bias: bool = True, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.loss = function, loss
        self.head = nn.Linear(8, CLASSES, bias=bias)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.function(self, x, target)


def shifted(self: Any, x: Tensor, target: Tensor) -> Tensor:
    logits = self.head(x)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), target[..., 1:].contiguous().view(-1))


def causal(self: Any, x: Tensor, target: Tensor) -> Tensor:
    """As `ForCausalLMLoss` of transformers does it."""
    logits = self.head(x).float()
    target = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, CLASSES), target.to(logits.device), ignore_index=-100, reduction="sum")


def by_size(self: Any, x: Tensor, target: Tensor) -> Tensor:
    logits = self.head(x)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1), ignore_index=2)


def rows(self: Any, x: Tensor, target: Tensor) -> Tensor:
    return self.loss(self.head(x.flatten(0, 1)), target.flatten())


def classes_second(self: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(self.head(x).transpose(1, 2), target)


def by_hand(self: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, self.head.weight).reshape(-1, CLASSES), target.reshape(-1))


FOUND: dict[str, Callable[[], nn.Module]] = {
    "shifted": lambda: Loss(shifted),
    "shifted, without a bias": lambda: Loss(shifted, bias=False),
    "causal": lambda: Loss(causal),
    "size": lambda: Loss(by_size),
    "module": lambda: Loss(rows, loss=nn.CrossEntropyLoss()),
    "smoothed": lambda: Loss(rows, loss=nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)),
    "classes second": lambda: Loss(classes_second),
    "function": lambda: Loss(by_hand),
}


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 5, 8), torch.randint(0, CLASSES, (2, 5))


def swapped(model: nn.Module, x: Tensor, target: Tensor) -> tuple[nn.Module, list[str]]:
    fast = fxopt.optimize(model, "swap_kernels", example_inputs=(x, target), measure=False)
    return fast, [each.site["data"]["kernel"] for each in fxopt.plan(fast).decisions if each.status == "applied"]


@pytest.mark.parametrize("name", FOUND)
def test_a_spelling_is_found_and_equal(name: str):
    model, (x, target) = FOUND[name]().train(), given()
    fast, found = swapped(model, x, target)
    assert found == ["linear_cross_entropy"]
    graph = fxopt.graphs(fast)[""]
    assert not [n for n in graph.nodes if n.target in ("head", F.linear, "loss")]
    assert_equivalent(model, fast, (x, target))


def test_other_numbers_of_rows_are_computed_by_the_same_graph():
    model, (x, target) = Loss(causal), given()
    fast, _ = swapped(model, x, target)
    x, target = torch.randn(3, 7, 8), torch.randint(0, CLASSES, (3, 7))
    torch.testing.assert_close(fast(x, target), model(x, target))


def test_classes_in_eight_bits_are_taken_as_cross_entropy_takes_them():
    model, (x, target) = Loss(by_size), given()
    fast, _ = swapped(model, x, target)
    torch.testing.assert_close(fast(x, target.to(torch.uint8)), model(x, target.to(torch.uint8)))


@pytest.mark.parametrize(("kind", "shape"), [(by_size, (10, CLASSES)), (classes_second, (2, CLASSES, 5))])
def test_probabilities_of_classes_are_taken_by_the_original(kind: Callable[..., Tensor], shape: tuple[int, ...]):
    model, (x, target) = Loss(kind), given()
    fast, found = swapped(model, x, target)
    assert found == ["linear_cross_entropy"]
    probabilities = torch.randn(shape).softmax(1)
    try:
        expected = model(x, probabilities)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            fast(x, probabilities)
    else:
        torch.testing.assert_close(fast(x, probabilities), expected)
    torch.testing.assert_close(fast(x, target), model(x, target))


def test_in_bfloat16_with_an_upcast_the_loss_is_float32():
    model, (x, target) = Loss(causal).bfloat16(), given()
    fast, found = swapped(model, x.bfloat16(), target)
    assert found == ["linear_cross_entropy"]
    assert fast(x.bfloat16(), target).dtype == model(x.bfloat16(), target).dtype == torch.float32


def also_returned(self: Any, x: Tensor, target: Tensor) -> Any:
    logits = self.head(x)
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1)), logits


def shape_read(self: Any, x: Tensor, target: Tensor) -> Tensor:
    logits = self.head(x)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1)) / logits.shape[-1]


def not_reduced(self: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(self.head(x).view(-1, CLASSES), target.view(-1), reduction="none")


def of_probabilities(self: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(self.head(x).view(-1, CLASSES), F.one_hot(target, CLASSES).float().view(-1, CLASSES))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (also_returned, "linear_cross_entropy: 'head' is read elsewhere too"),
        (shape_read, "is read elsewhere too"),
        (not_reduced, "linear_cross_entropy: its reduction is 'none', and the operator gives 'mean' or 'sum'"),
        (of_probabilities, "torch.float32, not one class for each row"),
    ],
)
def test_why_it_stays_is_said(function: Callable[..., Any], reason: str):
    model, (x, target) = Loss(function), given()
    fast, found = swapped(model, x, target)
    assert found == []
    said = [each.reason for each in fxopt.plan(fast).decisions]
    assert len(said) == 1 and reason in said[0], said


def test_weighted_classes_are_another_loss():
    model, (x, target) = Loss(rows, loss=nn.CrossEntropyLoss(weight=torch.rand(CLASSES))), given()
    assert swapped(model, x, target)[1] == []
