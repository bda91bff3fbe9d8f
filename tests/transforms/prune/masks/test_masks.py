"""Masks over single weights: which go, that they stay gone, and that all else is as it was."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxopt
from fxopt.errors import BudgetError, StateError, UsageError
from fxopt.transforms.prune import Prune, PruningSchedule, masks, remove_masks, set_masks


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, 4))


X = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))
WEIGHTS = ("0.weight", "4.weight", "6.weight")


def pruned(model: nn.Module | None = None, inputs: object = X, **options: Any) -> Any:
    options = {"amount": 0.7, **options}
    return fxopt.optimize(model or network(), Prune(**options), example_inputs=inputs)


def applied(model: nn.Module) -> list[str]:
    return [decision.label for decision in fxopt.plan(model).decisions if decision.status == "applied"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def with_zeros(model: nn.Module, kept: dict[str, Tensor]) -> nn.Module:
    """Return the model with zeros where masks say so: what pruning promises."""
    reference = copy.deepcopy(model)
    for name, flags in kept.items():
        reference.get_parameter(name).data.mul_(flags)
    return reference


# -- which go ---------------------------------------------------------------------------------------------------------


def test_the_smallest_of_all_go():
    model = network()
    fast = pruned(model)
    values = torch.cat([model.get_parameter(name).detach().abs().flatten() for name in WEIGHTS])
    gone = ~torch.cat([masks(fast)[name].flatten() for name in WEIGHTS])
    assert int(gone.sum()) == round(0.7 * values.numel())
    assert values[gone].max() <= values[~gone].min()
    assert applied(fast) == ["0", "4", "6"]
    checked = {decision.figures["checked"] for decision in fxopt.plan(fast).decisions}
    assert checked == {"float64"}
    torch.testing.assert_close(fast(X), with_zeros(model, masks(fast))(X))


@pytest.mark.parametrize("method", ["magnitude", "random"])
def test_each_layer_gives_its_share(method: str):
    fast = pruned(method=method, scope="layer", amount=0.5)
    assert [int((~flags).sum()) * 2 for flags in masks(fast).values()] == [108, 1536, 64]


def test_random_is_another_with_another_seed():
    first, again, other = (masks(pruned(method="random", seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_scores_decide_where_they_are_given():
    scores = {"6.weight": torch.arange(64.0).reshape(4, 16)}
    fast = pruned(scope="layer", amount=0.25, scores=scores)
    assert torch.equal(~masks(fast)["6.weight"], scores["6.weight"] < 16)


def test_layers_are_left_out():
    assert applied(pruned(keep=("0", "Linear"), amount=0.3)) == []
    assert applied(pruned(keep=("4*",), amount=0.3)) == ["0", "6"]


def test_what_cannot_be_masked_is_refused_by_name():
    class Odd(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model = nn.Sequential(nn.Linear(4, 4), Odd(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    model[3].weight = model[0].weight
    decisions = fxopt.plan(pruned(model, torch.randn(3, 4))).decisions
    assert {decision.label: decision.reason for decision in decisions} == {
        "0": "its weight is tied to '3.weight'",
        "1": "it is a Odd, which has a forward of its own",
        "2": "it has hooks, which see the layer itself",
        "3": "its weight is tied to '0.weight'",
    }


def test_nothing_left_of_a_layer_is_an_error():
    model = network()
    model[6].weight.data.mul_(1e-6)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError, match=r"amount=0\.7 leaves nothing of '6\.weight'; give less"):
        pruned(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LSTM(8, 6, num_layers=2), (5, 3, 8)),
        (nn.GRU(8, 6, bidirectional=True), (5, 3, 8)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (5, 3, 8)),
        (nn.ConvTranspose2d(8, 4, 3, groups=2), (3, 8, 5, 5)),
        (nn.Conv1d(8, 4, 3, groups=4), (3, 8, 5)),
    ],
    ids=["lstm", "gru", "attention", "transposed", "grouped"],
)
def test_other_layers_train_with_masks(layer: nn.Module, shape: tuple[int, ...]):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y[0] if isinstance(y, tuple) else y

    x, model = torch.randn(shape), Model()
    fast = pruned(model, x, scope="layer", amount=0.5)
    assert {name.rpartition(".")[2] for name in masks(fast)} <= {
        n.rpartition(".")[2] for n, _ in model.named_parameters()
    }
    assert masks(fast)
    torch.testing.assert_close(fast(x), with_zeros(model, masks(fast))(x))
    kept = masks(fast)
    train(fast, torch.optim.SGD(fast.parameters(), 0.05, momentum=0.9), x)
    assert all(not bool(fast.state_dict()[name][~flags].any()) for name, flags in kept.items())
    torch.testing.assert_close(fast(x), with_zeros(fxopt.restore(fast), kept)(x))


# -- that they stay gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_from_before_does_not_bring_them_back(optimizer: type[torch.optim.Optimizer]):
    model = network()
    stepping = optimizer(model.parameters(), lr=0.003)  # type: ignore[call-arg]
    train(model, stepping)
    fast = fxopt.optimize(model, Prune(amount=0.7), example_inputs=X, optimizer=stepping)
    kept, before = masks(fast), copy.deepcopy(fast.state_dict())
    moments = [value for value in stepping.state[fast[4].weight].values() if value.ndim]
    assert moments and all(not bool(value[~kept["4.weight"]].any()) for value in moments)
    train(fast, stepping)
    for name, flags in kept.items():
        assert not bool(fast.state_dict()[name][~flags].any())
        assert not torch.equal(fast.state_dict()[name], before[name])


def test_they_stay_gone_whatever_is_written():
    fast = pruned()
    kept = masks(fast)["4.weight"]
    nn.init.ones_(fast[4].weight)
    fast(X)
    assert torch.equal(fast[4].weight, kept.float())
    fast[4].weight = nn.Parameter(torch.full_like(fast[4].weight, 2.0))
    assert torch.equal(fast[4].weight, 2 * kept)
    fast.load_state_dict(network().state_dict(), assign=True)
    assert not bool(fast[4].weight[~kept].any())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_behind_a_step_averages_and_logs_read_zeros(fused: bool, copied: bool):
    """Moments of weights that were masked later bring these back, and nothing has read the module since."""
    fast = fxopt.optimize(network(), Prune(amount=0.7, schedule="linear"), example_inputs=X)
    fast = copy.deepcopy(fast) if copied else fast
    schedule, stepping = PruningSchedule(fast, steps=4), torch.optim.Adam(fast.parameters(), 0.05, fused=fused)
    for _ in range(4):
        stepping.zero_grad()
        fast(X).square().sum().backward()
        stepping.step()
        kept = masks(fast)
        assert not any(bool(own_weight(fast, name)[~flags].any()) for name, flags in kept.items())
        schedule.step()


def own_weight(model: nn.Module, name: str) -> Tensor:
    """Return a parameter past the module's attribute, as optimizers hold it."""
    path, _, last = name.rpartition(".")
    return vars(model.get_submodule(path))["_parameters"][last].detach()


def test_weights_are_still_parameters():
    fast = pruned()
    assert fast[4].weight is dict(fast.named_parameters())["4.weight"] is fast.get_parameter("4.weight")
    fast(X).sum().backward()
    assert not bool(fast[4].weight.grad[~masks(fast)["4.weight"]].any())
    fast[4].weight.requires_grad = False
    fast.zero_grad()
    fast(X).sum().backward()
    assert fast[4].weight.grad is None
    assert isinstance(fast[4], nn.Linear) and type(fast[4]).__name__ == "Linear"


def test_transformed_compiled_and_exported_code_sees_zeros():
    fast = pruned().eval()
    kept = masks(fast)
    state = {name: torch.randn_like(value) for name, value in fast.named_parameters()}
    given = with_zeros(network().eval(), {})
    given.load_state_dict({**fast.state_dict(), **state, **{n: state[n] * kept[n] for n in kept}})
    torch.testing.assert_close(torch.func.functional_call(fast, state, (X,)), given(X))
    gradients = torch.func.grad(lambda s: torch.func.functional_call(fast, s, (X,)).sum())(state)
    assert all(not bool(gradients[name][~flags].any()) for name, flags in kept.items())
    torch.testing.assert_close(torch.compile(fast, backend="eager", fullgraph=True)(X), fast(X))
    torch.testing.assert_close(torch.export.export(fast, (X,)).module()(X), fast(X))
    with torch.inference_mode():
        torch.testing.assert_close(fast(X), fast(X))


# -- checkpoints, copies, archives, plans -----------------------------------------------------------------------------


def test_state_dicts_have_the_original_names_and_zeros():
    model, fast = network(), pruned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing was cut away
        saved = fast.state_dict()
    assert list(saved) == list(model.state_dict())
    plain = network()
    plain.load_state_dict(saved)
    torch.testing.assert_close(plain(X), copy.deepcopy(fast)(X))


def test_old_checkpoints_are_masked_as_they_load():
    fast, other = pruned(), network()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    fast.load_state_dict(other.state_dict())
    for name, value in with_zeros(other, masks(fast)).state_dict().items():
        assert torch.equal(fast.state_dict()[name], value)


def test_copies_and_pickles_keep_masks_of_their_own():
    fast = pruned()
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        train(other, torch.optim.Adam(other.parameters(), 0.05))
        assert all(torch.equal(flags, masks(fast)[name]) for name, flags in masks(other).items())
        assert not bool(other.state_dict()["4.weight"][~masks(fast)["4.weight"]].any())
        assert not torch.equal(other[4].weight, fast[4].weight)


def test_archives_and_plans_repeat_the_masks(tmp_path: Path):
    fast = pruned(method="random")
    train(fast, torch.optim.Adam(fast.parameters(), 0.05))
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=network())
    other = network()
    nn.init.normal_(other[4].weight)
    replayed = fxopt.optimize(other, plan=fxopt.plan(fast))
    for model in (loaded, replayed):
        assert all(torch.equal(flags, masks(model)[name]) for name, flags in masks(fast).items())
    torch.testing.assert_close(loaded.eval()(X), fast.eval()(X))
    torch.testing.assert_close(replayed[4].weight, other[4].weight * masks(fast)["4.weight"])


def test_twice_is_once_and_more_adds_to_it():
    fast = pruned(amount=0.5)
    again, more = pruned(fast, amount=0.5), pruned(fast, amount=0.8)
    assert all(torch.equal(flags, masks(fast)[name]) for name, flags in masks(again).items())
    assert all(bool((flags <= masks(fast)[name]).all()) for name, flags in masks(more).items())
    assert sum(int((~flags).sum()) for flags in masks(more).values()) == round(0.8 * 1708)
    more.load_state_dict(network().state_dict())
    assert all(torch.equal(more.get_parameter(n) != 0, flags) for n, flags in masks(more).items())


def test_restoring_gives_the_model_with_zeros():
    fast = pruned()
    plain = fxopt.restore(fast)
    assert not masks(plain) and type(plain[4]) is nn.Linear
    torch.testing.assert_close(plain(X), copy.deepcopy(fast)(X))


# -- masks in hand ----------------------------------------------------------------------------------------------------


def test_masks_are_saved_and_given_to_another_model():
    fast, other = pruned(amount=0.7), pruned(amount=0.1)
    set_masks(other, masks(fast))
    assert all(torch.equal(other.get_parameter(n) != 0, flags) for n, flags in masks(fast).items())
    other.load_state_dict(network().state_dict())
    torch.testing.assert_close(other.state_dict()["4.weight"], fast.state_dict()["4.weight"])
    replayed = fxopt.optimize(network(), plan=fxopt.plan(other))
    assert all(torch.equal(masks(replayed)[name], flags) for name, flags in masks(fast).items())


def test_masks_that_do_not_fit_change_nothing():
    fast = pruned()
    before = masks(fast)
    with pytest.raises(StateError, match=r"'4\.wight' has no mask in this model; did you mean '4\.weight'"):
        set_masks(fast, {"0.weight": ~before["0.weight"], "4.wight": before["4.weight"]})
    with pytest.raises(StateError, match=r"mask of '4\.weight' has shape \[2\], the weight \[16, 96\]"):
        set_masks(fast, {"4.weight": torch.ones(2)})
    with pytest.raises(UsageError, match="masks belong to the whole model"):
        set_masks(fast[4], {})
    assert all(torch.equal(flags, before[name]) for name, flags in masks(fast).items())


def test_masks_come_off(tmp_path: Path):
    fast = pruned()
    zeros, before = {name: ~flags for name, flags in masks(fast).items()}, fast.eval()(X)
    remove_masks(fast)
    assert not masks(fast)
    torch.testing.assert_close(fast(X), before, rtol=0, atol=0)
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=network())
    assert not masks(loaded)
    torch.testing.assert_close(loaded(X), before)
    train(fast.train(), torch.optim.SGD(fast.parameters(), 0.1))
    assert bool(fast[4].weight[zeros["4.weight"]].any())


def test_the_report_says_that_what_goes_was_zero():
    model = nn.Sequential(nn.Linear(8, 20), nn.Linear(20, 5))
    with torch.no_grad():
        for weight in (model[0].weight, model[1].weight):
            weight.view(-1)[: weight.numel() // 2].zero_()
    x = torch.ones(1, 8)

    def details(amount: float) -> list[str]:
        return [
            each.detail
            for each in fxopt.plan(
                fxopt.optimize(model, Prune(amount=amount, scope="layer"), example_inputs=x)
            ).decisions
        ]

    assert details(0.25) == [f"{n} of {4 * n} weights are zero, as before: nothing to do" for n in (40, 25)]
    assert details(0.75) == ["120 of 160 weights are zero", "75 of 100 weights are zero"]


def test_the_original_is_left_alone():
    model = network()
    before = copy.deepcopy(model.state_dict())
    pruned(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[4]) is nn.Linear


# -- any small model --------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 7), st.booleans()), min_size=1, max_size=4),
    st.floats(0, 0.6),
    st.sampled_from(["magnitude", "random"]),
    st.integers(0, 9),
)
def test_any_mask_on_any_small_model(layers: list[tuple[int, bool]], amount: float, method: str, seed: int):
    torch.manual_seed(seed)
    model, width = nn.Sequential(), 5
    for number, (out, convolves) in enumerate(layers):
        layer = nn.Conv1d(width, out, 1) if convolves else nn.ConvTranspose1d(width, out, 1)
        model.add_module(str(number), layer)
        width = out
    x = torch.randn(2, 5, 3)
    fast = pruned(model, x, method=method, amount=amount, scope="layer")
    kept = masks(fast)
    assert len(kept) == len(layers)
    torch.testing.assert_close(fast(x), with_zeros(model, kept)(x))
    train(fast, torch.optim.Adam(fast.parameters(), 0.1), x, steps=2)
    replayed = fxopt.optimize(copy.deepcopy(model), plan=fxopt.plan(fast))
    replayed.load_state_dict(fast.state_dict())
    torch.testing.assert_close(replayed(x), fast(x))
    assert all(not bool(fast.state_dict()[name][~flags].any()) for name, flags in kept.items())


def test_another_weight_at_the_same_place_in_memory_gets_its_zeros():
    fast = fxopt.optimize(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "prune{amount=0.5}", example_inputs=torch.ones(2, 4)
    )
    memory = torch.ones(4, 4).numpy()
    for _ in range(2):
        memory[:] = 1
        fast[0]._parameters["weight"] = nn.Parameter(torch.from_numpy(memory))
        assert int(fast[0].weight.sum()) == 8


def test_a_masked_bidirectional_lstm_takes_assigned_weights():
    model = nn.LSTM(4, 4, bidirectional=True, batch_first=True).eval()
    x = torch.randn(2, 3, 4)
    fast = fxopt.optimize(model, "prune{amount=0.5}", example_inputs=(x,), measure=False)
    before = fast(x)[0]
    fast.load_state_dict({name: tensor.clone() for name, tensor in fast.state_dict().items()}, assign=True)
    assert torch.equal(fast(x)[0], before)
