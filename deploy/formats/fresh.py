"""Run a file that was just written in a fresh process, which has neither fxopt nor the model's code."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArchiveError, one_line
from ...tracing.examples import Inputs
from ..comparison import SEED, leaves_of
from .kinds import Format
from .source import named_tensors

__all__ = ["results_in_fresh_process"]

_RUNNER = Path(__file__).with_name("runner.py")


def results_in_fresh_process(
    form: Format, file: Path, model: nn.Module, calls: Sequence[tuple[Inputs, Mapping[str, Any]]]
) -> list[Mapping[str, Any] | str]:
    """Return what a file gives on each call and what it leaves of the arguments, leaf by leaf, or what it raises there.

    With each call comes what the model gave: results in a row are called as those of the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        cases, results = Path(folder, "calls.pt"), Path(folder, "results.pt")
        torch.save([(named_tensors(model, call), call.args, call.kwargs, SEED) for call, _ in calls], cases)
        # -P: what lies beside the runner hides no packages
        arguments = [sys.executable, "-P", str(_RUNNER), form.name, str(file), str(cases), str(results)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=folder)  # noqa: S603
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
            raise ArchiveError(f"a fresh process cannot load it: {one_line(Exception(said[-1]))}")
        found: list[Any] = torch.load(results, weights_only=True)
    return [
        each if isinstance(each, str) else _leaves(form, given, *each)
        for each, (_, given) in zip(found, calls, strict=True)
    ]


def _leaves(form: Format, given: Mapping[str, Any], output: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    after = Inputs(*args, **kwargs)
    if not form.is_flat:
        return leaves_of(output, after)
    names = [name for name, leaf in given.items() if name.startswith("output") and isinstance(leaf, Tensor)]
    if len(names) != len(output):
        return leaves_of(tuple(output), after)
    found = {name: leaf.to(given[name].device) for name, leaf in zip(names, output, strict=True)}
    nothing = {name: None for name, leaf in given.items() if name.startswith("output") and leaf is None}
    arguments = {name: leaf for name, leaf in leaves_of(None, after).items() if name != "output"}
    return arguments | nothing | found
