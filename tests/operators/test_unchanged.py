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
def test_changes_that_torch_does_not_count(change: Callable[[Tensor], object], inference: bool) -> None:
    with torch.inference_mode(inference):
        x, other = nn.Parameter(torch.randn(4, 4), requires_grad=False), torch.randn(4)
        noted = Unchanged((other, x))
        change(x)
        assert not noted.same(other, x)


def test_a_single_element_that_torch_counts() -> None:
    x = torch.randn(100, 100)
    noted = Unchanged((x,))
    x[57, 3] += 1
    assert not noted.same(x)


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
