"""What need not wait, in two processes: messages during the backward, checkpoints behind it, steps without averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from across_ranks import own_rows, shared_folder
from ranks import results_of
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import fxopt

STEPS, WARMUP = 33, 8


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (64,), generator=generator)
    return torch.randn(64, 8, generator=generator) + 2 * torch.eye(8)[labels], labels


def replica() -> nn.Module:
    torch.manual_seed(0)
    return fxopt.optimize(Ensemble(), "fuse_ensembles,ddp", example_inputs=own_rows(data()[0]), measure=False)


def trained(averaged: int, period: int) -> dict[str, Any]:
    """Train with averages of gradients for some steps, then with averages of parameters once in a period; 0: none."""
    model, (x, labels) = replica(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    averager = PeriodicModelAverager(period, warmup_steps=averaged) if period else None
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if step < averaged:
            cross_entropy(model(own_rows(x)), own_rows(labels)).backward()
        else:
            with fxopt.no_sync(model):
                cross_entropy(model(own_rows(x)), own_rows(labels)).backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
        with torch.no_grad():
            losses.append(float(cross_entropy(model(x), labels)))
    return {"losses": losses, "state": fxopt.state_dict(model)}


def on_rank_local_sgd() -> dict[str, Any]:
    return {
        "each step": trained(STEPS, 0), "period 1": trained(WARMUP, 1), "period 4": trained(WARMUP, 4),
        "never": trained(WARMUP, 0),
    }  # fmt: skip


def on_rank_checkpoint() -> Any:
    """Save behind the next step; return what was saved, and the weights before and after that step."""
    model, (x, labels) = replica(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    folder = shared_folder()
    before = {name: tensor.clone() for name, tensor in fxopt.state_dict(model).items()}
    group = distributed.new_group(backend="gloo")  # in that of the training, messages would mix
    saving = dcp.async_save({"model": fxopt.state_dict(model)}, checkpoint_id=folder, process_group=group)
    cross_entropy(model(own_rows(x)), own_rows(labels)).backward()
    optimizer.step()
    saving.result()
    plain = Ensemble()
    state = plain.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    plain.load_state_dict(state)
    return before, dict(plain.state_dict()), fxopt.state_dict(model)


def on_rank_overlap() -> tuple[int, int]:
    """Return how many messages were sent before the last product of the backward, and how many in all."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    x = torch.randn(64, 256)
    fast = fxopt.optimize(model, "ddp{bucket_cap_mb=0.5}", example_inputs=x, measure=False)
    for _ in range(3):  # the first shows the order, the second lets torch divide the buckets again
        fast(x).square().mean().backward()
    loss = fast(x).square().mean()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss.backward()
    events = list(seen.events() or [])
    products = [event.time_range.start for event in events if event.name == "aten::mm"]
    sent = [event.time_range.start for event in events if event.name == "c10d::allreduce_"]
    return sum(start < max(products) for start in sent), len(sent)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(Path(__file__), 2, tmp_path_factory.mktemp("ranks"))


def test_messages_are_sent_during_the_backward(of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        early, sent = result["overlap"]
        assert early >= sent - 2 >= 2, (early, sent)


def test_a_checkpoint_that_is_written_behind_has_the_weights_of_its_step(of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        before, saved, after = result["checkpoint"]
        assert list(saved) == list(before)
        assert all(torch.equal(saved[name], before[name]) for name in before)
        assert not all(torch.equal(after[name], before[name]) for name in before)


def test_averages_of_parameters_in_each_step_are_those_of_gradients(of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        wanted, found = (result["local_sgd"][name]["state"] for name in ("each step", "period 1"))
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_local_steps_end_in_equal_weights_and_learn(of_ranks: list[dict[str, Any]]) -> None:
    first, second = (result["local_sgd"] for result in of_ranks)
    one, other = first["period 4"], second["period 4"]
    apart = first["never"]["state"], second["never"]["state"]
    assert all(torch.equal(one["state"][name], other["state"][name]) for name in one["state"])
    assert not all(torch.equal(apart[0][name], apart[1][name]) for name in apart[0])
    assert one["losses"][-1] < one["losses"][WARMUP - 1]
