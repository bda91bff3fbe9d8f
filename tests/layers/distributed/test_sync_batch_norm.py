"""Batch norms over several processes: what is rare is right too, and one process has a plain batch norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from across_ranks import gap, summed, uneven_rows
from torch import Tensor, distributed, nn

from fxopt.layers.distributed import SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d

# -- what the processes do -----------------------------------------------------------------------------------------


def on_rank_an_empty_batch() -> Any:
    torch.manual_seed(0)
    norm, whole = SyncBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    own = norm(x if distributed.get_rank() == 0 else x[:0])
    own.square().sum().mul(2).sub(own.sum()).backward()
    y = whole(x)
    y.square().sum().mul(2).sub(y.sum()).backward()
    return max(gap(summed(norm.weight.grad), whole.weight.grad), gap(norm.running_var, whole.running_var))


def on_rank_far_from_zero() -> Any:
    """In float32 the variance of values far from zero keeps its digits."""
    torch.manual_seed(0)
    x = 1000 + torch.randn(64, 3)
    norm = SyncBatchNorm1d(3, momentum=1.0)
    norm(x[:20] if distributed.get_rank() == 0 else x[20:])
    return gap(norm.running_var.double(), x.double().var(0))


def on_rank_second_derivatives() -> Any:
    norm, whole = SyncBatchNorm1d(2).double(), nn.BatchNorm1d(2).double()
    torch.manual_seed(0)
    x = torch.randn(7, 2, dtype=torch.float64)
    found = []
    for each, rows, over_all in ((norm, uneven_rows(x), summed), (whole, x, Tensor.clone)):
        rows = rows.clone().requires_grad_()
        (slope,) = torch.autograd.grad((each(rows) ** 3).sum(), rows, create_graph=True)
        (slope**2).sum().backward()
        found.append((rows.grad, over_all(each.weight.grad)))
    (own, weight), (of_whole, of_weight) = found
    return max(gap(own, uneven_rows(of_whole)), gap(weight, of_weight))


def on_rank_half_precision() -> Any:
    norm = SyncBatchNorm2d(3)
    y = norm(torch.randn(2, 3, 4, 4).bfloat16())
    return str(y.dtype), str(norm.running_mean.dtype)


# -- what the tests ask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("an_empty_batch", 1e-9), ("second_derivatives", 1e-9)])
def test_what_is_rare_is_right_too(of_ranks: list[dict[str, Any]], name: str, most: float) -> None:
    assert all(each[name] < most for each in of_ranks)


def test_statistics_keep_their_digits(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert each["far_from_zero"] < 1e-5
        assert each["half_precision"] == ("torch.bfloat16", "torch.float32")


@pytest.mark.parametrize(
    ("kind", "synced", "shape"),
    [
        (nn.BatchNorm1d, SyncBatchNorm1d, (5, 3)),
        (nn.BatchNorm2d, SyncBatchNorm2d, (5, 3, 2, 2)),
        (nn.BatchNorm3d, SyncBatchNorm3d, (5, 3, 2, 2, 2)),
    ],
)
def test_one_process_has_a_batch_norm(kind: type[nn.Module], synced: type[nn.Module], shape: tuple[int, ...]) -> None:
    x, results = torch.randn(shape), []
    for cls in (kind, synced):
        norm, own = cls(3), x.clone().requires_grad_()
        y = norm(own)
        y.square().sum().backward()
        results.append([y, own.grad, norm.weight.grad, *norm.buffers(), norm.eval()(x)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    with pytest.raises(ValueError, match="expected"):
        synced(3)(torch.randn(3))
    assert issubclass(synced, kind)
    assert isinstance(copy.deepcopy(synced(3)), synced)
