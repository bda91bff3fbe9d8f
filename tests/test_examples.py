"""The examples run, and what they train gets better."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(autouse=True)
def without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite wherever it is right, on a busy machine, too."""
    monkeypatch.setenv("FXOPT_MEASURE", "0")


def main_of(name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_every_example_is_tested():
    """`train` has a file of its own: test_training_loop.py; the notebook is in test_notebook.py."""
    tested = {name.removeprefix("test_") for name in globals()} | {"train"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


def test_redq(capsys: pytest.CaptureFixture[str]):
    before, after = main_of("redq")()
    assert after > before
    assert "1 rewrite applied" in capsys.readouterr().out


def test_maml(capsys: pytest.CaptureFixture[str]):
    before, after = main_of("maml")()
    assert after < before
    assert "1 rewrite applied" in capsys.readouterr().out


def test_lora(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    before, after = main_of("lora")(steps=30)
    assert after < before
    assert "2 rewrites applied" in capsys.readouterr().out


def test_serving(capsys: pytest.CaptureFixture[str]):
    assert main_of("serving")() == 16
    assert "16 of 16 answers" in capsys.readouterr().out


def test_mixture(capsys: pytest.CaptureFixture[str]):
    before, after = main_of("mixture")(steps=30)
    assert after < before
    assert "1 rewrite applied" in capsys.readouterr().out


def test_graphs(capsys: pytest.CaptureFixture[str]):
    before, after = main_of("graphs")(steps=20)
    assert after > before
    assert "2 rewrites applied" in capsys.readouterr().out


def test_quantized(capsys: pytest.CaptureFixture[str]):
    module = main_of("quantized")
    before, after = module()
    assert before > 0.9
    assert after >= before - module.__globals__["DROP"]
    assert "quantize: the metric" in capsys.readouterr().out


def test_exports():
    assert max(main_of("exports")()) < 1e-5


def test_own_pass(capsys: pytest.CaptureFixture[str]):
    assert main_of("own_pass")() == ["applied", "undone"]
    assert "output differs: " in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("git") is None or not (EXAMPLES.parent / ".git").exists(), reason="no git checkout")
def test_newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From `git clone` to the page of a model of transformers, with the packages that are here."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = ["bash", str(EXAMPLES / "newcomer.sh"), f"file://{EXAMPLES.parent}", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.splitlines()[-1].removeprefix("now open "))
    assert page.parent.parent == tmp_path
    assert "BertModel" in page.read_text(encoding="utf-8")
    assert "rewrites applied for inference" in done.stdout
