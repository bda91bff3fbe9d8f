"""The training loop of the examples: one process, two by each launcher, and one of the two killed on the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train.py"
EPOCHS = 2
LIMIT = 420.0
"""Seconds until processes that wait for each other are ended: 20 are usual, and a rank is given up after 120."""


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint)["model"]


def losses(output: str) -> list[str]:
    return [line.strip() for line in output.splitlines() if line.startswith("epoch")]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def outputs(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what is printed; where the end does not come, each process first shows what it was doing."""
    try:
        return process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        for pid in [*children(process.pid), process.pid]:
            os.kill(pid, signal.SIGABRT)
        return process.communicate()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Train the plain model in one process."""
    path = tmp_path_factory.mktemp("plain") / "resnet.pt"
    command = [sys.executable, str(EXAMPLE), "--passes=", f"--epochs={EPOCHS}", f"--checkpoint={path}"]
    return losses(subprocess.run(command, check=True, capture_output=True, text=True).stdout), path


def assert_alike(checkpoint: Path, expected: Path) -> None:
    found, wanted = weights(checkpoint), weights(expected)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes under /proc")
def test_two_processes_of_which_one_is_killed(plain: tuple[list[str], Path], tmp_path: Path) -> None:
    """Both start again from the last checkpoint, and end where one process with the plain model does."""
    path = tmp_path / "resnet.pt"
    run = "torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1"
    command = [sys.executable, "-m", *run.split(), str(EXAMPLE), f"--epochs={EPOCHS}", f"--checkpoint={path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)
    first = torch.load(path)["place"][:2]
    os.kill(children(process.pid)[1], signal.SIGKILL)
    output, errors = outputs(process)
    assert process.returncode == 0, errors
    assert first < (EPOCHS - 1, 0), "killed early"
    assert losses(output)[-1] == plain[0][-1]
    assert_alike(path, plain[1])


def test_one_process_goes_on_where_two_ended(plain: tuple[list[str], Path], tmp_path: Path) -> None:
    """A checkpoint of the plain model resumes the optimized one: in the last epoch nothing is left to do."""
    path = tmp_path / "resnet.pt"
    path.write_bytes(plain[1].read_bytes())
    command = [sys.executable, str(EXAMPLE), f"--epochs={EPOCHS}", f"--checkpoint={path}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert losses(output) == plain[0][-1:]


MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def made():
    labels = torch.arange(64) % 4
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), TensorDataset(torch.eye(8)[labels], labels)
"""


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """Return the arguments to train a model of one's own, in a folder that is on the path."""
    (tmp_path / "mine.py").write_text(MINE)
    return [str(EXAMPLE), "--model=mine:made", "--passes=ddp", "--epochs=1", f"--checkpoint={tmp_path / 'mine.pt'}"]


def environment(folder: Path, **given: str) -> dict[str, str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **given}


@pytest.mark.slow
def test_under_the_launcher_that_passes_the_local_rank(mine: list[str], tmp_path: Path) -> None:
    launch = "-W ignore -m torch.distributed.launch --standalone --nproc-per-node=2"
    command = [sys.executable, *launch.split(), *mine]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 1
    assert list(weights(tmp_path / "mine.pt")) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.slow
def test_in_a_step_of_slurm(mine: list[str], tmp_path: Path) -> None:
    """Each process finds its number in the variables that srun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranked = [environment(tmp_path, **shared, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"]
    pipe = subprocess.PIPE
    tasks = [
        subprocess.Popen([sys.executable, *mine], stdout=pipe, stderr=pipe, text=True, env=variables)
        for variables in ranked
    ]
    said = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert [len(losses(output)) for output, _ in said] == [1, 0]


def test_the_help_names_launchers_and_a_model_of_ones_own() -> None:
    said = subprocess.run([sys.executable, str(EXAMPLE), "--help"], capture_output=True, text=True, check=True).stdout
    assert "--model PACKAGE:FACTORY" in said and "srun" in said and "torchrun" in said
