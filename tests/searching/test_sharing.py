"""A folder of trials: several processes search in it, and a search that Ctrl-C has ended goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.passes.sites import Goal, Phase
from fxopt.searching.points import Aim
from fxopt.searching.space import Space
from fxopt.searching.trials import Trials

pytest.importorskip("optuna")

CHILD = """
import json, sys, time
import torch
from torch import nn
import fxopt

folder, trials, waits_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
model, calls = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4)).eval(), []

def worth(fast):
    calls.append(fast)
    print("evaluating", flush=True)
    if len(calls) == waits_at:
        time.sleep(60)
    return 1.0

x = torch.linspace(-1, 1, 2048).view(32, 64)
front = fxopt.search(model, example_inputs=x, evaluate=worth, trials=trials, time_budget=60, storage=folder)
print(json.dumps({"trials": [point.pipeline for point in front.trials], "notes": front.notes, "front": len(front)}))
"""


@pytest.fixture(autouse=True)
def _rules_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_MEASURE", "0")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Hold children, and end those that still run."""
    children: list[subprocess.Popen[str]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()
        for stream in filter(None, (child.stdout, child.stderr)):
            stream.close()


def child(folder: Path, *, trials: int, waits_at: int = 0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CHILD, str(folder), str(trials), str(waits_at)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def worth(_: nn.Module) -> float:
    return 1.0


def searched(folder: Path, *, trials: int) -> fxopt.Front:
    """Search here, the same model for the same aim."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4)).eval()
    x = torch.linspace(-1, 1, 2048).view(32, 64)
    return fxopt.search(model, example_inputs=x, evaluate=worth, trials=trials, time_budget=60, storage=folder)


def said(process: subprocess.Popen[str]) -> dict[str, list[str]]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_processes_share_trials(tmp_path: Path, started: list[subprocess.Popen[str]]):
    started += [child(tmp_path, trials=2) for _ in range(2)]
    both = [said(process) for process in started]
    front = searched(tmp_path, trials=1)
    tried = [point.pipeline for point in front.trials]
    assert len(tried) == len(set(tried))
    assert len(tried) >= 5
    assert all(set(each["trials"]) <= set(tried) for each in both)
    assert tried[0] == "inference{dtype=float32}"


def test_a_search_that_was_interrupted_goes_on(tmp_path: Path, started: list[subprocess.Popen[str]]):
    process = child(tmp_path, trials=9, waits_at=3)  # the first is of the model as it is given
    started.append(process)
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "evaluating\n"
    process.send_signal(signal.SIGINT)
    before = said(process)
    assert before["trials"][:1] == ["inference{dtype=float32}"]
    assert before["notes"][-1] == "the search was stopped after 1 trial"
    assert before["front"]
    tried = [point.pipeline for point in searched(tmp_path, trials=1).trials]
    assert len(tried) == len(set(tried)) > len(before["trials"])
    assert tried[: len(before["trials"])] == before["trials"]


def trials(folder: Path, seed: int = 0) -> Trials:
    aim = Aim("latency", (), {"latency": 1.0}, has_metric=False, minimize=False)
    return Trials(Space(Phase.EVAL, {Goal.SPEED}), aim, of="a model", folder=folder, seed=seed)


def test_what_was_interrupted_is_planned_again(tmp_path: Path):
    first = trials(tmp_path)
    singles = Space(Phase.EVAL, {Goal.SPEED}).singles()
    first.plan(singles)
    trial, choice = next_of(first)
    assert choice == singles[0]
    first.forget(trial)
    again = trials(tmp_path)
    again.plan(singles)
    found = [next_of(again)[1] for _ in singles]
    assert found == [*singles[1:], singles[0]]


def test_what_another_process_tries_now_is_not_tried_as_well(tmp_path: Path):
    one, other = trials(tmp_path), trials(tmp_path, seed=1)
    singles = Space(Phase.EVAL, {Goal.SPEED}).singles()[:3]
    one.plan(singles)
    assert next_of(one)[1] == singles[0]
    other.plan(singles)
    found = [next_of(other)[1] for _ in range(3)]
    assert found[:2] == singles[1:]
    assert found[2] not in singles


def test_a_search_ends_where_another_process_tries_the_last_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fxopt.searching.space.pass_names", dict)
    one, other = trials(tmp_path), trials(tmp_path, seed=1)
    _, taken = next_of(one)
    left = [choice for choice in Space(Phase.EVAL, {Goal.SPEED}).all() if choice != taken]
    assert sorted(next_of(other)[1]["preset"] for _ in left) == sorted(choice["preset"] for choice in left)
    assert other.next() is None


def next_of(given: Trials) -> tuple[Any, Mapping[str, str]]:
    found = given.next()
    assert found is not None
    return found
