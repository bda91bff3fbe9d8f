"""Batch norms over the batches of two processes: what they compute, where they stay, and what follows them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from across_ranks import gap, summed, uneven_rows
from torch import Tensor, distributed, nn

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.transforms.sync_batchnorm import SyncBatchnorm


class Norms(nn.Module):
    """All kinds of batch norm, all their options."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)  # of a bias before a norm the gradient is zero
        self.two = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm2d(4, affine=False, eps=1e-3)
        self.three = nn.BatchNorm3d(4, track_running_stats=False)
        self.one = nn.BatchNorm1d(4, momentum=None)
        self.rows = nn.BatchNorm1d(4, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(self.two(self.conv(x)).sin())
        x = self.three(x[:, :, None].exp())[:, :, 0].sigmoid()
        x = self.one(x.flatten(2)).square()
        return self.rows(x.mean(2))


class Scaled(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class Labelled(nn.BatchNorm1d):
    """A subclass that keeps the forward, and knows more."""

    label = "unknown"


def made(model: type[nn.Module] = Norms) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return model().double(), 100 + 3 * torch.randn(7, 2, 6, 5, dtype=torch.float64)


def synchronized(model: nn.Module, x: Tensor, passes: str = "sync_batchnorm", **options: Any) -> nn.Module:
    return fxopt.optimize(model, passes, example_inputs=(x,), measure=False, **options)


def largest_gap(model: nn.Module, fast: nn.Module) -> float:
    """Compare the gradients of all processes together, and the buffers of this one, with those of the whole batch."""
    gradients = [gap(summed(own.grad), p.grad) for own, p in zip(fast.parameters(), model.parameters(), strict=True)]
    buffers = zip(fast.buffers(), model.buffers(), strict=True)
    return max(*gradients, *(gap(own.double(), b.double()) for own, b in buffers if b.any()))


# -- what the processes do -----------------------------------------------------------------------------------------


def on_rank_uneven_batches() -> Any:
    model, x = made()
    fast = synchronized(model, uneven_rows(x))
    statuses = [d.status for d in fxopt.plan(fast).decisions]
    error = 0.0
    for _ in range(2):
        model.zero_grad()
        fast.zero_grad()
        y, own = model(x), fast(uneven_rows(x))
        (y**3).sum().backward()
        (own**3).sum().backward()
        error = max(error, largest_gap(model, fast), gap(own, uneven_rows(y)))
    model.eval()
    fast.eval()
    evaluated = gap(fast(uneven_rows(x)), model(uneven_rows(x)))
    return statuses, error, evaluated, [type(child).__name__ for child in fast.children()]


def on_rank_state() -> Any:
    model, x = made()
    fast = synchronized(model, uneven_rows(x))
    names = list(fast.state_dict()) == list(model.state_dict())
    again = synchronized(fast, uneven_rows(x))
    known = [type(child) for child in fxopt.restore(fast).children()] == [type(child) for child in model.children()]
    loaded = fast.load_state_dict(model.state_dict()) == ([], [])
    path = Path(tempfile.mkdtemp()) / "saved.fxopt"
    fxopt.save(fast, path, factory="test_sync_batchnorm:Norms")
    saved = None
    if distributed.get_rank() == 0:
        opened = fxopt.load(path, model=Norms().double(), example_inputs=(x,))
        saved = type(opened.two).__name__ == "SyncBatchNorm2d"
    return names, len(fxopt.plan(again).decisions) == len(fxopt.plan(fast).decisions), known, loaded, saved


def on_rank_stays() -> Any:
    model = nn.Sequential(
        nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), Scaled(4), nn.LayerNorm(4), Labelled(4)
    )
    model[0].eval()
    model[1].register_forward_hook(lambda *_: None)
    model[5].label = "last"
    fast = synchronized(model, torch.randn(5, 4))
    kinds = [type(child).__name__ for child in fast]
    return {d.label: d.reason for d in fxopt.plan(fast).decisions if d.reason}, kinds, fast[5].label, type(model[2])


def on_rank_other_passes() -> Any:
    model, x = made()
    fast = synchronized(model, uneven_rows(x)).eval()
    folded = fxopt.optimize(fast, "fold_batchnorm", example_inputs=(uneven_rows(x),), measure=False)
    close = gap(folded(x), model.eval()(x))
    ensemble = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(4))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = ensemble

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([member(x) for member in self.members]).mean(0)

    whole = Mean().double()
    fused = synchronized(whole, uneven_rows(x)[:, :, 0, 0], "sync_batchnorm,fuse_ensembles")
    ensembles = gap(fused(uneven_rows(x)[:, :, 0, 0]), uneven_rows(whole(x[:, :, 0, 0])))
    return close, [d.status for d in fxopt.plan(folded).decisions if d.pass_name == "fold_batchnorm"], ensembles


# -- what the tests ask --------------------------------------------------------------------------------------------


def test_two_processes_are_one_with_the_whole_batch(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        statuses, error, evaluated, children = each["uneven_batches"]
        assert statuses == ["applied"] * 5
        assert error < 1e-9
        assert evaluated < 1e-9
        names = ["SyncBatchNorm2d", "SyncBatchNorm2d", "SyncBatchNorm3d", "SyncBatchNorm1d", "SyncBatchNorm1d"]
        assert children == ["Conv2d", *names]


def test_state_names_stay_and_everything_comes_back(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        assert each["state"] == (True, True, True, True, True if rank == 0 else None)


def test_what_stays_as_it_is(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        reasons, kinds, label, untouched = each["stays"]
        assert reasons["0"] == "it is frozen: in evaluation mode, while the model trains"
        assert "'1' has hooks" in reasons["1"]
        assert reasons["3"] == "it is a Scaled, which has a forward of its own"
        assert kinds == ["BatchNorm1d", "BatchNorm1d", "SyncBatchNorm1d", "Scaled", "LayerNorm", "SyncBatchNorm1d"]
        assert label == "last"
        assert untouched is nn.BatchNorm1d


def test_passes_that_know_batch_norms(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        folded, statuses, ensembles = each["other_passes"]
        assert folded < 1e-9
        assert statuses == ["applied"]
        assert ensembles < 1e-9


def test_without_a_process_group_the_command_is_given() -> None:
    model, x = made()
    fast = synchronized(model, x)
    reasons = {d.reason for d in fxopt.plan(fast).decisions}
    assert len(reasons) == 1
    assert "run `torchrun --nproc-per-node=2 " in reasons.pop()
    assert [type(child) for child in fast.children()] == [type(child) for child in model.children()]


def test_training_and_evaluation_do_not_go_together() -> None:
    with pytest.raises(
        fxopt.OrderError, match="'fold_batchnorm' needs evaluation mode, 'sync_batchnorm' is for training"
    ):
        fxopt.optimize(nn.BatchNorm1d(2), "sync_batchnorm,fold_batchnorm")


def test_members_are_synchronized_before_they_are_fused() -> None:
    with pytest.raises(fxopt.OrderError, match="use sync_batchnorm,fuse_ensembles"):
        fxopt.optimize(nn.BatchNorm1d(2), "fuse_ensembles,sync_batchnorm")


def test_a_lazy_batch_norm_is_refused() -> None:
    with pytest.raises(fxopt.InputError, match="is lazy: its shape is not known yet"):
        fxopt.optimize(nn.Sequential(nn.LazyBatchNorm1d()), SyncBatchnorm())


def test_the_text_of_the_pass_is_the_pass() -> None:
    assert parse(str(SyncBatchnorm())) == (SyncBatchnorm(),)
