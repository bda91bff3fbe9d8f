"""Write what it takes to see a pass fail again in a fresh process: model, inputs, passes and a script."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import FxoptError
from ..passes.contract import Pass
from ..settings import Settings
from ..storage import write_atomically
from .script import script_text

__all__ = ["write"]

_MADE = "A pass raised. The file beside this one is a pickle of the user's own model: run this only where you trust it."
_IMPORTS = """\
import runpy
import sys

sys.path[:0] = {path!r}
MAIN = {main!r}
if MAIN:
    vars(sys.modules["__main__"]).update(
        {{k: v for k, v in runpy.run_path(MAIN, run_name="reproduced_main").items() if not k.startswith("__")}}
    )

from pathlib import Path

import torch"""
_DEFINITIONS = (
    'CASE = torch.load(Path(__file__).with_name("case.pt"), weights_only=False)\nPASSES = CASE["passes"]',
    'def build():\n    return CASE["model"]',
    'def example_inputs():\n    return CASE["example_inputs"]',
)


def write(
    model: nn.Module,
    passes: Sequence[Pass],
    error: FxoptError,
    example_inputs: object,
    phase: Any,
    seed: int,
    settings: Settings,
) -> str | None:
    """Write a reproducer and return its script's path; None, with a note on the error, if the case cannot be saved."""
    folder = _new_folder(settings.reproducer_dir)
    case = {"model": model, "passes": list(passes), "example_inputs": example_inputs, "phase": phase}
    imports = _IMPORTS.format(path=[p for p in sys.path if p], main=_main_file())
    options = {"phase": 'CASE["phase"]', "seed": str(seed)}
    script = script_text(str(error), _MADE, [imports], _DEFINITIONS, options)
    try:
        folder.mkdir(parents=True)
        torch.save(case, folder / "case.pt")
        write_atomically(folder / "reproduce.py", script.encode())
    except Exception as failure:  # whatever the user's own pickling raises must not hide the pass's failure
        error.add_note(f"no reproducer could be written: {type(failure).__name__}: {failure}")
        return None
    error.add_note(f"reproduce with: python {folder / 'reproduce.py'}")
    return str(folder / "reproduce.py")


def _new_folder(parent: Path) -> Path:
    stem = time.strftime("reproducer-%Y%m%d-%H%M%S")
    candidates = (parent / (stem if number == 0 else f"{stem}-{number}") for number in range(10_000))
    return next(folder for folder in candidates if not folder.exists())


def _main_file() -> str | None:
    """Return the script that is running, whose classes pickle as `__main__`'s; None where there is no file."""
    main: ModuleType | None = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return None if spec is not None else getattr(main, "__file__", None)
