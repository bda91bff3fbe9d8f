"""qat: layers that round while they are trained, ranges that move or are learned, freezing, state, and conversion."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.cpus import needs_static_int8
from torch import Tensor, nn

import fxopt
from fxopt.compat.quantized import static_format
from fxopt.errors import CalibrationError, PlanError, UsageError
from fxopt.passes.pipeline import parse
from fxopt.runtime.state import FORMATS
from fxopt.transforms.qat import Qat, freeze

OBSERVERS = ("moving_average", "learned")
X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.head = nn.Conv2d(8, 8, 3, bias=False), nn.Linear(8 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.relu(self.conv2(x)).flatten(1))


def prepared(model: nn.Module | None = None, x: Any = X, **options: Any) -> Any:
    return fxopt.optimize(model or Net(), Qat(**options), example_inputs=x, phase="train")


def trained(model: Any, steps: int = 6) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), LABELS).backward()
        optimizer.step()
    return model


def run(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model(x)


def converted(model: nn.Module, **options: Any) -> Any:
    pass_ = fxopt.transforms.quantize.Quantize(scheme="int8_static", aim="size", **options)
    return fxopt.optimize(model.eval(), pass_, example_inputs=X)


def statuses(model: nn.Module) -> list[str]:
    return [decision.status for decision in fxopt.plan(model).decisions]


@pytest.mark.parametrize("observer", OBSERVERS)
def test_layers_round_in_their_places(observer: str):
    model = Net()
    fast = prepared(model, observer=observer)
    assert statuses(fast) == ["applied"] * 4
    kinds = [type(child).__name__ for child in fast.children()]
    assert kinds == ["FakeQuantizedConv2d", "FreezableBatchNorm2d", "FakeQuantizedConv2d", "FakeQuantizedLinear"]
    assert isinstance(fast.conv, nn.Conv2d) and type(model.conv) is nn.Conv2d
    found, expected = run(fast.eval()), run(model.eval())
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_weights_and_inputs_are_on_their_grids():
    fast = prepared().eval()
    seen: list[Tensor] = []
    fast.conv2._computed = lambda x, weight: seen.extend((x, weight)) or F.conv2d(x, weight)
    run(fast)
    numbers = seen[0] / fast.conv2.input_range.scale
    assert (numbers - numbers.round()).abs().max() < 1e-3
    rows = seen[1].flatten(1) / seen[1].flatten(1).abs().amax(1, keepdim=True) * FORMATS[static_format()]
    assert (rows - rows.round()).abs().max() < 1e-3


@needs_static_int8
def test_a_batch_norm_takes_the_statistics_that_it_will_be_folded_with():
    """One scale for each output commutes with the fold: what is trained is what the folded layer computes."""
    fast = trained(prepared()).eval()
    static = converted(fast)
    assert [node.target for node in fxopt.graphs(static)[""].nodes if node.op == "call_module"] == [
        "conv",
        "conv2",
        "head",
    ]
    assert (run(static) - run(fast)).abs().max() < 1 / 127 * run(fast).abs().max()


@pytest.mark.parametrize("observer", OBSERVERS)
@needs_static_int8
def test_the_converted_model_is_what_was_trained_to_one_step(observer: str):
    fast = trained(prepared(observer=observer))
    static = converted(fast)
    assert statuses(static)[-1] == "applied"
    assert static.conv2.range == fast.conv2.input_range
    assert (run(static) - run(fast)).abs().max() < 1 / 127 * run(fast).abs().max()
    # Without any data the ranges are there, too.
    assert converted(fast).head.range == fast.head.input_range


@pytest.mark.parametrize("observer", OBSERVERS)
def test_training_goes_down_and_moves_the_ranges(observer: str):
    fast = prepared(observer=observer)
    before, loss = fast.conv2.input_range, F.cross_entropy(run(fast), LABELS)
    trained(fast, 8)
    assert F.cross_entropy(run(fast), LABELS) < loss
    assert fast.conv2.input_range != before
    scales = [name for name, _ in fast.named_parameters() if name.endswith("input_scale")]
    assert len(scales) == (3 if observer == "learned" else 0)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_ranges_and_statistics_freeze_after_some_steps(observer: str):
    fast = trained(prepared(observer=observer, freeze_after=3), 4)
    known, mean = fast.conv2.input_range, fast.norm.running_mean.clone()
    trained(fast, 2)
    assert fast.conv2.input_range == known and torch.equal(fast.norm.running_mean, mean)
    assert not fast.train().norm.training and fast.conv.training
    weight = fast.conv.weight.clone()
    assert not torch.equal(trained(fast, 1).conv.weight, weight)


def test_a_user_freezes_when_it_is_time():
    fast = prepared()
    freeze(fast, ranges=False)
    assert fast.norm.frozen and not fast.conv.frozen and not fast.norm.training
    freeze(fast, norms=False)
    known = fast.conv.input_range
    trained(fast, 1)
    assert fast.conv.input_range == known


@pytest.mark.parametrize("observer", OBSERVERS)
def test_state_is_the_users_and_what_was_observed(observer: str):
    fast, model = trained(prepared(observer=observer, freeze_after=4)), Net()
    state = fast.state_dict()
    assert [name for name in state if name in model.state_dict()] == list(model.state_dict())
    assert {name.rpartition(".")[2] for name in state} > {"input_scale", "input_zero_point", "forwards", "frozen"}
    resumed = prepared(observer=observer, freeze_after=4)
    resumed.load_state_dict(state)
    assert torch.equal(run(resumed.eval()), run(fast.eval()))
    assert not resumed.train().norm.training
    resumed.load_state_dict(model.state_dict())  # a checkpoint from before: the ranges stay
    assert torch.equal(resumed.conv.weight, model.conv.weight)
    assert resumed.conv2.input_range == fast.conv2.input_range
    restored = fxopt.restore(fast)
    assert type(restored.conv) is nn.Conv2d and torch.equal(restored.conv.weight, fast.conv.weight)


@needs_static_int8
def test_a_converted_model_keeps_the_state_of_training():
    fast = trained(prepared())
    static = converted(fast)
    saved = static.state_dict()
    assert sorted(saved) == sorted(fast.state_dict())
    assert all(torch.equal(saved[name], value) for name, value in fast.state_dict().items() if "input_" in name)
    static.load_state_dict(fast.state_dict())
    assert (run(static) - run(fast)).abs().max() < 1 / 127 * run(fast).abs().max()


@needs_static_int8
def test_copies_pickles_plans_and_archives(tmp_path: Path):
    fast = trained(prepared()).eval()
    assert torch.equal(run(copy.deepcopy(fast)), run(fast))
    assert torch.equal(run(pickle.loads(pickle.dumps(fast))), run(fast))
    again = fxopt.optimize(Net(), plan=fxopt.plan(fast)).eval()
    again.load_state_dict(fast.state_dict())
    assert torch.equal(run(again), run(fast))
    for model in (fast, converted(fast)):
        fxopt.save(model, tmp_path / "net.fxopt")
        assert torch.equal(run(fxopt.load(tmp_path / "net.fxopt", model=Net())), run(model))


@needs_static_int8
def test_a_plan_of_a_later_pass_names_the_model_that_it_is_for():
    fast = trained(prepared())
    static = converted(fast)
    said = "site conv.* of pass 'qat' cannot be rewritten: it is a FakeQuantizedConv2d by now; repeat the plan on the"
    with pytest.raises(PlanError, match=said):
        fxopt.optimize(fast, plan=fxopt.plan(static))
    again = fxopt.optimize(Net().eval(), plan=fxopt.plan(static), example_inputs=X)
    again.load_state_dict(static.state_dict())
    assert again(X).shape == (16, 4)


def on_rank_trained() -> Any:
    """Two processes, each with half of the rows; the range is that of rank 0, as batch norms' statistics are."""
    fast = fxopt.optimize(Net(), "qat,ddp", example_inputs=X[:8], phase="train")
    optimizer, half = torch.optim.SGD(fast.parameters(), lr=0.05), slice(8 * torch.distributed.get_rank(), None, None)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(fast(X[half][:8]), LABELS[half][:8]).backward()
        optimizer.step()
    fast(X[:8])
    return {name: value.clone() for name, value in fast.state_dict().items()}


def test_processes_train_one_model(of_ranks: list[dict[str, Any]]):
    first, second = (each["trained"] for each in of_ranks)
    assert any(name.endswith("input_scale") for name in first)
    parameters = [name for name in first if name.endswith(("weight", "bias"))]
    assert all(torch.allclose(first[name], second[name]) for name in parameters)
    start = Net().state_dict()
    assert not torch.equal(first["conv.weight"], start["conv.weight"])


def test_twice_is_once():
    fast = prepared()
    again = prepared(fast)
    assert type(again.conv) is type(fast.conv) and again.conv.input_range == fast.conv.input_range


def test_what_is_refused():
    kept = prepared(keep=("conv2", "norm"))
    assert type(kept.conv2) is nn.Conv2d and type(kept.norm) is nn.BatchNorm2d
    with pytest.raises(CalibrationError, match="qat has no calibration data"):
        prepared(x=None)
    with pytest.raises(CalibrationError, match="does not take calibration batch 0"):
        prepared(calibration=[torch.randn(2, 5, 8, 8)])
    for options in ({"observer": "lsq"}, {"freeze_after": 0}, {"batches": True}, {"keep": ("konv",)}):
        with pytest.raises(UsageError, match=f"pass 'qat': {next(iter(options))}"):
            prepared(**options)


@given(st.sampled_from(OBSERVERS), st.none() | st.integers(1, 10**6), st.booleans(), st.integers(1, 99))
def test_text_is_read_back(observer: Any, freeze_after: int | None, per_channel: bool, batches: int):
    pass_ = Qat(observer=observer, freeze_after=freeze_after, per_channel=per_channel, batches=batches)
    assert parse(str(pass_)) == (pass_,)
    assert str(Qat(calibration=[X])) == "qat"


@needs_static_int8
def test_an_archive_loads_into_a_model_that_is_trained_for_8_bits(tmp_path: Path):
    model = trained(prepared())
    fast = converted(model)
    fxopt.save(fast, tmp_path / "model.fxopt")
    for given_model in (Net(), prepared(), model):
        loaded = fxopt.load(tmp_path / "model.fxopt", model=given_model)
        assert torch.equal(run(loaded), run(fast))
    assert type(model.conv).__name__ == "FakeQuantizedConv2d"


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int8_weight"])
def test_other_schemes_name_the_one_that_takes_over_the_ranges(scheme: str):
    fast = fxopt.optimize(prepared().eval(), f"quantize{{scheme={scheme}}}", example_inputs=X, measure=False)
    reasons = {decision.label: decision.reason for decision in fxopt.plan(fast).decisions if decision.step}
    assert set(reasons) == {"conv", "conv2", "head"}
    assert all("it was trained for int8_static, which takes over its ranges" in each for each in reasons.values())
