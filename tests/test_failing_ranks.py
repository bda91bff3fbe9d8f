"""A rank that raises, is killed or hangs: the other one names it in its last line, in the training of the examples."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import PRELOADED
from torch import Tensor, distributed, nn
from torch.utils.data import TensorDataset

import fxopt

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train.py"
TIMEOUT = 10
Case = tuple[str, str, int]
"""The moment, what happens, and to which rank."""

HAPPENINGS = ("raises", "killed", "hangs")
MOMENTS = (
    "restart", "capture", "agreement", "timing", "finalize", "first step", "later step", "saving", "loading", "exit",
)  # fmt: skip
SOME: list[Case] = [
    ("capture", "raises", 1), ("timing", "killed", 0), ("first step", "raises", 1), ("later step", "killed", 1),
    ("saving", "hangs", 0),
]  # fmt: skip
REST = [
    case
    for moment in MOMENTS
    for happens in HAPPENINGS
    for rank in (0, 1)
    if (case := (moment, happens, rank)) not in SOME and (moment, rank) != ("timing", 1)  # rank 0 times
]


class Ensemble(nn.Module):
    """Something to fuse, so that there is something to time."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


def made() -> Any:
    labels = torch.arange(32) % 4
    return Ensemble(), TensorDataset(torch.eye(8)[labels], labels)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PATIENCE = timedelta(seconds=TIMEOUT)
    return module


def happens_at(owner: Any, name: str, happens: str, call: int) -> None:
    """Let something happen instead of one of the calls of a function."""
    original: Callable[..., Any] = getattr(owner, name)
    calls: list[None] = []

    def instead(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == call and happens == "raises":
            raise ValueError("out of luck")
        if len(calls) == call and happens == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == call:
            time.sleep(600)
        return original(*args, **kwargs)

    setattr(owner, name, instead)


def place(train: ModuleType, moment: str, rank: int) -> tuple[Any, str, int]:
    """Return the function that a moment is in, and in which of its calls."""
    from fxopt.passes import timing
    from fxopt.passes.pipeline import Ranks

    return {
        "restart": (train, "join", 1),
        "capture": (fxopt.Program, "__init__", 1),
        "agreement": (Ranks, "exchange", 2),
        "timing": (timing, "time_candidates", 1),
        "finalize": (fxopt.Ddp, "finalize", 1),
        "first step": (Tensor, "backward", 1),
        "later step": (train.Training, "loss", 3),
        "saving": (torch, "save", 1) if rank == 0 else (train.Training, "save", 1),
        "loading": (train.Training, "resume", 1),
        "exit": (distributed, "destroy_process_group", 1),
    }[moment]


def train_in_a_process(case: Case, rank: int, port: int, folder: Path) -> None:
    """Train as under torchrun, which holds the store; what is said goes into a file."""
    said = os.open(folder / f"said{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", FXOPT_MEASURE="1" if case[0] == "timing" else "0")
    torch.set_num_threads(1)
    train = example()
    moment, happens, failing = case
    if rank == failing:
        owner, name, call = place(train, moment, rank)
        happens_at(owner, name, happens, call)
    try:
        train.main("fuse_ensembles,ddp", 1, folder / "checkpoint.pt", made)
    except BaseException:
        traceback.print_exc()
        raise


def what_is_said(case: Case, folder: Path, written: Path) -> tuple[int | None, str]:
    """Return how the other rank ends, and its last line."""
    folder.mkdir()
    if case[0] == "loading":
        shutil.copy(written, folder / "checkpoint.pt")
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes: list[ForkServerProcess] = [
        context.Process(target=train_in_a_process, args=(case, rank, store.port, folder)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    other = 1 - case[2]
    processes[other].join(120)
    code = processes[other].exitcode
    for process in processes:
        process.kill()
        process.join()
    return code, (folder / f"said{other}").read_text().strip().rpartition("\n")[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint after the first of the steps of two ranks."""
    path = tmp_path_factory.mktemp("written") / "checkpoint.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXOPT_MEASURE", "0")
        example().main("fuse_ensembles", 1, path, made)
    state = torch.load(path)
    torch.save({**state, "place": (0, 2, torch.zeros(2, 2))}, path)
    return path


def assert_named(cases: list[Case], folder: Path, written: Path) -> None:
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda case: what_is_said(case, folder / "-".join(map(str, case)), written), cases))
    for case, (code, line) in zip(cases, found, strict=True):
        moment, happens, rank = case
        if moment == "exit":
            assert code == 0, (case, line)
            continue
        assert code == 1, (case, line)
        assert f"rank {rank} did not" in line or f"rank {rank} failed" in line, (case, line)
        if happens == "raises" and moment not in ("restart", "agreement"):  # a rank cannot say there that it failed
            assert "ValueError: out of luck" in line, (case, line)


@pytest.mark.slow
def test_the_other_rank_says_which_it_was(tmp_path: Path, checkpoint: Path) -> None:
    assert_named(SOME, tmp_path, checkpoint)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_at_every_moment(tmp_path: Path, checkpoint: Path) -> None:
    assert_named(REST, tmp_path, checkpoint)
