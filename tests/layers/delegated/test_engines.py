"""The table of engines, and why one cannot be used."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engines import ENGINES, X, delegated, linears, openvino_only, regions, same
from torch import Tensor, nn

import fxopt
from fxopt.compat.export import without_repetitions
from fxopt.compat.inductor import has_cpp_compiler
from fxopt.errors import UsageError
from fxopt.layers.delegated import OtherSizes, aot_inductor, engine, engine_named, engines
from fxopt.layers.quantized import Range, StaticLinear
from fxopt.storage import byte_text


@pytest.mark.parametrize(("name", "packages"), [("openvino", "openvino"), ("onnxruntime", "onnxruntime onnx")])
def test_what_is_missing_is_named_with_what_to_install(
    name: str, packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_version", lambda package: None)
    reason = engine_named(name).reason_against(torch.float32)
    assert reason == f"{name} needs the package {name}: pip install {packages}"
    assert not engine_named(name).version


def test_a_broken_installation_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_version", lambda package: "1.0")
    monkeypatch.setattr(engine.importlib, "import_module", lambda name: 1 / 0)
    assert engine_named("openvino").reason_against(torch.float32) == "importing openvino fails: division by zero"


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install distributions with engines that cannot be loaded, and one with the name of an engine of fxopt."""
    metadata = tmp_path / "others-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = "broken = broken_engine:It\nnone = fractions:Fraction\nopenvino = fxopt.layers.delegated:Engine\n"
    metadata.joinpath("entry_points.txt").write_text(f"[fxopt.engines]\n{lines}")
    (tmp_path / "broken_engine.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    table = sys.modules[engine_named.__module__]
    table._all.cache_clear()  # type: ignore[attr-defined]
    yield
    table._all.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("registered")
def test_an_engine_of_others_that_cannot_be_loaded_costs_nobody_else_anything() -> None:
    assert type(engine_named("openvino")).__name__ == "OpenVINO"
    assert (
        engine_named("none")
        .reason_against(torch.float32)
        .endswith("no class derived from fxopt.layers.delegated.Engine")
    )
    model = linears()
    with pytest.warns(fxopt.NothingDoneWarning, match="engine 'broken' .* cannot be loaded: No module named 'no_such_"):
        fast = fxopt.optimize(model, "delegate{engine=broken}", example_inputs=X)
    same(fast, model)
    same(fxopt.optimize(model, "delegate", example_inputs=X), model)


def test_a_model_that_is_too_large_for_onnx_is_refused_before_it_is_exported() -> None:
    pytest.importorskip("onnxruntime")
    model = nn.Module()
    model.register_buffer("weight", torch.zeros(1).expand(2**29))  # takes no memory
    with pytest.raises(ValueError, match=r"its tensors take 2 GiB, and an ONNX model has less than 2"):
        engine_named("onnxruntime").compile(model, [torch.zeros(1)], torch.float32, 1)


@torch.library.custom_op("fxopt_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(twice(torch.relu(self.first(x)))))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_custom_operator_is_named_in_one_line(engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = Twice().eval()
    fast = fxopt.optimize(model, f"delegate{{engine={engine}}}", example_inputs=torch.randn(4, 8))
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "refused"
    assert decision.reason.startswith(f"{engine} does not take it: ")
    assert "fxopt_test::twice" in decision.reason and ".cpp" not in decision.reason
    assert capfd.readouterr().out == ""


def test_types_and_names_that_there_are_not() -> None:
    assert list(engines())[:3] == ["openvino", "onnxruntime", "aoti"]
    assert [name for name, each in engines().items() if each.by_name] == ["aoti"]
    assert engine_named("onnxruntime").reason_against(torch.bfloat16) == "onnxruntime does not compute in bfloat16"
    with pytest.raises(UsageError, match="there is no engine 'openvno'; did you mean 'openvino'"):
        engine_named("openvno")
    with pytest.raises(UsageError, match="there is no engine 'tensorrt': engines compute on CPUs here"):
        engine_named("tensorrt")


class Layers(nn.Module):
    """Two inputs, of which the first dimension is the same, and the second one is fixed by the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(inputs[0])
        return y, y.softmax(1) + inputs[1]


def test_aoti_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_inductor, "has_cpp_compiler", lambda: False)
    reason = "aoti needs a C++ compiler: install g++, or set CXX to the path of one"
    assert engine_named("aoti").reason_against(torch.float32) == reason


@pytest.mark.slow
def test_aoti_computes_what_it_is_compiled_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not has_cpp_compiler():
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    torch.manual_seed(0)
    model, row = Layers().eval(), torch.randn(1, 4)
    aoti = engine_named("aoti")
    assert not aoti.reason_against(torch.float32)
    with torch.no_grad():
        session = aoti.compile(model, [torch.randn(8, 6).t(), row], torch.float32, torch.get_num_threads())
        for rows in (6, 3, 50):
            x = torch.randn(rows, 8)
            found, expected = session([x, row]), model(x, row)
            torch.testing.assert_close(tuple(found), expected)
            found[0].fill_(7)
            torch.testing.assert_close(tuple(session([x, row])), expected)
    for x, other in ((torch.randn(3, 9), row), (torch.randn(3, 8), torch.randn(3, 4)), (torch.randn(2, 3, 8), row)):
        with pytest.raises(OtherSizes):
            session([x, other])
    assert len([*tmp_path.rglob("*.so")]) == 1
    del session
    assert not [*tmp_path.rglob("*.so")]


@openvino_only
@pytest.mark.parametrize("gains", [float("inf"), 0.0])
def test_a_session_for_the_shapes_of_the_example_gives_way_to_others(
    gains: float, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_GAINS", "_GAINS_OF_SMALL"):
        monkeypatch.setattr(f"fxopt.layers.delegated.conversion.{name}", gains)
    model = linears()
    fast = delegated(model, engine)
    held = [each for region in regions(fast) for each in region._converted.values()]
    assert [len(each.fixed) for each in held] == [int(gains > 0)]
    (note,) = (each for each in fxopt.report(fast).notes if each.startswith("openvino holds about "))
    size = byte_text(sum(each.nbytes for each in model.parameters()) * (2 if gains else 1))
    assert note.startswith(f"openvino holds about {size} more, ")
    assert note.endswith(", twice: once for the sizes of the example, once for all others") is bool(gains)
    for rows in (len(X), 3, len(X)):
        x = torch.randn(rows, *X.shape[1:])
        same(fast, model, x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        same(fast, model, X)
    finally:
        torch.set_num_threads(threads)
    freed = fxopt.optimize(fast, "release", measure=False)
    same(freed, model, X)


@openvino_only
@pytest.mark.filterwarnings("ignore::fxopt.EngineWarning")
def test_a_computation_that_fails_at_a_new_shape_leaves_no_trace_in_later_ones(engine: str) -> None:
    """With one thread, OpenVINO's `infer` swallows errors, and then computes the failed call again and again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layers = (nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.AvgPool2d(8, ceil_mode=True))
        model, large, small = nn.Sequential(*layers).eval(), torch.randn(1, 3, 16, 16), torch.randn(1, 3, 3, 3)
        fast = delegated(model, engine, large)
        for x in (large, small, small, large + 1):
            same(fast, model, x)
        other = linears()
        same(delegated(other, engine), other)
        same(fast, model, large + 2)
        assert regions(fast)
    finally:
        torch.set_num_threads(threads)


@openvino_only
@pytest.mark.parametrize("gains", [float("inf"), 0.0])
def test_which_shapes_have_a_session_of_their_own_is_recalled_untimed(
    gains: float, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXOPT_CACHE", str(tmp_path))
    for name in ("_GAINS", "_GAINS_OF_SMALL"):
        monkeypatch.setattr(f"fxopt.layers.delegated.conversion.{name}", gains)
    model, passes = linears(), f"delegate{{engine={engine}}}"
    fxopt.optimize(model, passes, example_inputs=X)
    monkeypatch.delattr("fxopt.layers.delegated.conversion.Converted.settle")
    fast = fxopt.optimize(model, passes, example_inputs=X)
    assert fxopt.report(fast).to_json()["cached"]
    assert [region.is_fixed for region in regions(fast)] == [gains > 0]
    same(fast, model)


@openvino_only
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_a_layer_in_8_bits_scales_its_input_at_any_number_of_rows(engine: str) -> None:
    torch.manual_seed(0)
    values, scales = torch.randint(-60, 60, (16, 32), dtype=torch.int8), torch.rand(16) + 0.5  # no sums overflow
    factors = torch.where(torch.arange(32) % 5 == 0, 0.125, 1.0)
    layer = StaticLinear(values, scales, None, torch.float32, Range(0.02, 0), factors)
    session = engine_named(engine).compile(layer, [torch.rand(4, 32)], torch.int8, 1)
    for rows in (4, 1, 7):
        x = torch.rand(rows, 32)
        expected = Range(0.02, 0).rounded(x * factors) @ (values * scales[:, None]).T
        torch.testing.assert_close(session([x])[0], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torch_traced_has_equal_constants_and_values_once_unless_they_are_written_to() -> None:
    def twice(x: Tensor) -> Tensor:
        written = (x * 2).add_(1)
        return written + x.sum(1, keepdim=True) * (x * 2) + x.sum(1, keepdim=True)

    x = torch.randn(3, 4)
    traced = torch.jit.trace(twice, (x,), check_trace=False)
    kinds = Counter(node.kind() for node in without_repetitions(traced.inlined_graph).nodes())
    before = Counter(node.kind() for node in traced.inlined_graph.nodes())
    assert (before["aten::sum"], kinds["aten::sum"]) == (2, 1)
    assert kinds["prim::Constant"] < before["prim::Constant"]
    assert kinds["aten::mul"] == before["aten::mul"]  # one of the two equal ones is written to
