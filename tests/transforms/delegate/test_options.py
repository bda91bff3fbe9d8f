"""Options of delegate: engines by name, engines that cannot be used, types to compute in, models in training."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.cpus import needs_bfloat16
from support.engines import X, delegated, engines, linears, one_engine, openvino_only, reasons, regions, same

import fxopt
from fxopt.errors import NothingDoneWarning, PipelineError, UsageError
from fxopt.known_passes import check_names
from fxopt.passes.pipeline import parse
from fxopt.transforms.delegate import Delegate
from fxopt.transforms.delegate.delegate import engine_named
from fxopt.transforms.delegate.delegate import engines as known_engines


@engines
def test_an_engine_is_taken_by_its_name(engine: str, computed: list[str]) -> None:
    fast = fxopt.optimize(linears(), f"delegate{{engine={engine}}}", example_inputs=X, measure=False)
    assert {each.engine for each in regions(fast)} == {engine}
    assert [each.choice for each in fxopt.plan(fast).decisions] == [engine]
    assert set(computed) == {engine}


def test_auto_does_not_ask_an_engine_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    for name, each in known_engines().items():
        monkeypatch.setattr(type(each), "reason_against", lambda self, dtype: asked.append(self.name) or "not here")
        assert (name in Delegate()._asked) is (name != "aoti")
    with pytest.warns(NothingDoneWarning):
        delegated(linears(), "auto")
    assert "aoti" not in asked
    with pytest.warns(NothingDoneWarning):
        delegated(linears(), "aoti")
    assert "aoti" in asked


def test_names_and_types_that_there_are_not() -> None:
    with pytest.raises(UsageError, match="there is no engine 'openvno'; did you mean 'openvino'"):
        Delegate("openvno")
    with pytest.raises(PipelineError, match="did you mean 'onnxruntime'"):
        parse("delegate{engine=onnxruntim}")
    with pytest.raises(UsageError, match=r"use torch.float32, torch.bfloat16 or torch.int8; in text delegate"):
        Delegate(dtype=torch.float16)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "auto"])
def test_a_refusal_names_the_package_to_install(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["openvino", "onnxruntime"] if engine == "auto" else [engine]
    for name in names:
        monkeypatch.setattr(
            type(engine_named(name)), "reason_against", lambda self, dtype: f"needs pip install {self.name}"
        )
    model = linears()
    with pytest.warns(NothingDoneWarning):
        fast = delegated(model, engine)
    assert reasons(fast) == {"(root)": "; ".join(f"needs pip install {name}" for name in names)}
    same(fast, model)


@one_engine
def test_a_model_in_training_is_refused(engine: str) -> None:
    with pytest.warns(NothingDoneWarning):
        fast = delegated(linears().train(), engine)
    assert reasons(fast) == {"(root)": "the model is in training; call model.eval() first"}


@openvino_only
def test_bfloat16_within_its_budget(engine: str) -> None:
    model = linears()
    fast = fxopt.optimize(model, f"delegate{{engine={engine},dtype=bfloat16}}", example_inputs=X, measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert (decision.status, decision.numerics) == ("applied", "approximate")
    with torch.no_grad():
        expected, found = model(X), fast(X)
    assert found.dtype is torch.float32
    assert float((found - expected).abs().max()) <= 0.02 * float(expected.abs().max())


def test_an_engine_without_bfloat16_is_refused() -> None:
    with pytest.warns(NothingDoneWarning):
        fast = fxopt.optimize(linears(), "delegate{engine=onnxruntime,dtype=bfloat16}", example_inputs=X, measure=False)
    assert reasons(fast) == {"(root)": "onnxruntime does not compute in bfloat16"}


@one_engine
def test_an_engine_that_does_not_take_a_region_is_told_of(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(type(engine_named(engine)), "compile", refuse)
    model = linears()
    with pytest.warns(NothingDoneWarning):
        fast = delegated(model, engine)
    assert f"{engine} does not take it: no such operator" in str(fxopt.report(fast))
    same(fast, model)


@one_engine
def test_a_preset_behind_an_engine_is_not_said_to_change_nothing(engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingDoneWarning)
        fast = fxopt.optimize(linears(), f"delegate{{engine={engine}}}, inference", example_inputs=X, measure=False)
    assert regions(fast)
    with pytest.raises(PipelineError, match=r"an engine goes into the pass: delegate\{engine=...\},inference"):
        check_names("inference{engine=openvino}")


@needs_bfloat16
@openvino_only
def test_what_bfloat16_is_too_coarse_for_is_computed_in_float32(engine: str, computed: list[str]) -> None:
    model, passes = linears(), f"delegate{{engine={engine},dtype=bfloat16,budget=1e-5}}"
    fast = fxopt.optimize(model, passes, example_inputs=X, measure=False)
    assert [(each.dtype, each.left) for each in regions(fast)] == [(torch.float32, "")]
    assert [each.choice for each in fxopt.plan(fast).decisions] == [f"{engine} float32"]
    computed.clear()
    same(fast, model)
    assert computed
    again = fxopt.optimize(model, plan=fxopt.plan(fast), example_inputs=X)
    assert [each.dtype for each in regions(again)] == [torch.float32]


@openvino_only
def test_engines_without_bfloat16_compute_float32_where_any_may(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine_named(engine)), "dtypes", (torch.float32,))
    fast = fxopt.optimize(linears(), "delegate{dtype=bfloat16}", example_inputs=X, measure=False)
    assert [each.choice for each in fxopt.plan(fast).decisions] == [f"{engine} float32"]
