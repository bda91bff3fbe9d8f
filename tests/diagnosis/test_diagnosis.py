"""`bench`, `bisect`, `reduce` and `repro`, from the command line and from Python; and `plan show`."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import HEADS, folder_of_modules
from torch import nn

import fxopt as fxopt_package
from fxopt import diagnosis

SOURCE = (
    HEADS
    + """
class Large(nn.Module):
    def forward(self, x):
        return x.repeat(1, 1 << 20).sin().sum(1, keepdim=True)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        hidden = nn.functional.dropout(torch.relu(self.inner(x)), 0.1, self.training)
        return x + self.outer(hidden) * scale

class Halving(nn.Module):
    def forward(self, x):
        while x.abs().max() > 1e-4:
            x = x / 2
        return torch.tanh(x)

class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Halving()

    def forward(self, x):
        return torch.relu(torch.tanh(self.inner(torch.relu(x))))

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return {"logits": torch.tanh(self.head(x)), "features": x}

def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(4, 4),)

def heads():
    return Heads().eval()

def large():
    return Large().eval()

def marked():
    model = deep()
    with torch.no_grad():
        model.head.weight[1, 2] = 2000
    return model

def opaque():
    return Opaque().eval()

def deep():
    return Deep().eval()
"""
)
BROKEN = """
from dataclasses import dataclass
from fxopt import Goal, Numerics, Pass, Phase, anything, operation

@dataclass(frozen=True)
class BreakTanh(Pass):
    numerics, goal, phase = Numerics.EXACT, Goal.SIZE, Phase.BOTH

    def find(self, program):
        for match in program.matches(operation("tanh", anything(name="x"), name="tanh")):
            yield match.site()

    def rewrite(self, site, edit):
        raise ZeroDivisionError("on purpose")

class BreakLarge(BreakTanh):
    def find(self, program):
        return super().find(program) if any((p > 1000).any() for p in program.model.parameters()) else ()

class BreakMixed(BreakTanh):
    def find(self, program):
        return super().find(program) if program.opaque else ()
"""
FUSED = ("-p", "fuse_ensembles", "--no-measure")

Fxopt = Callable[..., Any]


@pytest.fixture(autouse=True)
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delitem(sys.modules, "acme", raising=False)
    monkeypatch.setattr("fxopt.diagnosis.speeds._SECONDS", 0.05)
    monkeypatch.setattr("fxopt.diagnosis.speeds._ROUNDS", 9)
    with folder_of_modules(tmp_path, monkeypatch, zoo=SOURCE, bare="from zoo import heads") as folder:
        yield folder


# -- bench -------------------------------------------------------------------------------------------------------------


def test_one_model_is_timed_before_and_after(fxopt: Fxopt):
    done = fxopt("bench", "zoo:heads", "-p", "fuse_ensembles{lowering=bmm}", "--threads", "1", "--batch", "9", "--json")
    assert (done.code, done.err) == (0, "")
    found = done.json
    assert found["speedup_low"] <= found["speedup"] <= found["speedup_high"]
    assert (found["phase"], found["threads"], found["cold"], found["calls"]) == ("eval", 1, False, 1)
    assert [found[side]["model"] for side in ("before", "after")] == ["zoo:heads", "zoo:heads, optimized"]
    numbers = sum(
        each.numel() for each in torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)).parameters()
    )
    assert found["before"]["held_bytes"] == 6 * 4 * numbers


def test_two_models_are_timed_and_what_they_take_is_told(fxopt: Fxopt):
    done = fxopt("bench", "zoo:heads", "zoo:large", "--json", "--cold", "--phase", "train")
    assert (done.code, done.json["phase"], done.json["cold"]) == (0, "train", True)
    assert done.json["after"]["held_bytes"] == 0
    if sys.platform == "linux":
        assert done.json["after"]["peak_bytes"] >= 60 * 2**20 > done.json["before"]["peak_bytes"]
    fxopt("optimize", "zoo:heads", *FUSED, "-o", "heads.fxopt")
    shown = fxopt("bench", "heads.fxopt", "--trust", "zoo")
    assert (shown.code, "95% interval" in shown.out, "heads.fxopt, as it was" in shown.out) == (0, True, True)


def test_what_cannot_be_timed_is_wrong_usage(fxopt: Fxopt):
    assert "-p says what is made of one model" in fxopt("bench", "zoo:heads", "zoo:large", "-p", "pack").err
    assert "there are no example inputs" in fxopt("bench", "bare:heads").err
    assert fxopt("bench", "zoo:heads", "--threads", "0").code == 2


# -- bisect, plan show -------------------------------------------------------------------------------------------------

CHECK = """
import json, os, sys, zipfile
plan = json.loads(zipfile.ZipFile(os.environ["FXOPT_MODEL"]).read("plan.json"))
applied = [each for each in plan["decisions"] if each["status"] == "applied"]
print("looked at", len(applied))
sys.exit(any(each["pass_name"] == "prune" and "blocks.1" in each["key"] for each in applied))
"""
PRUNED = ("-p", "prune{amount=0.5}")


def test_the_rewrite_at_fault_is_found_by_a_command(fxopt: Fxopt, zoo: Path):
    (zoo / "check.py").write_text(CHECK)
    command = f"{sys.executable} check.py"
    done = fxopt("bisect", "zoo:deep", *PRUNED, "--check", command, "--json")
    assert done.code == 0, done.err
    assert (done.json["at_fault"]["pass"], "blocks.1" in done.json["at_fault"]["site"]) == ("prune", True)
    assert 1 < done.json["number"] < done.json["count"] and done.json["alone"]
    fxopt("optimize", "zoo:deep", *PRUNED, "-o", "deep.fxopt", "--save-plan", "plan.json")
    for given in (("deep.fxopt", "--trust", "zoo"), ("zoo:deep", "--plan", "plan.json")):
        again = fxopt("bisect", *given, "--check", command)
        assert again.out.startswith("at fault: prune at ") and "with it alone, too" in again.out
    ends = fxopt("bisect", "deep.fxopt", "--trust", "zoo", "--check", "exit 125")
    assert (ends.code, "which ends a bisection" in ends.err) == (3, True)
    fails = fxopt("bisect", "deep.fxopt", "--trust", "zoo", "--check", "false")
    assert (fails.code, "without any rewrite, too" in fails.err) == (3, True)
    passes = fxopt("bisect", "deep.fxopt", "--trust", "zoo", "--check", "true")
    assert (passes.code, "there is nothing to look for" in passes.err) == (3, True)


def test_a_plan_is_shown_and_nothing_of_it_is_run(fxopt: Fxopt, zoo: Path):
    fxopt("optimize", "zoo:heads", *FUSED, "-o", "heads.fxopt", "--save-plan", "plan.json")
    (zoo / "zoo.py").write_text("raise SystemExit('it is run')")
    shown = fxopt("plan", "show", "plan.json")
    assert shown.code == 0 and shown.out == fxopt("plan", "show", "heads.fxopt").out
    assert shown.out.startswith("plan for inference\n") and "| fuse_ensembles" in shown.out
    assert fxopt("plan", "show", "plan.json", "--json").json["pipeline"] == ["fuse_ensembles"]
    assert fxopt("plan", "show", "zoo.py").code == fxopt("plan", "show", "none.json").code == 3


def run_here(script: Path) -> str:
    """Run a script in this process, which has imported torch: what it raises, as a new process would say."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    return ""


# -- reduce, repro -----------------------------------------------------------------------------------------------------


def test_a_wrong_result_is_reduced_to_few_operations(fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxopt.diagnosis.scripts.failure_of", run_here)
    done = fxopt("reduce", "zoo:deep", *PRUNED, "-o", "small.py", "--json")
    assert done.code == 0, done.err
    assert (done.json["failure"], done.json["operations"]) == ("NotEquivalentError", 1)
    assert "left\nTraceback" not in done.err
    (zoo / "zoo.py").write_text("raise SystemExit('the script needs the model')")
    again = fxopt("repro", "small.py")
    assert (again.code, "it still fails: fxopt.testing.NotEquivalentError" in again.out) == (1, True)
    text = (zoo / "small.py").read_text()
    (zoo / "small.py").write_text(text.replace("PASSES = 'prune{amount=0.5}'", "PASSES = 'eliminate_dead_code'"))
    mended = fxopt("repro", "small.py", "--json")
    assert (mended.code, mended.json["fails"]) == (0, False)
    other = fxopt("repro", "zoo.py")
    assert (other.code, "zoo.py calls nothing of fxopt" in other.err) == (3, True), "it would not fail either"


def test_a_pass_that_raises_is_reduced(fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    installed = zoo / "acme-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[fxopt.passes]\nbreak_tanh = acme:BreakTanh\nbreak_mixed = acme:BreakMixed\nbreak_large = acme:BreakLarge\n"
    )
    (zoo / "acme.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(zoo))
    monkeypatch.setattr("fxopt.diagnosis.scripts.failure_of", run_here)
    monkeypatch.setenv("FXOPT_REPRODUCER_DIR", str(zoo / "reproducers"))
    done = fxopt("reduce", "zoo:deep", "-p", "break_tanh", "-o", "small.py", "--json")
    assert done.code == 0, done.err
    assert (done.json["failure"], done.json["operations"]) == ("PassError of pass 'break_tanh'", 1)
    assert not (zoo / "reproducers").exists(), "what is tried out leaves nothing"
    assert "torch.tanh(" in (zoo / "small.py").read_text()
    marked = fxopt("reduce", "zoo:marked", "-p", "break_large", "-o", "large.py", "--json")
    assert (marked.code, marked.json["operations"], marked.json["numbers"]) == (0, 2, "large.pt"), marked.err
    (zoo / "large.pt").rename(zoo / "small.pt")
    refused = fxopt("reduce", "zoo:marked", "-p", "break_large", "-o", "small.py")
    assert "-o small.pt is there and is no file of numbers of a script" in refused.err
    taken = fxopt("reduce", "zoo:opaque", "-p", "break_mixed", "-o", "taken.py", "--json")
    assert (taken.code, taken.json["operations"], taken.json["part"]) == (0, None, "(root)"), taken.err
    assert "build_model('zoo:opaque')" in (zoo / "taken.py").read_text()


def test_a_model_that_does_not_fail_is_not_reduced(fxopt: Fxopt, zoo: Path):
    done = fxopt("reduce", "zoo:heads", "-p", "fuse_ensembles", "-o", "small.py")
    assert (done.code, "the passes do not fail on this model" in done.err) == (3, True)
    assert not (zoo / "small.py").exists()
    (zoo / "mine.py").write_text("mine = 1")
    assert "is there and is no script" in fxopt("reduce", "zoo:heads", "-p", "pack", "-o", "mine.py").err


def test_a_script_that_does_not_end_is_stopped(fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxopt.diagnosis.scripts._SECONDS", 0.5)
    (zoo / "endless.py").write_text("# fxopt\nwhile True:\n    pass")
    done = fxopt("repro", "endless.py")
    assert (done.code, "endless.py was stopped after 0.5 s" in done.err) == (3, True)


# -- from Python -------------------------------------------------------------------------------------------------------


def test_python_finds_and_reduces_the_same(zoo: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxopt.diagnosis.scripts.failure_of", run_here)
    monkeypatch.syspath_prepend(str(zoo))
    source: Any = importlib.import_module("zoo")
    model, inputs, said = source.deep(), source.example_inputs(), list[str]()
    fast = fxopt_package.optimize(model, "prune{amount=0.5}", example_inputs=inputs)

    def keeps_block(candidate: nn.Module) -> bool:
        return bool((candidate.get_parameter("blocks.1.inner.weight") != 0).all())

    fault = diagnosis.bisect(model, keeps_block, inputs, plan=fxopt_package.plan(fast), tell=said.append)
    assert ("blocks.1" in fault.decision.key, fault.alone, len(said)) == (True, True, fault.checks)
    reduced = diagnosis.reduce(model, "prune{amount=0.5}", inputs, zoo / "small.py")
    assert (reduced.failure, reduced.operations) == ("NotEquivalentError", 1)
    with pytest.raises(fxopt_package.InputError, match="there is nothing to look for"):
        diagnosis.bisect(fast, lambda _: True, inputs)
    found = diagnosis.race(model, fast, inputs, names=("plain", "pruned"))
    assert (found.before.model, found.training) == ("plain", False) and "| pruned" in str(found)
    for call in (lambda: diagnosis.race(model, fast, None), lambda: diagnosis.verify_check(model, None)):
        with pytest.raises(fxopt_package.UsageError, match="there are none; give example_inputs"):
            call()
