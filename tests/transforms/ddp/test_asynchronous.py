"""What need not wait, in two processes: messages during the backward, checkpoints behind it, steps without averages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from across_ranks import own_rows, said, shared_folder
from ranks import results_of
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import fxopt
from fxopt import OuterSteps

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


def replica(options: str = "") -> nn.Module:
    torch.manual_seed(0)
    passes = f"fuse_ensembles,ddp{options}"
    return fxopt.optimize(Ensemble(), passes, example_inputs=own_rows(data()[0]), measure=False)


def trained(options: str = "", after: Callable[[Iterable[nn.Parameter]], Callable[[], object]] | None = None) -> Any:
    """Train with options of ddp; what `after` makes of the parameters is called after each step of the optimizer."""
    model, (x, labels) = replica(options), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    call = None if after is None else after(model.parameters())
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(own_rows(x)), own_rows(labels)).backward()
        optimizer.step()
        if call is not None:
            call()
        with torch.no_grad():
            losses.append(float(cross_entropy(model(x), labels)))
    return {"losses": losses, "state": fxopt.state_dict(model)}


LOCAL = f"{{local_after={WARMUP}}}"


def averager(period: int) -> Callable[[Iterable[nn.Parameter]], Callable[[], object]]:
    made = PeriodicModelAverager(period, warmup_steps=WARMUP)
    return lambda parameters: partial(made.average_parameters, list(parameters))


def on_rank_local_sgd() -> dict[str, Any]:
    return {
        "each step": trained(), "period 1": trained(LOCAL, averager(1)), "period 4": trained(LOCAL, averager(4)),
        "never": trained(LOCAL), "delayed": trained("{delayed=true}"),
        "outer mean": trained(LOCAL, lambda given: OuterSteps(given, 1, after=WARMUP, lr=1.0, momentum=0.0).step),
        "outer": trained(LOCAL, lambda given: OuterSteps(given, 5, after=WARMUP).step),
    }  # fmt: skip


def on_rank_delayed() -> list[Tensor]:
    """Return the gradients of steps whose parameters stay as they are: those of the step before, at first zeros."""
    torch.manual_seed(0)
    layers, rows = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double(), torch.randn(5, 6, 4).double()
    model = fxopt.optimize(layers, "ddp{delayed=true}", example_inputs=rows[0], measure=False)
    found: list[Tensor] = []
    for batch in rows:
        model.zero_grad()
        model(own_rows(batch)).square().mean().backward()
        plain = [parameter.grad for parameter in model.parameters()]
        layers.zero_grad()
        layers(batch).square().mean().backward()
        found.append(torch.stack([torch.cat([g.flatten() for g in each]) for each in (plain, grads(layers))]))
    return found


def grads(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


SHAPES = [((2, 3), torch.float32), ((4,), torch.float64), ((), torch.float32), ((5,), torch.float64)]


def on_rank_outer() -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters after outer steps, with a checkpoint between, and what the paper says."""
    rank, parameter = distributed.get_rank(), nn.Parameter(torch.tensor([1.0, -2.0]).double())
    outer = OuterSteps([parameter], 2, lr=0.7, momentum=0.9)
    wanted, velocity, seen, expected = parameter.detach().clone(), torch.zeros(2).double(), [], []
    for step in range(6):
        with torch.no_grad():
            parameter -= 0.1 * (rank + 1) * parameter
        if outer.step():
            alone = [wanted * (1 - 0.1 * (each + 1)) ** 2 for each in range(2)]
            change = wanted - (alone[0] + alone[1]) / 2
            velocity = 0.9 * velocity + change
            wanted = wanted - 0.7 * (change + 0.9 * velocity)
            seen.append(parameter.detach().clone()), expected.append(wanted)
        if step == 3:
            saved, outer = copy.deepcopy(outer.state_dict()), OuterSteps([parameter], 2, lr=0.7, momentum=0.9)
            outer.load_state_dict(saved)
    return seen, expected


def on_rank_messages() -> tuple[list[int], list[Tensor]]:
    """Return how many numbers each message of an outer step has, and what parameters of two dtypes are after it."""
    sent, send = list[int](), distributed.all_reduce
    given = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in SHAPES]
    outer = OuterSteps(given, 1, lr=1.0, momentum=0.0)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for number, parameter in enumerate(given):
            parameter += (distributed.get_rank() + 1) * (number + 1)
        patch.setattr(distributed, "all_reduce", lambda tensor: (sent.append(tensor.numel()), send(tensor)))
        outer.step()
    return sent, [parameter.detach() for parameter in given]


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


def on_rank_refused() -> str:
    return said(lambda: replica("{local_after=0}"))


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
    for name in ("outer", "delayed"):
        assert first[name]["losses"][-1] < first[name]["losses"][0]


def test_outer_steps_without_momentum_average_parameters(of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        wanted, found = (result["local_sgd"][name]["state"] for name in ("each step", "outer mean"))
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_outer_steps_are_those_of_the_paper(of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        seen, expected = result["outer"]
        assert len(seen) == 3
        for one, other in zip(seen, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_an_outer_step_sends_parameters_of_one_dtype_together(of_ranks: list[dict[str, Any]]) -> None:
    for sent, after in (result["messages"] for result in of_ranks):
        assert sent == [7, 9]
        for number, (parameter, (shape, dtype)) in enumerate(zip(after, SHAPES, strict=True)):
            torch.testing.assert_close(parameter, torch.full(shape, 1 + 1.5 * (number + 1), dtype=dtype))


def test_delayed_gradients_are_those_of_the_step_before(of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        own, whole = zip(*result["delayed"], strict=True)
        torch.testing.assert_close(own[0], whole[0])  # the first step shows which parameters there are
        assert not own[1].any()
        for number in range(2, 5):
            torch.testing.assert_close(own[number], whole[number - 1])


def test_local_steps_need_a_number(of_ranks: list[dict[str, Any]]) -> None:
    for result in of_ranks:
        assert "local_after=0; give a number of steps" in result["refused"]
