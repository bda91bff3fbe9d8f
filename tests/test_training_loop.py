"""The training loop of the examples: one process, two under torchrun, and one of the two killed on the way."""

from __future__ import annotations

import os
import signal
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
    run = "torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=2"
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
