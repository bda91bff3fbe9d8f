"""What the command line prints where, what it draws from a seed, and what it does where nothing can be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import HEADS, folder_of_modules

SOURCE = (
    HEADS
    + """
def example_inputs():
    return torch.ones(3, 4)

def heads():
    print("drawing weights")
    return Heads().eval()
"""
)
FUSED = ("-p", "eliminate_dead_code,fuse_ensembles", "--no-measure")

Fxopt = Callable[..., Any]


@pytest.fixture(autouse=True)
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with folder_of_modules(tmp_path, monkeypatch, zoo=SOURCE) as folder:
        yield folder


def test_json_is_one_object_whatever_others_print(fxopt: Fxopt):
    done = fxopt("inspect", "zoo:heads", "--json")
    assert (done.code, done.json["schema_version"], done.err) == (0, 1, "drawing weights\n")
    assert fxopt("inspect", "zoo:heads").out.startswith("drawing weights\n")


def test_steps_are_timed(fxopt: Fxopt, zoo: Path):
    done = fxopt("optimize", "zoo:heads", *FUSED, "-o", "out.fxopt", "--timing", "--json")
    steps = ["importing torch", "making the model", "optimizing", "saving", "reporting"]
    assert list(done.json["timing"]) == steps
    assert [line.rsplit(maxsplit=2)[0] for line in done.err.splitlines()[1:]] == steps
    told = fxopt("verify", "zoo:heads", "zoo:heads", "--timing")
    assert "comparing" in told.err and "comparing" not in told.out


def test_graphs_are_printed_after_a_pass(fxopt: Fxopt):
    done = fxopt("optimize", "zoo:heads", *FUSED, "--print-after", "fuse_ensembles", "--json")
    assert done.code == 0 and "fxopt: after fuse_ensembles:\n(root): graph():" in done.err
    assert "after eliminate_dead_code" not in done.err
    every = fxopt("optimize", "zoo:heads", *FUSED, "--print-after", "all")
    assert "fxopt: eliminate_dead_code changed no graph\nfxopt: after fuse_ensembles:\n(root): graph():" in every.err
    wrong = fxopt("optimize", "zoo:heads", "--print-after", "fuse_ensemble")
    assert (wrong.code, "did you mean 'fuse_ensembles'?" in wrong.err) == (2, True)


def test_a_seed_draws_the_same_weights_each_time(fxopt: Fxopt):
    assert fxopt("verify", "zoo:heads", "zoo:heads").code == 0
    fxopt("optimize", "zoo:heads", *FUSED, "-o", "out.fxopt", "--seed", "3")
    saved = ("verify", "zoo:heads", "out.fxopt", "--trust", "zoo")
    assert (fxopt(*saved, "--seed", "3").code, fxopt(*saved).code) == (0, 1)


def test_a_full_disk_leaves_what_was_there(fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    fxopt("optimize", "zoo:heads", *FUSED, "-o", "out.fxopt")
    before = (zoo / "out.fxopt").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    done = fxopt("optimize", "zoo:heads", *FUSED, "-o", "out.fxopt")
    assert (done.code, done.err.count("\n"), "No space left on device" in done.err) == (3, 1, True)
    assert "out.fxopt" in done.err
    assert {path.name: path.read_bytes() for path in zoo.glob("*out.fxopt*")} == {"out.fxopt": before}


def test_a_full_disk_behind_standard_output_is_an_error():
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fxopt", "passes"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)


def test_a_folder_that_is_read_only_is_found_before_the_work(fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    for arguments in (("optimize", "zou:heads", "-o", "out.fxopt"), ("inspect", "zou:heads", "--html", "page.html")):
        done = fxopt(*arguments)
        assert (done.code, "nothing can be written into" in done.err, "zou" in done.err) == (3, True, False)


def test_markup_in_names_is_shown_as_it_is(fxopt: Fxopt, zoo: Path):
    (zoo / "[red]zoo.py").write_text("from zoo import example_inputs\nfrom zoo import heads\n")
    done = fxopt("inspect", "[red]zoo.py:heads")
    assert "[red]zoo" in done.err + done.out
