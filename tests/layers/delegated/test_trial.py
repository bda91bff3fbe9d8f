"""Conversions that end a process are noted, and tried in a process of their own from then on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import X, linears, same

import fxopt
from fxopt.decision_files import DecisionFiles
from fxopt.layers.delegated import engine_named, trial

PASSES = "delegate{engine=crashing}"
SOURCE = """
import os
from fxopt.layers.delegated import Engine

class Crashing(Engine):
    name, packages = "crashing", ("torch",)

    def compile(self, computation, example, dtype, threads):
        if os.environ.get("CRASHES") == str(os.getppid()):
            os.abort()
        return lambda inputs: [each.clone() for each in computation(*inputs)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install an engine of another distribution, and keep decisions in a folder of their own."""
    metadata = tmp_path / "crashing-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: crashing\nVersion: 1.0\n")
    metadata.joinpath("entry_points.txt").write_text("[fxopt.engines]\ncrashing = crashing_engine:Crashing\n")
    (tmp_path / "crashing_engine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path / "decisions"))
    table: Any = sys.modules[engine_named.__module__]
    table._all.cache_clear()
    yield tmp_path / "decisions"
    table._all.cache_clear()
    sys.modules.pop("crashing_engine", None)


def notes(folder: Path) -> list[Path]:
    return [*folder.glob("*.conversion")]


def test_a_note_is_there_while_an_engine_converts_and_goes_afterwards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, seen = type(engine_named("crashing")), list[int]()
    compile_ = kind.compile

    def watched(self: Any, *given: Any) -> Any:
        seen.append(len(notes(folder)))
        return compile_(self, *given)

    monkeypatch.setattr(kind, "compile", watched)
    same(fxopt.optimize(linears(), PASSES, example_inputs=X, measure=False), linears())
    assert seen[0] == 1
    assert not notes(folder)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fxopt.optimize(linears(), PASSES, example_inputs=X, verify=False)
    assert not notes(folder)


def left_by_a_crash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave the note that a process leaves which ends in the conversion of the model."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        fxopt.optimize(linears(), PASSES, example_inputs=X, measure=False)
    for each in folder.glob("*.json"):
        each.unlink()
    (note,) = notes(folder)
    return note


@pytest.mark.parametrize("crashes", [True, False])
def test_where_a_process_ended_another_one_tries_first(
    crashes: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = left_by_a_crash(folder, monkeypatch)
    model = linears()
    monkeypatch.setenv("CRASHES", str(os.getpid()) if crashes else "")
    fast = fxopt.optimize(model, PASSES, example_inputs=X, measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == ("refused" if crashes else "applied")
    assert note.exists() is crashes
    if crashes:
        assert decision.reason.endswith("its conversion has ended a process before, and one of its own now (SIGABRT)")
    same(fast, model)
    DecisionFiles(folder).clear()
    assert not [*folder.iterdir()]


def test_a_trial_that_does_not_come_to_convert_tells_nothing_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = left_by_a_crash(folder, monkeypatch)
    monkeypatch.setattr(trial, "_CODE", "import no_such_library")
    fast = fxopt.optimize(linears(), PASSES, example_inputs=X, measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "refused"
    assert "cannot be tried in one of its own: " in decision.reason
    assert "No module named 'no_such_library'" in decision.reason
    assert note.exists()


def test_without_a_folder_or_with_one_that_cannot_be_written_nothing_is_noted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("in the way")
    same(fxopt.optimize(linears(), PASSES, example_inputs=X, measure=False), linears())
    monkeypatch.setenv("FXOPT_CACHE", "0")
    with trial.noted("it", lambda: pytest.fail("nothing was noted")):
        assert not torch.is_inference_mode_enabled()
