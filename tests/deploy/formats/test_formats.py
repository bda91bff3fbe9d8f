"""`fxopt.export` to other runtimes: what is written gives in a fresh process what the model gives, or is not there."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.cuda_ops import bias_act
from fxopt.deploy.formats import writers
from fxopt.deploy.formats.source import Source
from fxopt.errors import ArchiveError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:TorchScript is deprecated in torch:FutureWarning")
FILES = {"onnx": "m.onnx", "openvino": "m.xml", "torchscript": "m.ts"}


class Reading(nn.Module):
    """Takes a flag, and a mask by name, and gives a tensor and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor, doubled: bool = False, *, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = torch.tanh(self.embed(ids)) * mask[..., None]
        pooled = x.sum(1) / mask.sum(1, keepdim=True)
        return self.head(pooled * 2 if doubled else pooled), {"all": x.view(ids.shape[0], -1), "next": ids + 1}


def calls() -> list[fxopt.Inputs]:
    shapes = ((2, 5), (3, 7))
    return [fxopt.Inputs(torch.randint(0, 11, shape), True, mask=torch.ones(shape)) for shape in shapes]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("form", FILES)
def test_batch_and_length_are_free(form: str, tmp_path: Path) -> None:
    """The export compares both calls, and the first with 1 and 3 rows, in a process without this file's code."""
    model = Reading()
    assert fxopt.export(model, tmp_path / FILES[form], calls(), format=form) < 1e-5
    assert files(tmp_path) == (["m.bin", "m.xml"] if form == "openvino" else [FILES[form]])
    assert model.training, "the model's mode is its own"
    if form == "onnx":
        onnx = pytest.importorskip("onnx")
        graph = onnx.load(tmp_path / "m.onnx").graph
        assert [each.name for each in graph.input] == ["ids", "mask"]
        assert [each.name for each in graph.output] == ["output_0", "output_1_all", "output_1_next"]
        assert all(d.dim_param for each in graph.input for d in each.type.tensor_type.shape.dim)


@pytest.mark.slow
def test_a_compiled_library_needs_no_code_of_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    assert fxopt.export(model, tmp_path / "m.pt2", torch.randn(3, 4), format="aoti") < 1e-5
    assert files(tmp_path) == ["m.pt2"]
    with pytest.raises(ArchiveError, match="without code"):
        fxopt.load(tmp_path / "m.pt2")


class Writing(nn.Module):
    def forward(self, x: Tensor, scales: dict[str, Tensor]) -> Tensor:
        scales["all"].mul_(2)
        return x * scales["all"]


@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_a_model_that_writes_into_an_argument_is_refused(form: str, tmp_path: Path) -> None:
    call = fxopt.Inputs(torch.randn(2, 3), {"all": torch.ones(3)})
    with pytest.raises(ArchiveError, match=r"writes into its arguments \(scales_all\), and \w+ leaves them as"):
        fxopt.export(Writing(), tmp_path / FILES[form], call, format=form)
    assert files(tmp_path) == []


def test_static_int8_is_quantize_and_dequantize_in_onnx(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(4, 16)
    fast = fxopt.optimize(model, "quantize{scheme=int8_static}", example_inputs=x, measure=False, verify=False)
    fxopt.export(fast, tmp_path / "m.onnx", x)
    found = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert found.count("QuantizeLinear") == 2 and found.count("DequantizeLinear") == 4


def test_operators_of_fxopt_are_written_in_those_of_torch(tmp_path: Path) -> None:
    class Biased(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return bias_act(x, torch.ones(4), activation="gelu")

    fxopt.export(Biased(), tmp_path / "m.ts", torch.randn(3, 4))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Giving(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Counting(), "the model changes calls at each call, and onnx keeps nothing between calls; export it as .pt2"),
        (Giving(torch.rand_like), r"draws random numbers \(rand_like\), so no results could be compared"),
        (Giving(lambda x: (x, x.shape[0])), r"output\[1\] is a number, and such files give tensors"),
        (
            Giving(lambda x: torch.linalg.eigvals(x[:, None] * x[..., None])),
            r"onnx cannot take this Giving: DispatchError: No ONNX function found for .*eig",
        ),
    ],
)
def test_what_a_format_does_not_hold_is_refused(model: nn.Module, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=reason):
        fxopt.export(model, tmp_path / "m.onnx", torch.randn(2, 2))
    assert not files(tmp_path)


def test_what_is_missing_or_misnamed_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, find = torch.randn(2, 3), importlib.util.find_spec
    for name, form, reason in (
        ("m.pt2", "onnxx", "unknown format 'onnxx'; did you mean 'onnx'"),
        ("m.pt2", "onnx", r"files of the format onnx end in \.onnx; name it m\.pt2\.onnx"),
        ("m", "openvino", r"files of the format openvino end in \.xml; name it m\.xml"),
    ):
        with pytest.raises(UsageError, match=reason):
            fxopt.export(nn.ReLU(), tmp_path / name, x, format=form)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("onnx") else find(name))
    with pytest.raises(UsageError, match="needs onnx and onnxscript and onnxruntime: pip install onnx onnxscript onnx"):
        fxopt.export(nn.ReLU(), tmp_path / "m.onnx", x)
    assert not files(tmp_path)


def _other(source: Source, folder: Path) -> tuple[Path, ...]:
    wrong = Source(nn.Sequential(source.model, nn.ReLU()), source.call, source.given, source.program)
    return writers.write_torchscript(wrong, folder)


def _spoiled(source: Source, folder: Path) -> tuple[Path, ...]:
    (folder / "model.ts").write_bytes(b"PK spoiled")
    return (folder / "model.ts",)


def _stopped(source: Source, folder: Path) -> tuple[Path, ...]:
    raise KeyboardInterrupt


def _swallowing(source: Source, folder: Path) -> tuple[Path, ...]:
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    return writers.write_torchscript(source, folder)


@pytest.mark.parametrize(
    ("write", "error", "reason"),
    [
        (_other, ArchiveError, r"m\.ts was not written: on example call 0, the exported model differs from the model"),
        (_spoiled, ArchiveError, "a fresh process cannot load it: RuntimeError"),
        (_stopped, KeyboardInterrupt, "^$"),
        (_swallowing, KeyboardInterrupt, "^$"),
    ],
)
def test_an_older_file_stays_where_the_new_one_is_not_right(
    write: Any, error: type[BaseException], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.ts").write_bytes(b"old")
    monkeypatch.setattr("fxopt.deploy.export.WRITERS", {"torchscript": write})
    with pytest.raises(error, match=reason):
        fxopt.export(nn.Linear(3, 2), tmp_path / "m.ts", torch.randn(2, 3))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("m.ts", b"old")]


def _two(source: Source, folder: Path) -> tuple[Path, ...]:
    """Write a file, and one that goes with it, in place of OpenVINO's two."""
    (first,) = writers.write_torchscript(source, folder)
    (folder / "model.bin").write_bytes(b"numbers")
    return first, folder / "model.bin"


def test_files_that_go_together_are_replaced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt.deploy.export.WRITERS", {"torchscript": _two})
    (tmp_path / "m.bin").write_bytes(b"of something else")
    with pytest.raises(UsageError, match=r"m\.bin is there without m\.ts, so it is not overwritten"):
        fxopt.export(nn.Linear(3, 2), tmp_path / "m.ts", torch.randn(2, 3))
    assert files(tmp_path) == ["m.bin"]
    (tmp_path / "m.ts").write_bytes(b"old")
    fxopt.export(nn.Linear(3, 2), tmp_path / "m.ts", torch.randn(2, 3))
    (tmp_path / "m.ts.sha256").write_text("of a .pt2 file of this name")
    fxopt.export(nn.Linear(3, 2), tmp_path / "m.ts", torch.randn(2, 3))
    assert files(tmp_path) == ["m.bin", "m.ts"] and (tmp_path / "m.bin").read_bytes() == b"numbers"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("fxopt.storage.open", lambda *_, **__: Full(), raising=False)
    with pytest.raises(OSError, match=r"No space left on device: '.*m\.ts'"):
        fxopt.export(nn.ReLU(), tmp_path / "m.ts", torch.randn(2, 3))
    assert not files(tmp_path)


def test_where_a_trace_fixes_a_decision_is_said(tmp_path: Path) -> None:
    model = Giving(lambda x: x * 2 if bool(x.sum() > 0) else -x)
    one = torch.ones(1, 3)
    with pytest.warns(UserWarning, match=r"the model decides by tensors or sizes \(at test_formats\.py:\d+\)"):
        fxopt.export(model, tmp_path / "m.ts", one)
    with (
        pytest.warns(UserWarning, match="the model decides"),
        pytest.raises(ArchiveError, match="on example call 1, the exported model differs"),
    ):
        fxopt.export(model, tmp_path / "m.ts", [one, -one])


@torch.library.custom_op("fxopt_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_an_operator_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"cannot load it: RuntimeError: .*fxopt_tests::doubled"):
        fxopt.export(Giving(doubled), tmp_path / "m.ts", torch.ones(2, 3))


def test_torchscript_is_said_to_be_deprecated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt.deploy.export.WRITERS", {"torchscript": _stopped})
    with (
        pytest.warns(FutureWarning, match="TorchScript is deprecated in torch") as warned,
        pytest.raises(KeyboardInterrupt),
    ):
        fxopt.export(nn.ReLU(), tmp_path / "m.ts", torch.randn(2, 3))
    assert len(warned) == 1 and warned[0].filename == __file__
