"""`fxopt search`: functions by name, limits, what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import HEADS, folder_of_modules

pytest.importorskip("optuna")

SOURCE = (
    HEADS
    + """
def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 4),)

def heads():
    return Heads().eval()

def worth(model):
    return float(model(*example_inputs()).abs().mean())

def never():
    raise RuntimeError("the factory ran")

NUMBER = 3
"""
)


@pytest.fixture(autouse=True)
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with folder_of_modules(tmp_path, monkeypatch, zoo=SOURCE) as folder:
        yield folder


def test_a_search_writes_the_front_and_a_page(fxopt: Callable[..., Any], zoo: Path):
    done = fxopt(
        "search", "zoo:heads", "--evaluate", "zoo:worth", "--constraint", "metric=-50%", "--trials", "2",
        "-o", "front", "--report", "points.html", "--json",
    )  # fmt: skip
    assert done.code == 0
    assert done.json["trials"][0]["pipeline"] == "inference{dtype=float32}"
    assert (zoo / "front" / "front.json").exists()
    page = (zoo / "points.html").read_text(encoding="utf-8")
    assert "<details>" in page
    leads = sorted(path.name for path in (zoo / "points-points").iterdir())
    assert leads
    assert all(f"points-points/{name}" in page for name in leads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--constraint", "metric"], "--constraint metric: write NAME=LIMIT"),
        (["--constraint", "speed=3"], "'speed' is no figure of inference"),
        (["--constraint", "latency=20 MB"], "constraints: latency='20 MB'"),
        (["--constraint", "metric=0.9"], "without evaluate the metric is the error of the results"),
        (["--minimize"], "minimize says that less of what evaluate returns is better"),
        (["--objective", "sped"], "objective='sped'"),
        (["--time-budget", "soon"], "time_budget='soon'"),
        (["--storage", "zoo.py"], "--storage='zoo.py': zoo.py is a file; name a folder"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_built(fxopt: Callable[..., Any], arguments: list[str], message: str):
    done = fxopt("search", "zoo:never", *arguments)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--constraint", "metric"], 2, "--constraint metric: write NAME=LIMIT"),
        (["--constraint", "speed=3"], 2, "'speed' is no figure of inference"),
        (["--evaluate", "zoo:wroth"], 2, "zoo has no 'wroth'; did you mean 'worth'?"),
        (["--evaluate", "zoo:NUMBER"], 2, "'zoo:NUMBER' is of type int, not a function"),
        (["--objective", "sped"], 2, "objective='sped'"),
        (["--time-budget", "soon"], 2, "time_budget='soon'"),
        (["--report", "none/points.html"], 3, "there is no folder none"),
        (["-o", "zoo.py"], 2, "--output='zoo.py': zoo.py is a file; name a folder"),
        (["--storage", "zoo.py"], 2, "storage='zoo.py': zoo.py is a file; name a folder"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(fxopt: Callable[..., Any], arguments: list[str], code: int, message: str):
    done = fxopt("search", "zoo:heads", *arguments)
    assert done.code == code
    assert message in done.err
