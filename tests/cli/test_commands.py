from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.command_line import HEADS, folder_of_modules

from fxopt.errors import PipelineError
from fxopt.known_passes import check_names

SOURCE = (
    HEADS
    + """
class Halving(Heads):
    def forward(self, x):
        while x.abs().max() > 1e-4:
            x = x / 2
        return super().forward(x)

def example_inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 4),)

def heads():
    torch.manual_seed(0)
    return Heads().eval()

def halving():
    return Halving().eval()

def training_heads():
    return heads().train()
"""
)

FAST = ("--no-measure",)
"""Decide by the documented rule, so that the tests do not depend on the machine."""


Fxopt = Callable[..., Any]


@pytest.fixture(autouse=True)
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with a module `zoo`, whose factories the command line imports from there."""
    with folder_of_modules(
        tmp_path,
        monkeypatch,
        zoo=SOURCE,
        bare="from zoo import heads",
        grumpy="from zoo import heads\ndef example_inputs():\n    raise OSError('no data')",
    ) as folder:
        yield folder


def in_new_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fxopt", *arguments], capture_output=True, text=True, check=False, timeout=120, **options
    )


def test_help_version_and_lists_of_passes_need_no_torch(zoo: Path):
    code = (
        "import sys; from fxopt.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, 'networkx' in sys.modules)"
    )
    for arguments in (
        ["--help"],
        ["optimize", "--help"],
        ["--version"],
        ["no-such-command"],
        ["passes"],
        ["passes", "inference"],
        ["cache"],
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.stdout.splitlines()[-1] == "False False"


def test_the_module_runs_as_a_command():
    done = in_new_process("--version")
    assert (done.returncode, done.stdout) == (0, "fxopt 0.1.0\n")


def test_a_command_by_another_word_is_named(fxopt: Fxopt):
    done = fxopt("report", "model.fxopt")
    assert done.code == 2
    assert "use fxopt inspect FILE" in " ".join(done.err.replace("│", " ").split())
    assert "Did you mean 'optimize'" in fxopt("optimise").err


def test_wrong_usage_exits_with_2(fxopt: Fxopt):
    assert fxopt("no-such-command").code == 2
    assert fxopt("optimize").code == 2
    assert fxopt("optimize", "zoo:heads", "--phase", "sometimes").code == 2


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("zoo", 2, "'zoo' is no file; name a saved model, or write package.module:factory"),
        ("./zou.py:heads", 2, "'./zou.py:heads': there is no file ./zou.py"),
        ("zoo.py:haeds", 2, "zoo has no 'haeds'; did you mean 'heads'?"),
        ("zou:heads", 2, "there is no module 'zou'"),
        ("zoo:haeds", 2, "zoo has no 'haeds'; did you mean 'heads'?"),
        ("zoo:SOURCE", 2, "zoo has no 'SOURCE'"),
        ("zoo:torch", 2, "is of type module, not a function or class that builds a model"),
        ("zoo:example_inputs", 3, "returned tuple, expected a torch.nn.Module"),
        ("grumpy:heads", 3, "grumpy:example_inputs raised OSError: no data"),
        ("zoo.py", 2, "'zoo.py' is source code; name what builds the model in it: zoo.py:factory"),
    ],
)
def test_a_model_that_is_none(fxopt: Fxopt, model: str, code: int, message: str):
    done = fxopt("inspect", model)
    assert done.code == code
    assert message in done.err
    assert done.out == ""


def test_a_file_that_another_module_has_the_name_of(fxopt: Fxopt, zoo: Path):
    (zoo / "json.py").touch()
    done = fxopt("inspect", "json.py:heads")
    assert done.code == 2
    assert "another module is called 'json'" in done.err and "rename the file" in done.err


def test_a_wrong_pipeline_is_shown_with_its_place(fxopt: Fxopt):
    done = fxopt("optimize", "zoo:heads", "-p", "eliminate_dead_code, fuse_ensemble")
    assert done.code == 2
    assert done.err.splitlines() == [
        "fxopt: error: unknown pass 'fuse_ensemble'; did you mean 'fuse_ensembles'?",
        "  eliminate_dead_code, fuse_ensemble",
        "                       ^^^^^^^^^^^^^",
    ]


def test_optimize_reports_and_saves(fxopt: Fxopt, zoo: Path):
    done = fxopt("optimize", "zoo:heads", "-p", "fuse_ensembles", "-o", "out.fxopt", "--save-plan", "plan.json", *FAST)
    assert (done.code, done.err) == (0, "")
    assert "1 rewrite applied" in done.out
    assert "fuse_ensembles" in done.out
    assert json.loads((zoo / "plan.json").read_text())["schema_version"] == 1

    import zoo as models

    import fxopt as library

    loaded = library.load(zoo / "out.fxopt", trust=["zoo"])
    assert type(loaded) is not models.Heads
    assert isinstance(loaded, models.Heads)
    x = models.example_inputs()[0]
    torch.testing.assert_close(loaded(x), models.heads()(x))


@pytest.mark.parametrize(("given", "meant"), [(["--cold"], "cold"), (["--measure", "--cold"], "cold"), ([], None)])
def test_optimize_for_cold_calls(given: list[str], meant: str | None, fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch):
    from fxopt import api
    from fxopt.errors import InputError

    def optimize(*_: Any, measure: Any, **__: Any) -> None:
        raise InputError(f"measure is {measure}")

    monkeypatch.setattr(api, "optimize", optimize)
    assert fxopt("optimize", "zoo:heads", *given).err == f"fxopt: error: measure is {meant}\n"


def test_cold_calls_are_timed(fxopt: Fxopt):
    wrong = fxopt("optimize", "zoo:heads", "--cold", "--no-measure")
    assert wrong.code == 2
    assert "--cold says how to time, and --no-measure that nothing is timed" in wrong.err


def test_optimize_as_json(fxopt: Fxopt):
    report = fxopt("optimize", "zoo:heads", "-p", "fuse_ensembles", "--json", *FAST).json
    assert report["schema_version"] == 2
    assert [decision["status"] for decision in report["decisions"]] == ["applied"]
    assert report["phase"] == "eval"


def test_the_preset_follows_the_mode(fxopt: Fxopt):
    training = fxopt("optimize", "zoo:training_heads", "--json", *FAST)
    assert "fold_constants" not in training.json["pipeline"]
    assert (
        "the model is in training mode, so it is optimized for training; for inference give --phase eval"
        in training.err
    )
    for phase in ("eval", "train"):
        given = fxopt("optimize", "zoo:training_heads", "--phase", phase, "--json", *FAST)
        assert ("fold_constants" in given.json["pipeline"]) is (phase == "eval") and not given.err


def test_a_phase_is_a_mode_of_the_model(fxopt: Fxopt):
    given = ("optimize", "zoo:training_heads", "-p", "inference")
    assert "\nnothing was done for inference: the model is in training" in fxopt(*given, *FAST).out
    done = fxopt(*given, "--phase", "eval", "-o", "out.fxopt", *FAST)
    assert "applied for inference" in done.out and "call model.eval()" not in done.out + done.err
    shown = fxopt("inspect", "out.fxopt", "--trust", "zoo")
    assert shown.out.splitlines()[0].startswith(done.out.splitlines()[0].partition(",")[0].partition(";")[0])


@pytest.mark.parametrize(("given", "seconds"), [("0", 0.0), ("2.5", 2.5), ("0 forwards", 0.0)])
def test_checks_and_timing_have_a_budget(fxopt: Fxopt, given: str, seconds: float):
    report = fxopt("optimize", "zoo:heads", "-p", "fuse_ensembles", "--time-budget", given, "--json").json
    assert report["spent"]["budget_s"] == seconds
    assert seconds or {each["status"] for each in report["decisions"]} == {"skipped"}


def test_a_wrong_budget_is_refused_before_the_model_is_built(fxopt: Fxopt):
    done = fxopt("optimize", "nowhere:heads", "--time-budget", "soon")
    assert (done.code, done.err) == (
        2,
        "fxopt: error: time_budget='soon'; use seconds (a number, zero or more), '10 min' or '40 forwards'\n",
    )


def test_a_plan_is_repeated(fxopt: Fxopt):
    fxopt("optimize", "zoo:heads", "-p", "fuse_ensembles{lowering=vmap}", "--save-plan", "plan.json", *FAST)
    again = fxopt("optimize", "zoo:heads", "-p", "fuse_ensembles{lowering=vmap}", "--plan", "plan.json", "--json")
    assert fxopt("optimize", "zoo:heads", "--plan", "plan.json").code == again.code == 0  # its passes are the plan's
    assert [decision["choice"] for decision in again.json["decisions"]] == ["vmap"]
    absent = fxopt("optimize", "zoo:heads", "--plan", "absent.json")
    assert absent.code == 3
    assert "absent.json" in absent.err


def test_weights_and_inputs_come_from_safetensors(fxopt: Fxopt, zoo: Path):
    sys.path.insert(0, str(zoo))
    import zoo as models

    model = models.heads()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    save_file(model.state_dict(), zoo / "zero.safetensors")
    save_file({"0": torch.ones(2, 4)}, zoo / "x.safetensors")
    save_file({"x": torch.ones(2, 4)}, zoo / "named.safetensors")
    save_file({"y": torch.ones(2, 4)}, zoo / "wrong.safetensors")
    save_file({"other": torch.ones(1)}, zoo / "others.safetensors")
    for inputs in ("x.safetensors", "named.safetensors"):
        done = fxopt(
            "optimize", "bare:heads", "--weights", "zero.safetensors", "--inputs", inputs, "-o", "o.fxopt", *FAST
        )
        assert (done.code, done.err) == (0, "")

    import fxopt as library

    assert library.load("o.fxopt", trust=["bare", "zoo"])(torch.ones(1, 4)).abs().max() == 0

    refused = fxopt("inspect", "bare:heads", "--inputs", "wrong.safetensors")
    assert refused.code == 3
    assert "unexpected keyword argument 'y'" in refused.err
    misfit = fxopt("inspect", "zoo:heads", "--weights", "others.safetensors")
    assert misfit.code == 3
    assert "do not fit the model" in misfit.err
    for option in ("--weights", "--inputs"):
        absent = fxopt("inspect", "zoo:heads", option, "model.pt")
        assert absent.code == 3
        assert f"{option} model.pt: no such file" in absent.err
        damaged = fxopt("inspect", "zoo:heads", option, "zoo.py")
        assert damaged.code == 3
        assert "not a readable safetensors file" in damaged.err


class Opens:
    """Write a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("opened", "w")


def test_weights_and_inputs_come_from_pt_files_of_which_nothing_is_run(fxopt: Fxopt, zoo: Path):
    sys.path.insert(0, str(zoo))
    import zoo as models

    state = {name: torch.zeros_like(tensor) for name, tensor in models.heads().state_dict().items()}
    torch.save(state, zoo / "zero.pt")
    torch.save({"state_dict": state, "epoch": 3}, zoo / "zero.ckpt")
    torch.save((torch.ones(2, 4),), zoo / "x.pt")
    for weights in ("zero.pt", "zero.ckpt"):
        done = fxopt("optimize", "bare:heads", "--weights", weights, "--inputs", "x.pt", "-o", "o.fxopt", *FAST)
        assert (done.code, done.err) == (0, "")
        import fxopt as library

        assert library.load("o.fxopt", trust=["bare", "zoo"])(torch.ones(1, 4)).abs().max() == 0

    torch.save({"weight": Opens()}, zoo / "evil.pt")
    torch.save([1, 2], zoo / "list.pt")
    for option in ("--weights", "--inputs"):
        refused = fxopt("inspect", "zoo:heads", option, "evil.pt")
        assert refused.code == 3
        assert "cannot be read without running code in it" in refused.err
        assert len(refused.err.splitlines()) == 1
    assert not (zoo / "opened").exists()
    assert "holds no state dict" in fxopt("inspect", "zoo:heads", "--weights", "list.pt").err


def test_without_inputs_it_says_so_on_stderr_with_what_to_do(fxopt: Fxopt):
    done = fxopt("inspect", "bare:heads", "--json")
    assert done.code == 0
    assert done.err == (
        "fxopt: no example inputs, so nothing can be checked or timed; write example_inputs() beside the factory, "
        "or give --inputs FILE\n"
    )
    optimized = fxopt("optimize", "bare:heads", "-p", "fuse_ensembles{lowering=bmm}")
    assert "NOT VERIFIED: no example inputs" in optimized.out
    assert "Warning" not in optimized.err
    assert done.json["schema_version"] == 1


def test_inspect_shows_coverage_graphs_and_what_is_opaque(fxopt: Fxopt):
    done = fxopt("inspect", "zoo:heads")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[2].split()[:2] == ["(root)", "Heads"]
    assert lines[3].split()[:5] == ["heads.0", "and", "5", "more", "Sequential"]
    assert lines[2].index("Heads") == lines[3].index("Sequential")
    assert "placeholder" in fxopt("inspect", "zoo:heads", "--graph", "").out
    wrong = fxopt("inspect", "zoo:heads", "--graph", "head.0")
    assert wrong.code == 2
    assert "did you mean 'heads.0'?" in wrong.err
    opaque = fxopt("inspect", "zoo:halving", "--json").json["opaque"]
    assert [entry["module"] for entry in opaque] == [""]
    assert "zoo.py:" in opaque[0]["location"]
    assert "(root) (" in fxopt("inspect", "zoo:halving").out


def test_diff_compares_models_and_archives(fxopt: Fxopt):
    same = fxopt("diff", "zoo:heads", "zoo:heads")
    assert (same.code, same.out) == (0, "no difference\n")
    fxopt("optimize", "zoo:heads", "-p", "fuse_ensembles", "-o", "out.fxopt", *FAST)
    done = fxopt("diff", "zoo:heads", "out.fxopt", "--trust", "zoo")
    assert done.code == 1
    assert "--- (root)" in done.out
    assert fxopt("diff", "zoo:heads", "out.fxopt", "--trust", "zoo", "--json").json["equal"] is False


def test_diff_and_verify_take_weights_and_inputs(fxopt: Fxopt, zoo: Path):
    sys.path.insert(0, str(zoo))
    import zoo as models

    state = {name: tensor * 2 for name, tensor in models.heads().state_dict().items()}
    save_file(state, zoo / "double.safetensors")
    save_file({"0": torch.ones(2, 4)}, zoo / "x.safetensors")
    weights = ("--weights", "double.safetensors", "--trust", "zoo", "--inputs", "x.safetensors")
    fxopt("optimize", "zoo:heads", *weights[:2], "-p", "fuse_ensembles", "-o", "out.fxopt", *FAST)
    assert fxopt("verify", "zoo:heads", "out.fxopt", "--trust", "zoo").code == 1
    assert fxopt("verify", "zoo:heads", "out.fxopt", *weights).code == 0
    assert fxopt("verify", "zoo:heads", "bare:heads", *weights).code == 0
    assert fxopt("diff", "bare:heads", "zoo:heads", *weights).code == 0
    both = fxopt("verify", "out.fxopt", "out.fxopt", *weights)
    assert both.code == 2
    assert "both models are files with weights of their own" in both.err
    fitting = fxopt("diff", "bare:heads", "bare:heads", "--inputs", "x.safetensors")
    assert (fitting.code, fitting.err) == (0, "")


def test_an_archive_is_inspected_only_when_trusted(fxopt: Fxopt):
    fxopt("optimize", "zoo:heads", "-p", "fuse_ensembles", "-o", "out.fxopt", *FAST)
    refused = fxopt("inspect", "out.fxopt")
    assert refused.code == 3
    assert "would import and call 'zoo:heads'" in refused.err
    assert "1 rewrite applied" in fxopt("inspect", "out.fxopt", "--trust", "zoo").out


def test_a_saved_model_is_optimized_further_and_saved_again(fxopt: Fxopt):
    fxopt("optimize", "zoo:heads", "-p", "eliminate_dead_code", "-o", "first.fxopt", *FAST)
    again = ("optimize", "first.fxopt", "--trust", "zoo", "-p", "fuse_ensembles", "-o", "second.fxopt", *FAST)
    assert fxopt(*again).code == 0
    assert "1 rewrite applied" in fxopt("inspect", "second.fxopt", "--trust", "zoo").out


def test_an_interrupt_exits_with_130_and_writes_nothing(fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    assert fxopt("optimize", "zoo:heads", "-p", "fuse_ensembles", "-o", "out.fxopt", *FAST).code == 130
    assert not list(zoo.glob("*out.fxopt*"))


@pytest.mark.parametrize("swallowed", ["ImportError", "nothing"])
def test_an_interrupt_that_other_code_swallows_exits_with_130(swallowed: str, fxopt: Fxopt, zoo: Path):
    then = "raise ImportError" if swallowed == "ImportError" else "return heads()"
    interrupted = "try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except KeyboardInterrupt:\n        "
    (zoo / "bare.py").write_text(f"import os, signal\nfrom zoo import *\ndef made():\n    {interrupted}{then}\n")
    done = fxopt("optimize", "bare:made", "-o", "out.fxopt", *FAST)
    assert (done.code, done.out, done.err) == (130, "", "")
    assert not list(zoo.glob("*out.fxopt*"))


def test_passes_are_listed_and_described(fxopt: Fxopt):
    listed = fxopt("passes")
    assert listed.code == 0
    assert "fuse_ensembles" in listed.out
    assert "inference" in listed.out
    page = fxopt("passes", "fuse_ensembles").out
    assert "Before" in page
    assert "lowering=" in page
    assert fxopt("passes", "--json").json["presets"]["inference"]
    assert [info["name"] for info in fxopt("passes", "fuse_ensembles", "--json").json["passes"]] == ["fuse_ensembles"]
    preset = fxopt("passes", "training").out.splitlines()
    assert [line.split()[0] for line in preset] == ["training", *fxopt("passes", "--json").json["presets"]["training"]]
    described = fxopt("passes", "training", "--json").json
    assert [info["name"] for info in described["passes"]] == described["presets"].pop("training")
    assert described["presets"] == {}
    assert (
        "int8      quantize{baseline=bfloat16},pack{dtype=bfloat16},pack in the place of pack"
        in fxopt("passes", "inference").out
    )
    assert fxopt("passes", "inference", "--json").json["options"] == {
        "engine": ["none", "auto"], "dtype": ["float32", "bfloat16", "int8"],
    }  # fmt: skip
    assert fxopt("passes", "inference{dtype=int8}").out == fxopt("passes", "inference").out
    assert "(dtype=float32, bfloat16, int8)" in listed.out
    wrong = fxopt("passes", "fuse")
    assert wrong.code == 2
    assert "unknown pass 'fuse'; did you mean 'fuse_ensembles'?" in wrong.err


def test_doctor_finds_this_installation_in_order(fxopt: Fxopt):
    done = fxopt("doctor", "--json")
    assert done.code == 0
    assert {"fxopt", "torch", "FXOPT_VERIFY"} <= {check["name"] for check in done.json["checks"]}


def test_doctor_says_what_the_machine_has(fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FXOPT_TIME_BUDGET")
    found = {check["name"]: check["found"] for check in fxopt("doctor", "--json").json["checks"]}
    assert found["cpu instructions"] == torch.backends.cpu.get_cpu_capability()
    assert found["c++ compiler"]
    assert found["FXOPT_TIME_BUDGET"] == "40 forwards of the model, or 2 s if that is more"


@pytest.mark.parametrize("given", ["1", "0", "cold"])
def test_doctor_says_settings_as_they_are_given(given: str, fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch):
    verify = "0" if given == "0" else "1"
    monkeypatch.setenv("FXOPT_MEASURE", given)
    monkeypatch.setenv("FXOPT_VERIFY", verify)
    found = {check["name"]: check["found"] for check in fxopt("doctor", "--json").json["checks"]}
    assert (found["FXOPT_MEASURE"], found["FXOPT_VERIFY"]) == (given, verify)


def test_the_cache_is_shown_and_cleared(fxopt: Fxopt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "decisions"
    folder.mkdir()
    monkeypatch.setenv("FXOPT_CACHE", str(folder))
    entry = folder / f"{'ab' * 32}.json"
    entry.write_bytes(b"x" * 2048)
    (folder / "mine.txt").touch()
    checks = {check["name"]: check["found"] for check in fxopt("doctor", "--json").json["checks"]}
    assert checks["cached decisions"] == f"1, 2 KiB in {folder}"
    assert checks["FXOPT_CACHE"] == str(folder)
    assert fxopt("cache").out == f"cached decisions: 1, 2 KiB in {folder}\n"
    assert entry.exists()
    cleared = fxopt("cache", "--clear", "--json")
    assert (cleared.code, cleared.json["entries"], cleared.json["bytes"], cleared.json["cleared"]) == (0, 1, 2048, True)
    assert [each.name for each in folder.iterdir()] == ["mine.txt"]
    assert fxopt("cache", "--json").json["entries"] == 0


def test_a_cache_that_is_off_is_said_to_be(fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXOPT_CACHE", "0")
    assert "off" in fxopt("cache").out
    assert fxopt("cache", "--clear", "--json").json["folder"] is None
    checks = {check["name"]: check["found"] for check in fxopt("doctor", "--json").json["checks"]}
    assert (checks["cached decisions"], checks["FXOPT_CACHE"]) == ("none: the cache is off", "0")


def test_doctor_exits_with_1_where_something_is_missing(fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch):
    found = importlib.metadata.version

    def version(name: str) -> str:
        if name == "networkx":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    done = fxopt("doctor")
    assert done.code == 1
    assert "! networkx" in done.out


def test_a_wrong_setting_is_wrong_usage(fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FXOPT_VERIFY", "perhaps")
    done = fxopt("optimize", "zoo:heads")
    assert done.code == 2
    assert "FXOPT_VERIFY='perhaps'" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("optimize", "zoo:heads", "-o", "absent/out.fxopt"), "there is no folder absent; make it first"),
        (("optimize", "zoo:heads", "-o", "."), "-o . is a folder; name a file in it"),
        (
            ("optimize", "zoo:heads", "-o", "bare.py"),
            "-o bare.py is there and is no saved model; it is not overwritten",
        ),
        (("optimize", "zoo.py:heads", "-o", "zoo.py"), "-o zoo.py is the model that is read"),
        (("optimize", "bare.py", "-o", "./bare.py"), "is the model that is read"),
        (("optimize", "zoo:heads", "--save-plan", "absent/plan.json"), "there is no folder absent"),
        (("optimize", "zoo:heads", "--save-plan", "bare.py"), "is there and is no plan"),
        (("optimize", "zoo:heads", "--report", "bare.py"), "is there and is no report"),
        (("optimize", "zoo:heads", "--report", "."), "--report . is a folder; name a file in it, as report.html"),
        (("export", "zoo:heads", "-o", "weights.pt2"), "-o weights.pt2 is there and is no saved model"),
        (("export", "zoo:heads", "-o", "b.onnx.zip"), "-o b.onnx.zip: give --format, or name it b.onnx.pt2"),
    ],
)
def test_where_results_go_is_checked_before_the_work(
    fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
):
    torch.save({"weight": torch.ones(2)}, zoo / "weights.pt2")
    before = {path: path.read_bytes() for path in zoo.iterdir() if path.is_file()}
    monkeypatch.setattr("fxopt.cli.arguments.open_model", lambda *_: pytest.fail("the work has begun"))
    done = fxopt(*arguments)
    assert done.code == 3
    assert message in done.err
    assert {path: path.read_bytes() for path in zoo.iterdir() if path.is_file()} == before


@pytest.mark.filterwarnings("always:TorchScript is deprecated:FutureWarning")
def test_export_takes_the_format_that_is_named(fxopt: Fxopt, zoo: Path):
    (zoo / "text.onnx").write_text("not a model")
    assert "-o text.onnx is there and is no saved model" in fxopt("export", "zoo:heads", "-o", "text.onnx").err
    done = fxopt("export", "zoo:heads", "-o", "heads.onnx", "--format", "torchscript")
    assert (done.code, "end in .ts; name it heads.onnx.ts" in done.err) == (2, True)
    for _ in range(2):  # what it wrote itself, it replaces
        done = fxopt("export", "zoo:heads", "-o", "heads.ts", "--json")
        assert (done.code, done.json) == (0, {"schema_version": 1, "path": "heads.ts", "error": 0.0})
        assert done.err.startswith("warning: TorchScript is deprecated in torch; ") and done.err.count("\n") == 1


def test_results_are_written_again(fxopt: Fxopt, zoo: Path):
    for _ in range(2):
        files = ("-o", "out.fxopt", "--save-plan", "plan.json", "--report", "report.html")
        assert fxopt("optimize", "zoo:heads", "-p", "eliminate_dead_code", *files, *FAST).code == 0
    assert "0 rewrites applied for inference" in (zoo / "report.html").read_text()


def test_a_file_of_python_names_a_model(fxopt: Fxopt, zoo: Path):
    package = zoo / "models" / "vision"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "net.py").write_text("from .parts import heads, example_inputs\n")
    (package / "parts.py").write_text(SOURCE)
    try:
        done = fxopt("optimize", "./models/vision/net.py:heads", "-p", "fuse_ensembles", "-o", "o.fxopt", *FAST)
        assert (done.code, done.err) == (0, "")
        assert "1 rewrite applied" in fxopt("inspect", "o.fxopt", "--trust", "vision").out
    finally:
        for name in ("vision", "vision.net", "vision.parts"):
            sys.modules.pop(name, None)
    assert "heads.0 and 5 more" in fxopt("inspect", "zoo.py:heads").out


@pytest.mark.parametrize("arguments", [("optimize", "zoo:heads", "-p", "fuse_ensemble"), ("passes", "fuse_ensemble")])
def test_names_of_passes_are_checked_before_torch_is_loaded(zoo: Path, arguments: tuple[str, ...]):
    code = (
        "import sys; from fxopt.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, 'zoo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown pass 'fuse_ensemble'; did you mean 'fuse_ensembles'?" in done.stderr
    assert done.stdout == "False False\n"


MISSING = [
    (("optimize", "zoo:heads", "--weights", "w.pt"), 3, "--weights w.pt: no such file"),
    (("optimize", "zoo:heads", "--plan", "p.json"), 3, "--plan p.json: no such file"),
    (("inspect", "zoo:heads", "--inputs", "i.pt"), 3, "--inputs i.pt: no such file"),
    (("export", "zoo:heads", "-o", "o.pt2", "--weights", "."), 3, "--weights . is a folder; name a file in it"),
    (("diff", "zoo:heads", "zoo:heads", "--weights", "w.pt"), 3, "--weights w.pt: no such file"),
    (("optimize", "m.fxopt"), 2, "'m.fxopt' is no file"),
    (("verify", "zoo:heads", "m.fxopt"), 2, "'m.fxopt' is no file"),
    (("inspect", "zou.py:heads"), 2, "'zou.py:heads': there is no file zou.py"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISSING)
def test_files_that_are_not_there_are_found_before_torch_is_loaded(
    fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, message: str
):
    monkeypatch.setitem(sys.modules, "fxopt.cli.arguments", None)  # it imports torch
    monkeypatch.setitem(sys.modules, "fxopt.api", None)
    done = fxopt(*arguments)
    assert (done.code, len(done.err.splitlines())) == (code, 1)
    assert message in done.err


def test_refused_options_name_the_pass_once(fxopt: Fxopt):
    assert fxopt("optimize", "zoo:heads", "-p", "pack{dtype=float64}").err.count("'pack'") == 1


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("pack,inference{dtype=int7}", "option 'dtype': 'int7' is no value of it; did you mean 'int8'?"),
        ("inference{dtyp=int8}", "'inference' has no option 'dtyp'; did you mean 'dtype'?"),
        ("training{dtype=int8}", "'training' has no option 'dtype'; it has none"),
    ],
)
def test_options_of_presets_are_checked_before_torch_is_loaded(pipeline: str, message: str):
    with pytest.raises(PipelineError, match=re.escape(message)):
        check_names(pipeline)
    check_names("inference{ dtype = int8 },pack{dtype=bfloat16}")


def test_names_of_passes_are_completed():
    from fxopt.cli import complete_name, complete_pipeline

    assert complete_name("fuse_en") == ["fuse_ensembles"]
    assert complete_pipeline("inf") == ["inference"]
    assert complete_pipeline("fold_constants, fuse_en") == ["fold_constants, fuse_ensembles"]
    assert complete_pipeline("fuse_ensembles{low") == []
    done = subprocess.run(
        [sys.executable, "-c", "from fxopt.cli import app; app(prog_name='fxopt')"],
        env={**os.environ, "_FXOPT_COMPLETE": "complete_bash", "COMP_WORDS": "fxopt passes fuse_en", "COMP_CWORD": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["fuse_ensembles"]


def test_a_pass_that_raises_exits_with_4_and_a_reproducer(fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    from fxopt.transforms.eliminate_dead_code import EliminateDeadCode

    def broken(self: object, program: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(EliminateDeadCode, "find", broken)
    monkeypatch.setenv("FXOPT_REPRODUCER_DIR", str(zoo / "reproducers"))
    done = fxopt("optimize", "zoo:heads", "-p", "eliminate_dead_code")
    assert done.code == 4
    assert "eliminate_dead_code" in done.err
    assert "on purpose" in done.err
    assert list((zoo / "reproducers").rglob("*.py"))


def test_a_reader_that_leaves_is_no_error():
    code = "import os,sys; from fxopt.cli import main; os.close(1); os.dup2(int(sys.argv[1]), 1); main(['passes'])"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code, str(write)], pass_fds=[write], capture_output=True, text=True, check=False
    )
    os.close(write)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_the_demo_checks_itself(fxopt: Fxopt):
    shown = fxopt("demo", "--heads", "4", "--steps", "2")
    assert shown.code == 0
    assert "speed-up" in shown.out
    assert "NO " not in shown.out
    result = fxopt("demo", "--heads", "4", "--steps", "2", "--json").json
    assert len(result["checks"]) == 3
    assert set(result["speed"]) == {"inference", "training"}


def test_the_demo_exits_with_1_where_a_check_fails(fxopt: Fxopt, monkeypatch: pytest.MonkeyPatch):
    from fxopt.demo import Demo

    monkeypatch.setattr(Demo, "checkpoints", lambda self, model, x: {"weights survive": False})
    done = fxopt("demo", "--heads", "4", "--steps", "1")
    assert done.code == 1
    assert "NO   weights survive" in done.out


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [("inferencedtype=int8", "quote them, as -p 'inference{dtype=bfloat16}'"), ("pack{budget=much}", "much")],
)
def test_what_is_wrong_with_options_is_said_before_a_model_is_built(fxopt: Fxopt, pipeline: str, said: str):
    done = fxopt("optimize", "not_there:nothing", "-p", pipeline)
    assert done.code == 2 and said in done.err and "not_there" not in done.err
