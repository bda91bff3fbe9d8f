"""The table of engines, and why one cannot be used."""

from __future__ import annotations

import pytest
import torch
from support.engines import X, delegated, linears, openvino_only, regions, same

import fxopt
from fxopt.errors import UsageError
from fxopt.layers.delegated import engine, engine_named, engines


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


def test_a_model_that_is_too_large_for_onnx_is_refused_before_it_is_exported() -> None:
    pytest.importorskip("onnxruntime")
    model = torch.nn.Module()
    model.register_buffer("weight", torch.zeros(1).expand(2**29))  # takes no memory
    with pytest.raises(ValueError, match=r"its tensors take 2 GiB, and an ONNX model has less than 2"):
        engine_named("onnxruntime").compile(model, [torch.zeros(1)], torch.float32, 1)


def test_types_and_names_that_there_are_not() -> None:
    assert list(engines())[:2] == ["openvino", "onnxruntime"]
    assert engine_named("onnxruntime").reason_against(torch.bfloat16) == "onnxruntime does not compute in bfloat16"
    with pytest.raises(UsageError, match="there is no engine 'openvno'; did you mean 'openvino'"):
        engine_named("openvno")


@openvino_only
@pytest.mark.parametrize("gains", [float("inf"), 0.0])
def test_a_session_for_the_shapes_of_the_example_gives_way_to_others(
    gains: float, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxopt.layers.delegated.conversion._GAINS", gains)
    model = linears()
    fast = delegated(model, engine)
    held = [each for region in regions(fast) for each in region._converted.values()]
    assert [len(each.fixed) for each in held] == [int(gains > 0)]
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
