"""The examples run, and what they train gets better."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(autouse=True)
def without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite wherever it is right, on a busy machine, too."""
    monkeypatch.setenv("FXOPT_MEASURE", "0")


def main_of(name: str) -> Callable[..., tuple[float, float]]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_every_example_is_tested():
    """`train` has a file of its own: test_training_loop.py."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"redq", "maml", "lora", "train"}


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
