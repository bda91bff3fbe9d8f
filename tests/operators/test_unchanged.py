"""What is noted of tensors: any change is seen that can be told, and nothing is called changed that is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt.operators import Unchanged


@pytest.mark.parametrize("inference", [False, True])
def test_what_stays_is_the_same_and_what_is_missing_stays_missing(inference: bool) -> None:
    with torch.inference_mode(inference):
        tensors = (torch.randn(3, 4), None, torch.randn(4))
        noted = Unchanged(tensors)
        assert noted.same(*tensors) and noted.same(*tensors)
        assert not noted.same(tensors[0], torch.randn(4), tensors[2])
        assert not noted.same(None, None, tensors[2])
        assert not noted.same(tensors[2], None, tensors[0])


@pytest.mark.parametrize("others", [1, 40])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.data.add_(1),
        lambda x: setattr(x, "data", x.data.clone()),
        lambda x: setattr(x, "data", x.data.t()),
        lambda x: setattr(x, "data", x.data[:2]),
        lambda x: setattr(x, "data", x.data.view(-1)),
        lambda x: torch.utils.swap_tensors(x, nn.Parameter(torch.randn(4, 4), requires_grad=False)),
    ],
    ids=["written", "moved", "turned", "cut", "flat", "swapped"],
)
def test_changes_that_torch_does_not_count(change: Callable[[Tensor], object], inference: bool, others: int) -> None:
    with torch.inference_mode(inference):
        x, other = nn.Parameter(torch.randn(4, 4), requires_grad=False), [torch.randn(4) for _ in range(others)]
        noted = Unchanged((*other, x))
        assert noted.same(*other, x)
        change(x)
        assert not noted.same(*other, x)


@pytest.mark.parametrize("others", [0, 40])
def test_a_single_element_that_torch_counts(others: int) -> None:
    x, other = torch.randn(100, 100), [torch.randn(4) for _ in range(others)]
    noted = Unchanged((x, *other))
    assert noted.same(x, *other)
    x[57, 3] += 1
    assert not noted.same(x, *other)


@pytest.mark.parametrize("deep", [False, True])
def test_many_tensors_of_all_kinds(deep: bool) -> None:
    kinds = (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64)
    tensors = [torch.zeros(3, 5, dtype=kind) for kind in kinds for _ in range(8)]
    tensors += [torch.randn(0, 3), torch.randn(4, 4).t(), tensors[0], *([torch.randn([2] * 6)] if deep else [])]
    given = (*tensors, None)
    noted = Unchanged(given)
    assert noted.same(*given)
    assert not noted.same(*given[:-1], tensors[0]) and not noted.same(*reversed(given))
    for number, each in enumerate(tensors):
        if each.numel():
            noted = Unchanged(given)
            each.data.fill_(1)
            assert not noted.same(*given), number
            each.data.fill_(0)


def test_others_with_the_same_memory_are_others() -> None:
    x = torch.randn(3, 4)
    noted = Unchanged((x,))
    assert not noted.same(x.detach()) and not noted.same(x.view(3, 4))


def test_whether_the_first_is_gone() -> None:
    x, other = torch.randn(3), torch.randn(3)
    noted = Unchanged((x, other))
    assert not noted.first_is_gone
    del x
    assert noted.first_is_gone
