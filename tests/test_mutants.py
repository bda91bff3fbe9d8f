"""Faults put into the passes: verification keeps nearly all of them from the user, and the judge of that can see."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.mutation.faults import faults_in, mutated
from support.mutation.judge import complaint
from support.mutation.zoo import Entry, zoo
from torch import nn

SOURCE = '''
def scaled(x, eps: float = 1e-5):
    """A docstring is no code."""
    if x is None and eps > 0:
        raise ValueError("3 is no tensor")
    return [y - eps * 2 for y in x if not y < 0]
'''


def test_faults_change_code_and_only_code() -> None:
    faults = faults_in("scaled.py", SOURCE)
    changed = {ast.unparse(mutated(SOURCE, fault)) for fault in faults}
    assert len(changed) == len(faults)
    assert ast.unparse(ast.parse(SOURCE)) not in changed
    assert all("A docstring is no code." in text for text in changed)
    assert all("3 is no tensor" in text for text in changed if "raise" in text)
    assert {"comparison", "operator", "guard dropped", "filter dropped", "setting"} <= {fault.kind for fault in faults}


def entry(name: str) -> Entry:
    return next(entry for entry in zoo() if entry.name.startswith(name) and entry.dtype is torch.float64)


def fast(entry: Entry) -> nn.Module:
    import fxopt

    return fxopt.optimize(entry.model(), entry.passes, example_inputs=(entry.inputs(1),), measure=False)


def test_the_judge_has_nothing_against_what_is_right() -> None:
    chosen = entry("batch norm")
    assert complaint(chosen, chosen.model(), fast(chosen)) == ""


def test_the_judge_sees_wrong_values_lost_gradients_and_stale_buffers() -> None:
    chosen = entry("batch norm")
    wrong, frozen, stale = (copy.deepcopy(fast(chosen)) for _ in range(3))
    with torch.no_grad():
        next(iter(wrong.parameters())).view(-1)[0] += 1e-6
    next(iter(frozen.parameters())).requires_grad_(False)
    next(iter(stale.buffers())).view(-1)[0] += 1e-6
    for model in (wrong, frozen, stale):
        assert complaint(chosen, chosen.model(), model)


@pytest.mark.slow
@pytest.mark.nightly
def test_nearly_all_mutants_are_caught(checkout: Path, tmp_path: Path) -> None:
    """Without verification several of these would reach the user."""
    script, result = checkout / "benchmarks" / "mutants.py", tmp_path / "mutants.json"
    options = ["--count", "3", "--models", "2", "--every", "6", "--json", str(result)]
    subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
    figures = json.loads(result.read_text())
    assert figures["effective"] >= 3
    assert figures["outcomes"]["undone"] >= 1
    assert len(figures["escaped"]) <= 1  # which mutants are tried depends on what is fast on this CPU
    assert not figures["hung or failed"]
