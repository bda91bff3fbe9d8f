"""quantize{scheme=int8_static}: chains of layers that pass on numbers, calibration, budget, state, refusals."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from support.cpus import needs_static_int8
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxopt
from fxopt.errors import CalibrationError, ModeError, UsageError
from fxopt.passes.pipeline import parse
from fxopt.transforms.calibration import ranges_of
from fxopt.transforms.quantize import Quantize
from fxopt.transforms.quantize.options import Options
from fxopt.transforms.quantize.static.scaling import InputForm
from fxopt.transforms.quantize.static.sensitivity import sensitivity

pytestmark = needs_static_int8
X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two convolutions with batch norms, a pool, two linears: one chain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, affine=False)
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout()
        self.up, self.down = nn.Linear(256, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.pool(self.norm2(self.second(x)).relu_())
        x = x.view(x.size(0), -1)
        return self.down(self.drop(F.relu(self.up(x))))


class Branches(nn.Module):
    """Three layers read one tensor; a residual addition; `view` behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (self.left(x) + self.right(x) + x).view(x.shape[0], -1)


def trained(model: nn.Module) -> nn.Module:
    """Give batch norms statistics of their own."""
    with torch.no_grad():
        for number in range(3):
            model(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(number)) * 2)
    return model.eval()


@pytest.fixture
def net() -> nn.Module:
    return trained(Net())


def optimized(model: nn.Module, x: Any = X, **options: Any) -> Any:
    pass_ = Quantize(scheme="int8_static", **{"aim": "size", **options})
    return fxopt.optimize(model, pass_, example_inputs=x)


def statuses(model: nn.Module) -> list[str]:
    return [decision.status for decision in fxopt.plan(model).decisions]


def reasons(model: nn.Module) -> str:
    return "; ".join(decision.reason for decision in fxopt.plan(model).decisions)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def is_static(module: nn.Module) -> bool:
    return type(module).__name__ in ("StaticLinear", "StaticConv")


def run(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model(x)


def simulated(fast: nn.Module, model: nn.Module) -> nn.Module:
    """Return a model that computes in float64 what each layer stands for, and all else as it is."""
    simulation = copy.deepcopy(model).double()
    for name, layer in fast.named_modules():
        if is_static(layer):
            own, static = cast("Any", simulation.get_submodule(name)), cast("Any", layer)
            own.weight.data = static.weight.double()
            own.register_forward_pre_hook(lambda _, args, of_input=static.range: (of_input.rounded(args[0]),))
    return simulation


def cnn() -> nn.Sequential:
    """Return modules one behind the other: a batch norm, a ReLU and a reshape between layers."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    return cast("nn.Sequential", trained(nn.Sequential(*layers)))


class Halved(nn.Module):
    """Half of what a layer gives; it takes nothing but the input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / 2


CHANGES: dict[str, Any] = {
    "another activation": lambda model: model.__setitem__(2, nn.Sigmoid()),
    "no norm": lambda model: model.__setitem__(1, nn.Identity()),
    "a setting of the norm": lambda model: setattr(model[1], "eps", 0.5),
    "a wrapped layer": lambda model: model.__setitem__(3, Halved(model[3])),
    "a new layer": lambda model: model.__setitem__(3, nn.Conv2d(16, 8, 3)),
    "a forward of its own": lambda model: setattr(model[2], "forward", torch.sigmoid),
    **{f"a hook on {at}": lambda model, at=at: model[at].register_forward_hook(lambda *args: args[2] / 2)
       for at in range(6)},
    **{f"a hook before {at}": lambda model, at=at: model[at].register_forward_pre_hook(lambda _, args: (args[0] / 2,))
       for at in range(6)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::fxopt.errors.GuardWarning")
def test_what_becomes_of_members_afterwards_counts():
    model = cnn()
    fast = optimized(model)
    for name, change in CHANGES.items():
        changed, expected = copy.deepcopy(fast), copy.deepcopy(model)
        for each in (changed, expected):
            torch.manual_seed(1)
            change(each)
        assert error(run(changed), run(expected)) < 0.06, name
    assert error(run(pickle.loads(pickle.dumps(fast))), run(fast)) == 0


def test_hooks_meet_floats():
    fast, seen = optimized(cnn()), list[torch.dtype]()
    handle = fast[4].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with pytest.warns(fxopt.GuardWarning, match=r"a hook would meet numbers.*Set it before"):
        run(fast)
    handle.remove()
    with nn.modules.module.register_module_forward_hook(lambda *args: seen.append(args[2].dtype)):  # noqa: SIM117
        with pytest.warns(fxopt.GuardWarning, match=r"hooks on all modules.*Set it before"):
            run(fast)
    assert set(seen) == {torch.float32} and len(seen) == 8


def test_layers_pass_on_numbers(net: nn.Module):
    fast = optimized(net)
    assert statuses(fast) == ["applied"]
    calls = [node for node in fxopt.graphs(fast)[""].nodes if node.op == "call_module"]
    assert [node.target for node in calls] == ["first", "second", "up", "drop", "down"]
    assert [node.kwargs.get("activation") for node in calls] == ["relu", "relu", "relu", None, None]
    assert [node.kwargs.get("output") is not None for node in calls] == [True, True, True, False, False]
    assert 0 < error(run(fast), run(net)) < 0.05


@pytest.mark.parametrize("kind", [Net, Branches])
def test_results_are_those_of_the_simulation_to_one_step(kind: type[nn.Module]):
    model = trained(kind())
    fast = optimized(model)
    assert set(statuses(fast)) == {"applied"}
    expected = run(simulated(fast, model), X.double())
    # One number of an activation may fall on the other side where it is halfway between two.
    step = 1 / 127 if kind is Net else 2 / 127
    assert error(run(fast), expected) < step


def test_any_number_of_rows_and_any_layout(net: nn.Module):
    fast = optimized(net)
    for rows in (1, 13):
        x = torch.randn(rows, 3, 8, 8)
        assert error(run(fast, x), run(net, x)) < 0.1
    assert torch.equal(run(fast, X.to(memory_format=torch.channels_last)), run(fast))


def test_numbers_are_made_once_for_several_layers():
    fast = optimized(trained(Branches()))
    assert set(statuses(fast)) == {"applied"}
    nodes = list(fxopt.graphs(fast)[""].nodes)
    assert sum(getattr(node.target, "__name__", "") == "to_numbers" for node in nodes) == 1
    assert sum(node.target == "reshape" for node in nodes) == 1
    assert error(run(fast), run(trained(Branches()))) < 0.05


def test_the_forward_of_the_user_runs_with_the_layers_too(net: nn.Module):
    fast = optimized(net)
    assert error(Net.forward(fast, X).detach(), run(fast)) < 0.02  # pyright: ignore[reportArgumentType]


def test_a_layer_that_is_called_twice_and_one_in_other_code():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(self.layer(x))
            return self.other(x) if float(x.sum()) > -1e9 else x

    model, x = Twice().eval(), torch.randn(4, 8)
    fast = optimized(model, x)
    assert statuses(fast) == ["applied", "applied"]
    assert is_static(fast.layer) and is_static(fast.other)
    assert error(run(fast, x), run(model, x)) < 0.05


@pytest.mark.parametrize("observer", ["histogram", "minmax", "moving_average"])
def test_calibration_data_in_every_form(net: nn.Module, observer: str):
    loader = DataLoader(TensorDataset(X, torch.zeros(6)), batch_size=3)
    scales: list[float] = []
    for data in (loader, iter([(X[:3], 0), (X[3:], 0)]), [X[:3], fxopt.Inputs(X[3:])]):
        fast = optimized(net, calibration=data, observer=observer)
        assert statuses(fast) == ["applied"]
        scales.append(fast.first.range.scale)
    assert len(set(scales)) == 1
    assert optimized(net, calibration=[X * 3], observer=observer).first.range.scale > 2 * scales[0]
    assert optimized(net, calibration=[X, X * 3], batches=1, observer=observer).first.range.scale < 2 * scales[0]


def test_what_calibration_does_is_not_seen_on_the_model(net: nn.Module):
    before = copy.deepcopy(net.state_dict())
    fast = optimized(net)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in fast.modules())


def test_bad_calibration_data_is_one_clear_error(net: nn.Module):
    for data, message in (
        ([], "no batches"),
        (5, "of type int"),
        ([torch.randn(2, 4, 8, 8)], "does not take calibration batch 0: RuntimeError"),
        ([X, X * float("nan")], "the input of 'first' is not finite"),
    ):
        with pytest.raises(CalibrationError, match=message):
            optimized(net, calibration=data)
    with pytest.raises(CalibrationError, match="no calibration data; give calibration=, or example_inputs"):
        optimized(net, x=None)
    for options in ({"batches": 0}, {"observer": "histogramm"}):
        with pytest.raises(UsageError, match=next(iter(options))):
            optimized(net, **options)


def test_the_most_costly_layers_stay_in_floats(net: nn.Module):
    whole = optimized(net, budget=0.05)
    worst = max(fxopt.plan(whole).decisions[0].site["data"]["layers"], key=lambda layer: layer["error"])
    assert 0 < worst["error"] < 0.05 and "%" in str(fxopt.report(whole).table())
    fast = optimized(net, budget=error(run(whole), run(net)) / 2)
    assert "refused" in statuses(fast) and "applied" in statuses(fast)
    assert "quantized alone, it moves the model's results by about" in reasons(
        fast
    ) and "with all layers the whole model would err by" in reasons(fast)
    assert error(run(fast), run(net)) < error(run(whole), run(net)) / 2
    none = optimized(net, budget=1e-6)
    assert torch.equal(run(none), run(net))


def test_layers_are_tried_alone_on_a_part_of_the_call(net: nn.Module):
    rows: list[int] = []
    net.up.register_forward_hook(lambda layer, args, result: rows.append(len(args[0])))
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    program = fxopt.capture(net, x)
    ranges = ranges_of(
        program, {n: program.module(n) for n in ("first", "second", "down")}, program.whole_calls, "minmax"
    )
    rows.clear()
    forms = {name: InputForm(each) for name, each in ranges.items()}
    found = sensitivity(program, forms, Options(scheme="int8_static", budget=1e-6), program.whole_calls)
    assert set(found.left) == set(ranges) and all(0 < error < 1 for error in found.alone.values())
    assert rows.count(8) == 1 + 5  # in floats, with all rounded, and twice with either half
    assert rows.count(64) == 2 + 2  # in floats, with all rounded, and twice halving


def test_a_cpu_without_exact_sums_is_named(net: nn.Module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxopt.transforms.quantize.options.why_no_static_int8", lambda: "sums overflow here")
    with pytest.raises(UsageError, match="scheme=int8_static does not run here: sums overflow here"):
        optimized(net)


def test_weights_without_range_and_layers_of_one_channel():
    torch.manual_seed(0)
    x, model = torch.randn(4, 1, 8, 8), nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(), nn.Conv2d(1, 1, 1)).eval()
    for _ in range(2):
        fast = optimized(model, x)
        assert set(statuses(fast)) == {"applied"}
        assert error(run(fast, x), run(model, x)) < 0.05
        nn.init.zeros_(model[2].weight)


def test_weights_and_data_that_are_not_finite_or_empty(net: nn.Module):
    nn.init.constant_(net.first.weight, float("nan"))
    with pytest.raises(
        CalibrationError, match="is not finite on the calibration data; check the data, and the weights"
    ):
        optimized(net)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    assert "the calibration data never reaches it, or is empty there" in reasons(optimized(plain, calibration=[X[:0]]))


def test_what_is_refused(net: nn.Module):
    kept = optimized(net, keep=("second",))
    assert type(kept.second) is nn.Conv2d and is_static(kept.first)
    assert "weight=[16, 3, 3, 3], bias=True" in repr(kept.first)
    with pytest.raises(UsageError, match="in training"):
        optimized(Net().train())
    assert "float64" in reasons(optimized(trained(Net()).double(), X.double()))
    net.pool.lone = nn.Linear(3, 3)
    assert "the calibration data never reaches it" in reasons(optimized(net))
    reflecting = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU()).eval()
    assert "its padding is not the same number of zeros" in reasons(optimized(reflecting))
    net.down.weight.data[0] = float("nan")
    assert "'down.weight' has elements that are not finite" in reasons(optimized(net))
    net.first.weight.data[0] = float("nan")
    with pytest.raises(CalibrationError, match="the input of 'second' is not finite"):
        optimized(net)


def test_copies_pickles_and_threads(net: nn.Module):
    fast, expected = optimized(net), run(optimized(net))
    assert torch.equal(run(copy.deepcopy(fast)), expected)
    assert torch.equal(run(pickle.loads(pickle.dumps(fast))), expected)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(run(fast))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(torch.equal(each, expected) for each in found)


def test_state_goes_there_and_back(net: nn.Module):
    fast = optimized(net)
    state = fast.state_dict()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in net.state_dict().items()}
    expected = run(fast)
    fast.load_state_dict(state)
    assert torch.equal(run(fast), expected)
    other = trained(Net())
    other.norm.running_var.mul_(4)  # pyright: ignore[reportCallIssue]
    other.second.weight.data.neg_()  # pyright: ignore[reportCallIssue]
    fast.load_state_dict(other.state_dict())
    assert error(run(fast), run(other)) < 0.05
    fast.load_state_dict(net.state_dict())
    assert torch.equal(run(fast), expected)
    assert error(run(fxopt.restore(fast)), run(net)) < 0.02


def test_plans_and_archives_repeat_the_ranges(net: nn.Module, tmp_path: Path):
    fast = optimized(net, calibration=[X * 2])
    again = fxopt.optimize(net, plan=fxopt.plan(fast))
    assert torch.equal(run(again), run(fast))
    fxopt.save(fast, tmp_path / "net.fxopt")
    loaded = fxopt.load(tmp_path / "net.fxopt", model=Net().eval())
    assert torch.equal(run(loaded), run(fast))


def test_a_plan_on_a_tied_or_other_model_is_refused():
    x, layers = torch.randn(8, 16), (nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    plan = fxopt.plan(optimized(nn.Sequential(*layers).eval(), x))
    tied = copy.deepcopy(nn.Sequential(*layers).eval())
    cast("nn.Linear", tied[2]).weight = cast("nn.Linear", tied[0]).weight
    with pytest.raises(fxopt.PlanError, match="tied to"):
        fxopt.optimize(tied, plan=plan, example_inputs=x)
    with pytest.raises(fxopt.PlanError, match="float64"):
        fxopt.optimize(nn.Sequential(*layers).eval().double(), plan=plan, example_inputs=x.double())


def test_a_range_that_is_none_is_told_by_a_plan(net: nn.Module):
    written = fxopt.plan(optimized(net)).to_json()
    for settings in ({"scale": 0.0}, {"zero_point": 300}, {"output": [-1.0, 0]}):
        edited = copy.deepcopy(written)
        edited["decisions"][0]["site"]["data"]["layers"][0].update(settings)
        with pytest.raises(fxopt.FxoptError, match="of an activation is"):
            fxopt.optimize(net, plan=fxopt.Plan.from_json(edited), example_inputs=X)


def test_a_checkpoint_that_is_not_finite_is_refused(net: nn.Module):
    fast, state = optimized(net), net.state_dict()
    state["second.weight"] = state["second.weight"].clone()
    state["second.weight"][0, 0, 0, 0] = float("nan")
    with pytest.raises(fxopt.StateError, match=r"'second.weight' has elements that are not finite"):
        fast.load_state_dict(state)


def test_size_on_disk_shrinks(tmp_path: Path):
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.randn(4, 256)
    for name, each in (("before", fxopt.optimize(model, [], example_inputs=x)), ("after", optimized(model, x))):
        fxopt.save(each, tmp_path / name)
    assert (tmp_path / "after").stat().st_size < 0.4 * (tmp_path / "before").stat().st_size


def test_it_cannot_be_trained(net: nn.Module):
    with pytest.raises(ModeError, match="quantize"):
        optimized(net).train()


def test_twice_is_once(net: nn.Module):
    fast = optimized(net)
    again = optimized(fast)
    assert torch.equal(run(again), run(fast))


def test_text_leaves_the_data_out():
    pass_ = Quantize(scheme="int8_static", observer="minmax", batches=4, calibration=[X])
    assert str(pass_) == "quantize{scheme=int8_static,observer=minmax,batches=4}"
    assert parse(str(pass_)) == (pass_,)


def test_norms_fold_into_what_is_quantized_and_into_the_rest(net: nn.Module):
    fast = fxopt.optimize(
        net, "prune,fold_batchnorm,quantize{scheme=int8_static,aim=size,keep=[second]}", example_inputs=X, measure=False
    )
    assert fxopt.plan(fast).pipeline[1:] == ("quantize{scheme=int8_static,keep=[second],aim=size}", "fold_batchnorm")
    alone = optimized(fxopt.optimize(net, "prune", example_inputs=X), keep="second")
    assert is_static(fast.first) and not is_static(fast.second)
    assert error(run(fast), run(alone)) < 1e-5

    folded = fxopt.optimize(net, "fold_batchnorm", example_inputs=X, measure=False)
    refused = [d.reason for d in fxopt.plan(optimized(folded)).decisions if d.status == "refused"]
    assert len(refused) == 2 and all("int8_static folds norms itself: begin with" in reason for reason in refused)
    assert all("list quantize{scheme=int8_static} before fold_batchnorm" in reason for reason in refused)


def test_it_comes_before_the_preset_that_quantizes_linear_layers(net: nn.Module):
    static = Quantize(scheme="int8_static", calibration=[X])
    right = fxopt.optimize(net, [static, "inference{dtype=int8}"], example_inputs=X, measure=False)
    assert is_static(right.first) and is_static(right.second)
    wrong = fxopt.optimize(net, ["inference{dtype=int8}", static], example_inputs=X, measure=False)
    assert not is_static(wrong.first)
    assert any("before fold_batchnorm or the preset that has it" in d.reason for d in fxopt.plan(wrong).decisions)


def test_a_norm_behind_a_layer_in_floats_is_folded_beside_the_quantized_ones(net: nn.Module):
    pipeline = "fold_batchnorm,quantize{scheme=int8_static,aim=size,keep=[second]}"
    fast = fxopt.optimize(net, pipeline, example_inputs=X, measure=False)
    applied = [(d.pass_name, d.status) for d in fxopt.plan(fast).decisions]
    assert applied.count(("fold_batchnorm", "applied")) == 1 and ("quantize", "applied") in applied
    assert error(run(fast), run(optimized(net, keep="second"))) < 1e-4
    assert error(run(fast), run(net)) < 0.05


def test_an_image_without_a_batch_is_refused_as_the_norm_does(net: nn.Module):
    fast = optimized(net)
    assert is_static(fast.first)
    with pytest.raises(ValueError, match="expected 4D input"):
        net(X[0])
    with pytest.raises(fxopt.GuardError, match="4 dimensions, but this input has 3; add that of the batch"):
        fast(X[0])


def test_the_preset_before_it(net: nn.Module):
    fast = fxopt.optimize(net, "inference,quantize{scheme=int8_static,aim=size}", example_inputs=X, measure=False)
    assert any(is_static(module) for module in fast.modules())
    assert error(run(fast), run(net)) < 0.05
