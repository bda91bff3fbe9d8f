"""Losses and times of a step on several processes: gradients averaged in each step, a step late, or now and then.

    python benchmarks/local_steps.py --json benchmarks/results/local_steps.json

A classifier of 32 numbers (two hidden layers of 128, AdamW), 32 rows a step in each process; the labels are those of a
random network, a tenth of them wrong. The loss is that over 2,048 other rows, the mean over processes. All start with
the same steps together. Messages are counted as float32 numbers that a process gives to `all_reduce`.

Times are of two processes whose forward takes 20 ms (a sleep, in the place of a device that computes). Their messages
arrive no sooner than some milliseconds after they were sent (a sleep in `all_reduce`, and in a communication hook of
torch's reducer): milliseconds a step, in the fastest of three rounds of 32 steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from machine import described
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import fxopt
from fxopt.layers.distributed import replica

WARM_UP, SEEN = 32, (32, 96, 160, 224, 288, 352, 416)
LOCAL = f"ddp{{local_after={WARM_UP}}}"

Make = Callable[[nn.Module], Callable[[], object]]
"""From a model to what is called after each step."""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
        torch.manual_seed(seed)
        x = torch.randn(count, 32)
        labels = (4 * teacher(x)).argmax(1)
        return x, torch.where(torch.rand(count) < 0.1, torch.randint(10, (count,)), labels)


def averager(every: int) -> Make:
    def make(model: nn.Module) -> Callable[[], object]:
        made = PeriodicModelAverager(every, warmup_steps=WARM_UP)
        return lambda: made.average_parameters(model.parameters())

    return make


def outer(every: int) -> Make:
    return lambda model: fxopt.OuterSteps(model.parameters(), every, after=WARM_UP).step


WAYS: dict[str, tuple[str, Make | None, int]] = {  # passes, what follows a step, in how many steps something is sent
    "gradients, each step": ("ddp", None, 1),
    "gradients, one step late": ("ddp{delayed=true}", None, 1),
    "parameters, every 8 steps": (LOCAL, averager(8), 8),
    "outer step, every 8 steps": (LOCAL, outer(8), 8),
    "parameters, every 32 steps": (LOCAL, averager(32), 32),
    "outer step, every 32 steps": (LOCAL, outer(32), 32),
    "nothing": (LOCAL, None, 0),
}


def losses(passes: str, make: Make | None) -> list[float]:
    """Train in this process as one of several; return the mean of their losses."""
    torch.manual_seed(0)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    x, labels = rows(32 * SEEN[-1], 1 + rank)
    model = fxopt.optimize(network(), passes, example_inputs=x[:32], measure=False)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=2e-3), list[float]()
    after = None if make is None else make(model)
    for step in range(SEEN[-1]):
        part = slice(32 * step, 32 * step + 32)
        optimizer.zero_grad()
        cross_entropy(model(x[part]), labels[part]).backward()
        optimizer.step()
        if after is not None:
            after()
        if step + 1 in SEEN:
            with torch.no_grad():
                x_test, labels_test = rows(2048, 0)
                loss = cross_entropy(model(x_test), labels_test) / size
            distributed.all_reduce(loss)
            found.append(round(float(loss), 4))
    return found


def all_losses() -> dict[str, list[float]]:
    return {name: losses(passes, make) for name, (passes, make, _) in WAYS.items()}


def step_times() -> dict[str, list[float]]:
    return {
        name: [step_time(passes, make, delay / 1000) for delay in DELAYS] for name, (passes, make, _) in WAYS.items()
    }


def run(rank: int, size: int, folder: str, measure: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = measure()
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


def on_processes(size: int, measure: Callable[[], Any]) -> Any:
    """Return what process 0 measures beside others."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        started = [context.Process(target=run, args=(rank, size, folder, measure)) for rank in range(size)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        return json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))


DELAYS = (0, 10, 30)
"""Milliseconds from sending a message to its arrival."""


class Sending:
    """A message under way."""

    def __init__(self, work: Any, arrival: float) -> None:
        self.work, self.arrival = work, arrival

    def wait(self, _future: Any = None) -> Any:
        found = self.work.wait()
        time.sleep(max(0.0, self.arrival - time.perf_counter()))
        return found


@contextmanager
def slow_network(seconds: float, *, hooked: bool) -> Iterator[None]:
    """Let messages of `all_reduce` take so long, and those of torch's reducer, if it may have a hook for that."""
    own, reducer = distributed.all_reduce, replica.DistributedDataParallel

    def all_reduce(tensor: Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        arrival = time.perf_counter() + seconds
        sending = Sending(own(tensor, *args, async_op=True, **options), arrival)
        return sending if async_op else sending.wait()

    def exchange(bucket: Any) -> Any:
        arrival = time.perf_counter() + seconds
        sent = own(bucket.buffer().div_(distributed.get_world_size()), async_op=True).get_future()

        def arrived(future: Any) -> Tensor:
            time.sleep(max(0.0, arrival - time.perf_counter()))
            return future.value()[0]

        return sent.then(arrived)

    def slow_reducer(*args: Any, **options: Any) -> Any:
        made = DistributedDataParallel(*args, **options)
        made.register_comm_hook(None, lambda _, bucket: exchange(bucket))  # torch refuses annotations that are text
        return made

    distributed.all_reduce = all_reduce
    if hooked:
        replica.DistributedDataParallel = slow_reducer
    try:
        yield
    finally:
        distributed.all_reduce, replica.DistributedDataParallel = own, reducer


class Computing(nn.Module):
    """What takes 20 ms."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


def step_time(passes: str, make: Make | None, seconds: float) -> float:
    """Return the milliseconds of a step on a slow network."""
    torch.manual_seed(0)
    x, labels = rows(32, 1 + distributed.get_rank())
    model = fxopt.optimize(nn.Sequential(Computing(), network()), passes, example_inputs=x, measure=False)
    optimizer, rounds = torch.optim.AdamW(model.parameters(), lr=2e-3), list[float]()
    after = None if make is None else make(model)
    with slow_network(seconds, hooked="delayed" not in passes):
        for _ in range(4):
            start = time.perf_counter()
            for _ in range(WARM_UP):
                optimizer.zero_grad()
                cross_entropy(model(x), labels).backward()
                optimizer.step()
                if after is not None:
                    after()
            rounds.append(1000 * (time.perf_counter() - start) / WARM_UP)
    return round(min(rounds[1:]), 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    given = parser.parse_args()
    found, times = on_processes(given.processes, all_losses), on_processes(2, step_times)
    parameters = sum(parameter.numel() for parameter in network().parameters())
    local = SEEN[-1] - WARM_UP
    ways: dict[str, Any] = {
        name: {"loss": found[name], "sent": parameters * (WARM_UP + (local // every if every else 0))}
        for name, (_, _, every) in WAYS.items()
    }
    for name, way in ways.items():
        way["milliseconds"] = times[name]
        curve = " | ".join(f"{loss:.3f}" for loss in way["loss"])
        print(f"| {name} | {curve} | {way['sent'] / 1e6:.2f} | {times[name]} |")
    if given.json:
        result: dict[str, Any] = {
            "schema_version": 1,
            "machine": described(),
            "processes": given.processes,
            "steps": SEEN,
            "delays": DELAYS,
        }
        result["ways"] = ways
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
