from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.command_line import HEADS, folder_of_modules

SOURCE = (
    HEADS
    + """
class Scaled(Heads):
    def forward(self, x):
        return super().forward(x) * 1.001

class Detached(Heads):
    def forward(self, x):
        return super().forward(x.detach())

class Failing(Heads):
    def forward(self, x):
        raise RuntimeError("on purpose")

class Dropping(Heads):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x))

class Deciding(Heads):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else -super().forward(x)

def example_inputs():
    torch.manual_seed(1)
    return [(torch.randn(3, 4),), {"x": torch.randn(5, 4)}]

def build(cls):
    torch.manual_seed(0)
    return cls()

def heads(): return build(Heads)
def scaled(): return build(Scaled)
def detached(): return build(Detached)
def failing(): return build(Failing)
def dropping(): return build(Dropping)
def deciding(): return build(Deciding)
def others():
    torch.manual_seed(7)
    return Heads()
"""
)


Fxopt = Callable[..., Any]


@pytest.fixture(autouse=True)
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with a module `zoo`, whose factories the command line imports from there."""
    with folder_of_modules(tmp_path, monkeypatch, zoo=SOURCE, bare="from zoo import heads") as folder:
        yield folder


def save(fxopt: Fxopt, out: str, *options: str, model: str = "zoo:heads", passes: str = "fuse_ensembles") -> None:
    done = fxopt("optimize", model, "-p", passes, "-o", out, "--no-measure", *options)
    assert done.code == 0, done.err


def test_equal_models_exit_with_0(fxopt: Fxopt):
    save(fxopt, "out.fxopt")
    done = fxopt("verify", "zoo:heads", "out.fxopt", "--trust", "zoo")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "equal: outputs and buffers of 2 calls"
    assert [line.split("|")[2].strip() for line in lines if line.startswith("|")][2:] == ["yes", "yes"]


@pytest.mark.parametrize("phase", ["eval", "train"])
def test_gradients_are_compared_when_asked_for(phase: str, fxopt: Fxopt):
    save(fxopt, "out.fxopt", model="zoo:dropping", passes="eliminate_dead_code")
    done = fxopt("verify", "zoo:dropping", "out.fxopt", "--gradients", "--phase", phase, "--json", "--trust", "zoo")
    assert done.code == 0, done.out
    assert done.json["gradients"] is True
    assert [call["checked"] for call in done.json["calls"]] == ["float64", "float64"]
    assert fxopt("verify", "zoo:heads", "zoo:detached").code == 0
    different = fxopt("verify", "zoo:heads", "zoo:detached", "--gradients")
    assert different.code == 1
    assert "gradient of" in different.out


def test_different_models_exit_with_1_and_say_where(fxopt: Fxopt):
    done = fxopt("verify", "zoo:heads", "zoo:scaled")
    assert done.code == 1
    assert done.out.startswith("different: outputs and buffers of 2 calls\n")
    assert "call 0: output differs: 1.0e-03 relative to its scale" in done.out
    result = fxopt("verify", "zoo:heads", "zoo:scaled", "--json").json
    assert (result["schema_version"], result["equal"]) == (1, False)
    assert [call["equal"] for call in result["calls"]] == [False, False]
    assert 9e-4 < result["calls"][0]["meaning_error"] < 1.1e-3
    weights = fxopt("verify", "zoo:heads", "zoo:others")
    assert weights.code == 1
    assert "heads.0.0.weight" in weights.out
    raising = fxopt("verify", "zoo:heads", "zoo:failing")
    assert raising.code == 1
    assert "raises RuntimeError: on purpose" in raising.out


def test_an_error_is_allowed_when_asked_for(fxopt: Fxopt):
    within = fxopt("verify", "zoo:heads", "zoo:scaled", "--tolerance", "0.002")
    assert (within.code, within.err) == (0, "")
    lines = within.out.splitlines()
    assert lines[0] == "within 0.002: outputs and buffers of 2 calls"
    assert [line.split("|")[2:5] for line in lines if line.startswith("|")][2:] == [
        [" yes    ", " 1.0e-03 ", " 0.002   "]
    ] * 2
    beyond = fxopt("verify", "zoo:heads", "zoo:scaled", "--tolerance", "5e-4", "--json")
    assert (beyond.code, beyond.json["equal"], beyond.json["tolerance"]) == (1, False, 5e-4)
    assert 9e-4 < beyond.json["calls"][0]["precision_error"] < 1.1e-3
    assert fxopt("verify", "zoo:heads", "zoo:scaled", "--json").json["tolerance"] is None
    for wrong in ("0", "2", "nan"):
        refused = fxopt("verify", "zoo:heads", "zoo:scaled", "--tolerance", wrong)
        assert refused.code == 2
        assert "give a relative error up to 1, such as 0.05" in refused.err


def test_an_archive_takes_the_inputs_beside_its_factory(fxopt: Fxopt, zoo: Path):
    save(fxopt, "heads.fxopt")
    for command in (("inspect",), ("optimize", "-p", "training"), ("verify", "bare:heads")):
        done = fxopt(*command, "heads.fxopt", "--trust", "zoo")
        assert (done.code, done.err) == (0, ""), command
    (zoo / "zoo.py").write_text(SOURCE.replace("def example_inputs", "def others_here"))
    sys.modules.pop("zoo")
    assert "no example inputs" in fxopt("inspect", "heads.fxopt", "--trust", "zoo").err


def test_wrong_usage_and_unreadable_models(fxopt: Fxopt, zoo: Path):
    assert fxopt("verify", "zoo:heads").code == 2
    assert fxopt("verify", "zoo:heads", "zoo:haeds").code == 2
    without = fxopt("verify", "bare:heads", "bare:heads")
    assert without.code == 2
    assert "there are no example inputs; write example_inputs() beside the factory, or give --inputs" in without.err
    (zoo / "junk").write_bytes(b"junk")
    assert fxopt("verify", "zoo:heads", "junk").code == 3
    failing = fxopt("verify", "zoo:failing", "zoo:heads")
    assert failing.code == 3
    assert "on purpose" in failing.err
    save(fxopt, "out.fxopt")
    untrusted = fxopt("verify", "zoo:heads", "out.fxopt")
    assert untrusted.code == 3
    assert "would import and call 'zoo:heads'" in untrusted.err


def test_inputs_come_from_either_model_or_a_file(fxopt: Fxopt, zoo: Path):
    assert len(fxopt("verify", "bare:heads", "zoo:heads", "--json").json["calls"]) == 2
    save_file({"0": torch.randn(2, 4)}, zoo / "x.safetensors")
    done = fxopt("verify", "zoo:heads", "bare:heads", "--inputs", "x.safetensors", "--json")
    assert len(done.json["calls"]) == 1
    misfit = fxopt("verify", "zoo:heads", "bare:heads", "--inputs", "zoo.py")
    assert misfit.code == 3


@pytest.mark.filterwarnings("ignore")
def test_exported_and_pickled_models(fxopt: Fxopt, zoo: Path):
    sys.path.insert(0, str(zoo))
    import zoo as models

    program = torch.export.export(models.heads().eval(), (torch.randn(3, 4),))
    torch.export.save(program, zoo / "heads.pt2")
    assert fxopt("verify", "heads.pt2", "zoo:heads", "--gradients").code == 0
    assert fxopt("verify", "heads.pt2", "zoo:scaled").code == 1
    assert "1 of" in fxopt("inspect", "heads.pt2").out
    torch.save(models.heads(), zoo / "heads.pt")
    refused = fxopt("verify", "zoo:heads", "heads.pt", "--trust", "zoo")
    assert refused.code == 3
    assert "is a pickle" in refused.err
    assert fxopt("verify", "zoo:heads", "heads.pt", "--trust", "all").code == 0


def test_a_crafted_pt2_runs_nothing(fxopt: Fxopt, zoo: Path):
    import io
    import zipfile

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (zoo / "ran",))

    buffer = io.BytesIO()
    torch.save(Bomb(), buffer)
    with zipfile.ZipFile(zoo / "evil.pt2", "w") as archive:
        for name in (
            "archive_format",
            "archive_version",
            "models/model.json",
            "data/weights/model_weights_config.json",
        ):
            archive.writestr(f"evil/{name}", b"{}")
        archive.writestr("evil/data/constants/model_constants_config.json", b"{}")
        archive.writestr("evil/data/sample_inputs/model.pt", buffer.getvalue())
    done = fxopt("verify", "zoo:heads", "evil.pt2", "--trust", "all")
    assert done.code == 3
    assert len(done.err.splitlines()) == 1
    assert not (zoo / "ran").exists()


@pytest.mark.filterwarnings("ignore")
def test_an_exported_model_needs_no_trust_and_no_class(fxopt: Fxopt, zoo: Path):
    save(fxopt, "heads.fxopt")
    save_file({"0": torch.randn(2, 4)}, zoo / "x.safetensors")
    inputs = ("--inputs", "x.safetensors")
    done = fxopt("export", "heads.fxopt", "--trust", "zoo", *inputs, "-o", "heads.pt2")
    assert (done.code, done.out) == (0, "wrote heads.pt2, equal to the model\n"), done.err
    assert fxopt("verify", "heads.pt2", "zoo:heads", "--inputs", "x.safetensors").code == 0
    (zoo / "zoo.py").unlink()
    sys.modules.pop("zoo")
    assert fxopt("inspect", "heads.pt2").code == 0
    assert "applied for inference" in fxopt("optimize", "heads.pt2").out
    again = fxopt("optimize", "heads.pt2", "-p", "inference", "-o", "again.fxopt", "--no-measure")
    assert again.code == 2
    assert "does not say how its model is built, so it cannot be saved; leave -o out, or use fxopt export" in again.err
    done = fxopt("export", "heads.pt2", *inputs, "-o", "fixed.pt2", "--no-dynamic-batch", "--json")
    assert (done.code, done.json["path"]) == (0, "fixed.pt2"), done.err


def test_what_cannot_be_exported_is_refused(fxopt: Fxopt, zoo: Path):
    save_file({"0": torch.randn(2, 4)}, zoo / "x.safetensors")
    done = fxopt("export", "zoo:deciding", "--inputs", "x.safetensors", "-o", "out")
    assert done.code == 3
    assert "torch cannot export this Deciding" in done.err
    assert "example call 1 has other arguments" in fxopt("export", "zoo:heads", "-o", "out").err
    without = fxopt("export", "bare:heads", "-o", "out")
    assert without.code == 2
    assert "give example inputs" in without.err
    assert not (zoo / "out").exists()


def test_damaged_files_exit_with_3_and_one_line(fxopt: Fxopt, zoo: Path):
    save(fxopt, "heads.fxopt")
    content = bytearray((zoo / "heads.fxopt").read_bytes())
    content[len(content) // 2] ^= 1
    (zoo / "heads.fxopt").write_bytes(content)
    done = fxopt("inspect", "heads.fxopt")
    assert done.code == 3
    assert len(done.err.splitlines()) == 1
    assert done.out == ""


def test_a_model_that_is_none_is_found_before_the_other_is_built(fxopt: Fxopt):
    done = fxopt("verify", "zoo:no_such_factory", "missing.fxopt")
    assert done.code == 2
    assert "'missing.fxopt' is no file" in done.err and "no_such_factory" not in done.err
