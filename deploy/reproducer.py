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

__all__ = ["write"]

_SCRIPT = '''\
"""Replay: {summary}

Run `python reproduce.py`: it exits with status 4 while the pass fails, and 0 once it does not.
The .pt files beside it are pickles of the user's own model: run it only where you trust them.
"""

import runpy
import sys
from pathlib import Path

sys.path[:0] = {path!r}
HERE = Path(__file__).parent
MAIN = {main!r}
if MAIN:
    vars(sys.modules["__main__"]).update(
        {{k: v for k, v in runpy.run_path(MAIN, run_name="reproduced_main").items() if not k.startswith("__")}}
    )

import torch
import fxopt

case = torch.load(HERE / "case.pt", weights_only=False)
model, passes = case.pop("model"), case.pop("passes")
try:
    fxopt.optimize(model, passes, **case, seed={seed})
except fxopt.PassError as error:
    print(error)
    sys.exit(4)
print("no failure")
'''


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
    summary = " ".join(str(error).split()).replace("\\", "/").replace('"""', "'''")
    script = _SCRIPT.format(summary=summary, path=[p for p in sys.path if p], main=_main_file(), seed=seed)
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
