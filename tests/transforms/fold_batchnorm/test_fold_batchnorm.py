"""fold_batchnorm: it fires for every layer that feeds a norm, refuses with reasons, and can be taken back."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from norms import IMAGE, folded, shaken
from torch import Tensor, nn

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.testing import assert_equivalent
from fxopt.transforms.fold_batchnorm import FoldBatchnorm


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", fxopt.GuardWarning)
        warnings.simplefilter("ignore", fxopt.UnverifiedWarning)
        yield


class Block(nn.Module):
    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.layer(x)))


def block(**options: object) -> Block:
    torch.manual_seed(0)
    return shaken(Block(nn.Conv2d(3, 6, 3, **options), nn.BatchNorm2d(6)))


def applied(model: nn.Module) -> int:
    return [d.status for d in fxopt.plan(model).decisions].count("applied")


def same_state(one: nn.Module, fast: nn.Module) -> bool:
    expected, found = one.state_dict(), fxopt.state_dict(fast)
    return list(expected) == list(found) and all(torch.equal(expected[name], found[name]) for name in expected)


# -- 1. it fires ---------------------------------------------------------------------------------------------------


def test_the_graph_before_and_after() -> None:
    model = block()
    before = [(n.op, str(n.target)) for n in fxopt.capture(model, (torch.randn(IMAGE),)).graphs[""].nodes]
    assert before[1:3] == [("call_module", "layer"), ("call_module", "norm")]
    after = [(n.op, str(n.target)) for n in fxopt.graphs(folded(model))[""].nodes]
    names = "layer.weight layer.bias norm.weight norm.bias norm.running_mean norm.running_var norm.num_batches_tracked"
    assert after[1:8] == [("get_attr", name) for name in names.split()]
    assert [op for op, _ in after[8:]] == ["call_function"] * 5 + ["output"]
    assert not any(op == "call_module" for op, _ in after)


def pair(rank: int, transposed: bool, groups: int = 1, **options: object) -> tuple[nn.Module, Tensor]:
    name = f"Conv{'Transpose' if transposed else ''}{rank}d"
    layer = getattr(nn, name)(4, 6, 3, groups=groups, **options)
    return shaken(Block(layer, getattr(nn, f"BatchNorm{rank}d")(6))), torch.randn(2, 4, *[6] * rank)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_every_convolution(rank: int, transposed: bool, groups: int, bias: bool) -> None:
    model, x = pair(rank, transposed, groups, bias=bias)
    fast = folded(model, x)
    assert applied(fast) == 1
    assert_equivalent(model, fast, (x,))
    assert same_state(model, fast)


@pytest.mark.parametrize(
    "model",
    [
        Block(nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular", stride=2, dilation=2), nn.BatchNorm2d(6)),
        Block(nn.Conv2d(3, 6, 3, padding="same"), nn.BatchNorm2d(6, eps=0.1, momentum=None)),
        Block(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6, affine=False)),
        Block(nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6, affine=False)),
        Block(nn.ConvTranspose2d(3, 6, 3, stride=2, output_padding=1), nn.BatchNorm2d(6)),
    ],
)
def test_settings_of_layer_and_norm(model: nn.Module) -> None:
    fast = folded(shaken(model))
    assert applied(fast) == 1
    assert_equivalent(model, fast, (torch.randn(IMAGE),))
    assert same_state(model, fast)


def test_linear() -> None:
    model = shaken(Block(nn.Linear(5, 6), nn.BatchNorm1d(6)))
    fast = folded(model, torch.randn(4, 5))
    assert applied(fast) == 1
    assert_equivalent(model, fast, [(torch.randn(4, 5),), (torch.randn(1, 5),), (torch.randn(0, 5),)])


def test_a_call_with_other_dimensions_fails_instead_of_norming_the_wrong_one() -> None:
    model = shaken(Block(nn.Linear(5, 6), nn.BatchNorm1d(6)))
    fast = folded(model, torch.randn(4, 5))
    model(torch.randn(4, 6, 5))
    with pytest.raises(fxopt.GuardError, match="folded for inputs of 2 dimensions, but this input has 3"):
        fast(torch.randn(4, 6, 5))


def test_children_of_a_sequential_keep_their_places() -> None:
    model = shaken(
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))
    )
    fast = folded(model)
    assert [d.detail for d in fxopt.plan(fast).decisions] == ["2 batch norms"]
    assert [type(child).__name__ for child in fast] == [type(child).__name__ for child in model]
    x = torch.randn(IMAGE)
    torch.testing.assert_close(fast(x), model(x))
    y = x
    for child in fast:
        y = child(y)
    torch.testing.assert_close(y, model(x))


def test_gammas_that_are_zero_or_negative() -> None:
    model = block()
    with torch.no_grad():
        model.norm.weight[:3] = torch.tensor([0.0, -1.0, 1e-30])
    fast = folded(model)
    assert_equivalent(model, fast, (torch.randn(IMAGE),))
    assert same_state(model, fast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = block().to(dtype)
    x = torch.randn(IMAGE, dtype=dtype)
    fast = folded(model, x)
    assert applied(fast) == 1
    assert_equivalent(model, fast, (x,))
    assert fast(x).dtype is dtype
    assert same_state(model, fast)


def test_without_inputs_convolutions_are_folded_and_linears_refused() -> None:
    model = block()
    fast = fxopt.optimize(model, FoldBatchnorm())
    torch.testing.assert_close(fast(x := torch.randn(IMAGE)), model(x))
    assert [d.figures["checked"] for d in fxopt.plan(fast).decisions] == ["unverified: no example inputs"]
    linear = fxopt.optimize(shaken(Block(nn.Linear(5, 6), nn.BatchNorm1d(6))), FoldBatchnorm())
    assert [d.reason for d in fxopt.plan(linear).decisions] == [
        "the number of dimensions is not known; give example_inputs"
    ]


def test_on_the_meta_device() -> None:
    model = block().to("meta")
    fast = folded(model, torch.randn(IMAGE, device="meta"))
    assert [d.figures["checked"] for d in fxopt.plan(fast).decisions] == ["unverified: meta"]
    real = block()
    fast.load_state_dict(real.state_dict(), assign=True)
    torch.testing.assert_close(fast(x := torch.randn(IMAGE)), real(x))


# -- 2. it refuses -------------------------------------------------------------------------------------------------


def reasons(model: nn.Module, *inputs: Tensor, **options: object) -> list[str]:
    """Return the reasons of the refusals; nothing may have been folded, and nothing may compute otherwise."""
    inputs = inputs or (torch.randn(IMAGE),)
    fast = folded(model, *inputs, **options)
    assert not applied(fast)
    if not model.training:
        torch.testing.assert_close(fast(*inputs), model(*inputs))
    return [d.reason for d in fxopt.plan(fast).decisions]


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.layer(x)


class TwoNorms(Block):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.other = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.other(self.layer(x))


class NormTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(self.layer(x)))


class ReadTwice(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y) + y


class WrittenTo(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        z = self.norm(y)
        y.add_(1)
        return z + y


class Elsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.tail = nn.Sequential(self.block.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.tail(x)


class ReadsWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * self.layer.weight.sum()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "the convolution is called elsewhere too"),
        (TwoNorms(), "the convolution is called elsewhere too"),
        (NormTwice(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "the batch norm is called elsewhere too"),
        (ReadTwice(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "the convolution's output is read elsewhere too"),
        (WrittenTo(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "the convolution's output is read elsewhere too"),
        (Elsewhere(), "the convolution is called elsewhere too"),
        (ReadsWeight(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "'layer.weight' is read in the graph of '(root)'"),
        (
            Block(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)),
            "the batch norm has no running statistics",
        ),
    ],
)
def test_refuses_what_is_used_elsewhere(model: nn.Module, reason: str) -> None:
    found = reasons(shaken(model))
    assert found and set(found) == {reason}


def test_refuses_training_mode() -> None:
    assert reasons(block().train()) == [
        "the model is in training, where weights change at every step; call model.eval() first"
    ]
    model = block()
    model.norm.train()
    fast = folded(model)
    assert [d.reason for d in fxopt.plan(fast).decisions] == ["the batch norm is in training mode"]


def test_refuses_frozen_norms_in_a_model_in_training() -> None:
    model = block().train()
    model.norm.eval()
    (reason,) = reasons(model)
    assert reason == "the model is in training, where weights change at every step; call model.eval() first"


def test_a_model_in_training_is_not_folded_for_evaluation_either() -> None:
    model = block().train()
    fast = folded(model, phase="eval")
    assert fast.training and model.training
    (decision,) = fxopt.plan(fast).decisions
    assert (decision.status, decision.reason.partition("; ")[2]) == ("refused", "call model.eval() first")


@pytest.mark.parametrize("name", ["layer", "norm"])
def test_refuses_hooks_and_parametrizations(name: str) -> None:
    model = block()
    what = "convolution" if name == "layer" else "batch norm"
    model.get_submodule(name).register_forward_hook(lambda module, args, output: output * 2)
    assert reasons(model) == [f"the {what} cannot be folded: it has hooks"]
    model = block()
    nn.utils.parametrize.register_parametrization(model.get_submodule(name), "weight", nn.Tanh())
    assert reasons(model) == [f"the {what} cannot be folded: it has parametrizations"]


class Shouting(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Doubling(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight, bias) * 2


class Depthwise(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, groups=channels)


def test_subclasses_are_folded_unless_they_compute_something_else() -> None:
    for kind in (Shouting, Doubling):
        model = shaken(Block(kind(3, 6, 3), nn.BatchNorm2d(6)))
        assert reasons(model) == [f"the convolution is a {kind.__name__}, which has its original forward"]
    model = shaken(Block(Depthwise(3), nn.BatchNorm2d(3)))
    fast = folded(model)
    assert applied(fast) == 1 and isinstance(fast.layer, Depthwise)
    assert_equivalent(model, fast, (torch.randn(IMAGE),))
    assert type(fxopt.restore(fast).layer) is Depthwise


def test_refuses_tied_parameters() -> None:
    model = nn.Sequential(block(), Block(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)))
    model[1].norm.weight = model[0].norm.weight
    assert set(reasons(shaken(model))) == {"'0.norm.weight' is tied to '1.norm.weight'"}


def test_refuses_mixed_types() -> None:
    model = block()
    model.norm.double()
    model.layer.double()
    model.norm.running_mean = model.norm.running_mean.float()
    found = fxopt.optimize(model, FoldBatchnorm())
    assert [d.reason for d in fxopt.plan(found).decisions] == [
        "the convolution and the batch norm have tensors of dtype float64 and float32"
    ]


def test_refuses_a_linear_on_more_dimensions() -> None:
    model = shaken(Block(nn.Linear(5, 6), nn.BatchNorm1d(6)))
    assert reasons(model, torch.randn(2, 6, 5)) == [
        "the linear gives 3 dimensions, so the batch norm acts on another one"
    ]
    unbatched = shaken(Block(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)))
    assert reasons(unbatched, torch.randn(4, 8)) == [
        "the convolution gives 2 dimensions, so the batch norm acts on another one"
    ]


class DependsOnData(nn.Module):
    """A root that cannot be captured, around a block that can; it may call the convolution by itself."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.block = Block(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.direct = direct

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if x.sum() > 1e9:
            return y
        return y + self.block.layer(x) if self.direct else y


def test_calls_that_no_graph_shows() -> None:
    assert reasons(shaken(DependsOnData(True))) == ["'(root)' could not be captured and calls it, too"]
    fast = folded(shaken(DependsOnData(False)))
    assert applied(fast) == 1
    blind = fxopt.optimize(shaken(DependsOnData(False)), FoldBatchnorm())
    assert not applied(blind)


class PreActivation(nn.Module):
    """DenseNet's order: the norm comes before the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 2 * i), nn.ReLU(), nn.Conv2d(3 + 2 * i, 2, 3, padding=1)) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def test_a_norm_before_an_activation_is_left_alone() -> None:
    assert reasons(shaken(PreActivation())) == []


# -- 3. numerics, through real models ------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.down = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)


def test_residual_blocks_with_in_place_operations() -> None:
    model = shaken(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Residual(4), Residual(4)))
    fast = folded(model)
    assert not any(".bn" in str(graph) for graph in fxopt.graphs(fast).values())
    assert_equivalent(model, fast, (torch.randn(IMAGE),))


def test_a_resnet_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic")
    model = shaken(transformers.ResNetModel(config))
    x = torch.randn(2, 3, 32, 32)
    fast = fxopt.optimize(model, FoldBatchnorm(), example_inputs={"pixel_values": x}, measure=False)
    assert applied(fast) == sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    torch.testing.assert_close(fast(x).pooler_output, model(x).pooler_output, rtol=1e-4, atol=1e-5)
    assert same_state(model, fast)


def test_verification_finds_a_fold_gone_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxopt.transforms.fold_batchnorm import arithmetic

    monkeypatch.setattr(arithmetic, "_shift", lambda wide: wide.mean if wide.bias is None else wide.bias + wide.mean)
    (decision,) = fxopt.plan(folded(block())).decisions
    assert decision.status == "refused" and "off by" in decision.reason


def test_verification_computes_the_fold_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxopt.transforms.fold_batchnorm import fold

    right = fold._fold_of
    monkeypatch.setattr(fold, "_fold_of", lambda *args, **options: replace(right(*args, **options), eps=1e-5 + 1e-8))
    (decision,) = fxopt.plan(folded(block())).decisions
    assert decision.status == "refused" and "float64" in decision.reason


def test_all_norms_of_a_deep_network_are_folded_however_short_the_time_budget() -> None:
    torch.manual_seed(0)
    model = shaken(nn.Sequential(*(Block(nn.Conv2d(3, 3, size), nn.BatchNorm2d(3)) for size in (1, 2, 3, 4, 5))))
    x = torch.randn(2, 3, 16, 16)
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=x, time_budget=0.01)
    assert applied(fast) == 5
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


# -- 4. shared blocks, modes, hooks outside ------------------------------------------------------------------------


class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def test_a_block_called_twice_is_folded_once() -> None:
    model = shaken(SharedBlock())
    fast = folded(model)
    assert applied(fast) == 1
    assert_equivalent(model, fast, (torch.randn(IMAGE),))


class Switched(Block):
    """Train and evaluation have graphs of their own."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.norm(self.layer(x)) * 2
        return self.norm(self.layer(x))


class Ranked(Block):
    """Two graphs in evaluation, for one convolution."""

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        y = self.norm(self.layer(x))
        return y * 2 if double else y


def test_one_graph_for_each_mode() -> None:
    model = shaken(Switched(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    fast = folded(model)
    assert applied(fast) == 1
    assert_equivalent(model, fast, (torch.randn(IMAGE),), training=False)


def test_two_graphs_share_one_fold() -> None:
    model = shaken(Ranked(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    x = torch.randn(IMAGE)
    calls = [fxopt.Inputs(x), fxopt.Inputs(x, double=True)]
    fast = fxopt.optimize(model, FoldBatchnorm(), example_inputs=calls, measure=False)
    assert_equivalent(model, fast, calls)
    assert not any("call_module[target=norm]" in str(graph) for graph in fxopt.graphs(fast).values())
    assert same_state(model, fast)


class OnlySometimes(Block):
    def forward(self, x: Tensor, bare: bool = False) -> Tensor:
        y = self.layer(x)
        return y if bare else self.norm(y)


def test_refuses_a_convolution_that_another_graph_uses_by_itself() -> None:
    model = shaken(OnlySometimes(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    calls = [fxopt.Inputs(torch.randn(IMAGE)), fxopt.Inputs(torch.randn(IMAGE), bare=True)]
    fast = fxopt.optimize(model, FoldBatchnorm(), example_inputs=calls, measure=False)
    assert [d.reason for d in fxopt.plan(fast).decisions] == [
        "the convolution is called in another way by another graph of the same module"
    ]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*")
def test_training_runs_the_original_forward_and_evaluation_then_the_new_weights() -> None:
    model = nn.Sequential(block(), nn.ReLU()).eval()
    fast, x = folded(model), torch.randn(IMAGE)
    for each in (model, fast):
        each.train()
        torch.manual_seed(0)
        trained(each, torch.optim.Adam(each.parameters(), 0.1), x)
        trained(each, torch.optim.Adam(each.parameters(), 0.1, fused=True), x)
        each.eval()
    torch.testing.assert_close(fast(x), model(x))
    assert same_state(model, fast)


@pytest.mark.filterwarnings("ignore:.*")
def test_statistics_that_one_norm_gathers_are_seen() -> None:
    model = nn.Sequential(block(), nn.ReLU()).eval()
    fast, x = folded(model), torch.randn(IMAGE)
    before = fast(x)
    for each in (model, fast):
        each[0].norm.train()
        with torch.no_grad():
            each(x)
        each[0].norm.eval()
    assert not torch.allclose(fast(x), before)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", ["", "0", "0.norm"])
def test_the_flag_itself_decides(name: str) -> None:
    model = nn.Sequential(block(), nn.ReLU()).eval()
    fast, x = folded(model), torch.randn(IMAGE)
    for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        twin = copy.deepcopy(model)
        for each in (one, twin):
            each.get_submodule(name).training = True
        torch.testing.assert_close(one(x), twin(x))
        for each in (one, twin):
            each.get_submodule(name).training = False
        torch.testing.assert_close(one(x), twin(x))


@pytest.mark.filterwarnings("ignore:.*")
def test_frozen_norms_train_the_original_weights() -> None:
    model = block()
    fast, x = folded(model), torch.randn(IMAGE)
    for fused in (False, True):
        for each in (model, fast):
            with torch.no_grad():
                each(x)
            trained(each, torch.optim.Adam(each.parameters(), 0.1, fused=fused), x)
        for (name, expected), found in zip(model.named_parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_model_for_evaluation_can_be_optimized_for_training() -> None:
    model = nn.Sequential(block(), nn.ReLU()).eval()
    fast, x = folded(model), torch.randn(IMAGE)
    again = fxopt.optimize(fast, "eliminate_dead_code", example_inputs=(x,), phase="train", measure=False)
    torch.testing.assert_close(again.train()(x), model.train()(x))


def test_hooks_around_a_fold_still_run() -> None:
    model, seen = block(), list[int]()
    model.register_forward_hook(lambda module, args, output: seen.append(1))
    fast = folded(model)
    seen.clear()
    fast(torch.randn(IMAGE))
    assert seen == [1]


def test_a_forward_that_falls_back_still_computes_the_same() -> None:
    model = shaken(Ranked(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    fast = folded(model)
    x = torch.randn(IMAGE)
    torch.testing.assert_close(fast(x, double=True), model(x, double=True))


@pytest.mark.parametrize("write", [lambda m: m.layer, lambda m: m.norm])
def test_replacing_or_hooking_what_was_folded_fails(write: Callable[[nn.Module], nn.Module]) -> None:
    fast = folded(block())
    for change in (
        lambda: setattr(fast, "norm", nn.Identity()),
        lambda: setattr(fast, "layer", nn.Conv2d(3, 6, 3)),
        lambda: write(fast).register_forward_hook(print),
    ):
        with pytest.raises(fxopt.FusedMemberError, match="restore"):
            change()


def test_settings_of_what_was_folded_cannot_be_changed() -> None:
    fast = folded(block())
    for name, value in (("stride", (2, 2)), ("padding_mode", "circular"), ("forward", F.relu)):
        with pytest.raises(fxopt.FusedMemberError, match="cannot be replaced"):
            setattr(fast.layer, name, value)
    with pytest.raises(fxopt.FusedMemberError, match="cannot be replaced"):
        fast.norm.eps = 0.5


# -- 5. idempotence ------------------------------------------------------------------------------------------------


def test_twice_is_once() -> None:
    once = folded(nn.Sequential(block(), nn.Conv2d(6, 2, 1)))
    twice = folded(once)
    assert {n: str(g) for n, g in fxopt.graphs(twice).items()} == {n: str(g) for n, g in fxopt.graphs(once).items()}
    assert list(fxopt.state_dict(twice)) == list(fxopt.state_dict(once))
    assert list(twice.state_dict()) == list(once.state_dict())


# -- 6. checkpoints ------------------------------------------------------------------------------------------------


def test_old_checkpoints_load_and_new_ones_are_the_old() -> None:
    model, other = block(), shaken(block(), seed=1)
    fast = folded(model)
    x = torch.randn(IMAGE)
    assert fast.load_state_dict(other.state_dict()).missing_keys == []
    torch.testing.assert_close(fast(x), other(x))
    assert same_state(other, fast)
    fxopt.load_state_dict(fast, model.state_dict(), assign=True)
    torch.testing.assert_close(fast(x), model(x))
    fast.load_state_dict(folded(other).state_dict())
    torch.testing.assert_close(fast(x), other(x))
    assert same_state(other, fast)


def test_partial_checkpoints_keep_the_rest() -> None:
    model = block()
    fast = folded(model)
    mean = {"norm.running_mean": torch.full((6,), 3.0)}
    missing = model.load_state_dict(mean, strict=False).missing_keys
    assert sorted(fast.load_state_dict(mean, strict=False).missing_keys) == sorted(missing)
    torch.testing.assert_close(fast(x := torch.randn(IMAGE)), model(x))
    assert same_state(model, fast)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*layer\.weight"):
        fast.load_state_dict(mean)
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        fast.load_state_dict({**model.state_dict(), "layer.weight": torch.ones(6, 3, 5, 5)})


def test_restore_gives_the_old_structure_and_weights_bit_by_bit() -> None:
    model = block()
    restored = fxopt.restore(folded(model))
    assert type(restored.layer) is nn.Conv2d and "folded" not in str(restored)
    x = torch.randn(IMAGE)
    assert torch.equal(restored(x), model(x))
    assert all(
        torch.equal(a, b) for a, b in zip(restored.state_dict().values(), model.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("dtypes", [(torch.float16,), (torch.bfloat16, torch.float32), (torch.float64,)])
def test_casting_is_no_change(dtypes: tuple[torch.dtype, ...]) -> None:
    model = block()
    fast = folded(model)
    for dtype in dtypes:
        model, fast = model.to(dtype), fast.to(dtype)
    assert same_state(model, fast)


def test_optimizers_follow() -> None:
    model = block()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer, torch.randn(IMAGE))
    fast = folded(model)
    moved = fxopt.translate_optimizer(optimizer, fast)
    assert [id(p) for p in moved.param_groups[0]["params"]] == [id(p) for p in fast.parameters()]


def writes() -> list[Callable[[nn.Module], object]]:
    return [
        lambda m: m.layer.weight.fill_(0.5),
        lambda m: m.layer.weight[1].zero_(),
        lambda m: m.layer.weight.__setitem__(0, 1.0),
        lambda m: setattr(m.layer, "weight", nn.Parameter(torch.full((6, 3, 3, 3), 0.25))),
        lambda m: setattr(m.layer.weight, "data", torch.full((6, 3, 3, 3), 0.25)),
        lambda m: nn.init.constant_(m.layer.bias, 2.0),
        lambda m: m.norm.running_mean.add_(1.0),
        lambda m: m.norm.reset_running_stats(),
        lambda m: m.norm.weight.copy_(torch.arange(6.0)),
        lambda m: torch.mul(m.norm.bias.detach(), 2.0, out=m.norm.bias.detach()),
    ]


@pytest.mark.parametrize("write", writes())
def test_writing_into_an_original_folds_anew(write: Callable[[nn.Module], object]) -> None:
    model = block()
    fast = folded(model)
    with torch.no_grad():
        write(model)
        write(fast)
    x = torch.randn(IMAGE)
    assert not torch.equal(folded(block())(x), fast(x))
    torch.testing.assert_close(fast(x), model(x))
    assert same_state(model, fast)


def test_what_torch_does_not_count_can_be_told() -> None:
    model = block()
    fast, x = folded(model), torch.randn(IMAGE)
    fast(x)
    for each in (model, fast):
        each.layer.weight.data.mul_(2.0)
    torch.autograd.graph.increment_version(fast.layer.weight)
    torch.testing.assert_close(fast(x), model(x))


def test_other_devices_types_and_tensors() -> None:
    model, x = block(), torch.randn(IMAGE)
    fast = folded(model)
    for change in (
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.layer.double() and m.norm.double(),
        lambda m: m.float(),
        lambda m: m.load_state_dict({name: tensor + 1 for name, tensor in m.state_dict().items()}, assign=True),
    ):
        for each in (model, fast):
            change(each)
        given = x.to(model.layer.weight.dtype)
        slack = 1e-2 if given.itemsize == 2 else 1e-5
        torch.testing.assert_close(fast(given), model(given), rtol=slack, atol=slack)
    given = {name: torch.rand_like(parameter) for name, parameter in model.named_parameters()}
    expected = torch.func.functional_call(model, given, (x,))
    torch.testing.assert_close(torch.func.functional_call(fast, given, (x,)), expected)
    torch.testing.assert_close(fast(x), model(x))


def test_copies_and_pickles_are_independent() -> None:
    model = block()
    fast = folded(model)
    x = torch.randn(IMAGE)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        twin.norm.running_mean.add_(1.0)
        assert not torch.allclose(twin(x), fast(x))
        torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(twin(x), fxopt.restore(twin)(x))


def test_archives(tmp_path: Path) -> None:
    model = block()
    fast = folded(model)
    fxopt.save(fast, tmp_path / "model.fxopt")
    again = fxopt.load(tmp_path / "model.fxopt", model=block(bias=True))
    assert torch.equal(again(x := torch.randn(IMAGE)), fast(x))


# -- with other passes ---------------------------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 2)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], 1)


def test_ensembles_are_fused_after_folding() -> None:
    model = shaken(Heads())
    x = torch.randn(3, 5)
    fast = fxopt.optimize(model, "fold_batchnorm,fuse_ensembles{lowering=bmm}", example_inputs=(x,), measure=False)
    text = str(fxopt.graphs(fast)[""])
    assert "batched_linear" in text and "call_module" not in text and text.count("ForMembers") == 1
    assert_equivalent(model, fast, (x,))
    assert same_state(model, fast)
    other = shaken(Heads(), seed=1)
    fast.load_state_dict(other.state_dict())
    torch.testing.assert_close(fast(x), other(x))
    with torch.no_grad():
        for twin in (fast, other):
            twin.heads[2][0].weight.fill_(0.1)
            twin.heads[1][1].running_var.fill_(2.0)
    torch.testing.assert_close(fast(x), other(x))
    torch.testing.assert_close(fxopt.restore(fast)(x), other(x))


def test_the_order_with_ensembles() -> None:
    with pytest.raises(fxopt.OrderError, match="fold_batchnorm"):
        fxopt.optimize(Heads().eval(), "fuse_ensembles,fold_batchnorm")


def test_the_preset_folds() -> None:
    assert [str(p) for p in parse("inference")].index("fold_batchnorm") < [str(p) for p in parse("inference")].index(
        "fuse_ensembles"
    )


# -- 7. the user's model -------------------------------------------------------------------------------------------


def test_the_users_model_is_untouched() -> None:
    model = block()
    before = copy.deepcopy(model.state_dict())
    folded(model)
    assert type(model.layer) is nn.Conv2d and type(model) is Block and not list(model.layer.children())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_in_place_the_modules_stay_the_same_objects() -> None:
    model, reference = block(), block()
    layer, norm = model.layer, model.norm
    fast = folded(model, inplace=True)
    assert fast is model and fast.layer is layer and fast.norm is norm
    norm.running_mean.add_(1.0)
    reference.norm.running_mean.add_(1.0)
    torch.testing.assert_close(fast(x := torch.randn(IMAGE)), reference(x))


@pytest.mark.parametrize("compile_it", [True, False])
def test_compiles_and_exports(compile_it: bool) -> None:
    model = shaken(nn.Sequential(block(), nn.Flatten(), nn.Linear(150, 4), nn.BatchNorm1d(4)))
    fast = folded(model)
    x = torch.randn(IMAGE)
    other = (
        torch.compile(fast, backend="eager", fullgraph=True) if compile_it else torch.export.export(fast, (x,)).module()
    )
    torch.testing.assert_close(other(x), model(x))


# -- 8. as text ----------------------------------------------------------------------------------------------------


@given(st.builds(FoldBatchnorm))
def test_text_round_trip(pass_: FoldBatchnorm) -> None:
    assert parse(str(pass_)) == (pass_,)


class Flagged(Block):
    def forward(self, x: Tensor, half: bool = False) -> Tensor:
        x = super().forward(x)
        return x / 2 if half else x


def test_training_is_no_call_to_add_to_the_examples():
    """The original forwards run then, as they should: the report counts them, and no warning asks for a call."""
    model, x = shaken(Flagged(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))), torch.randn(2, 3, 8, 8)
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=(x,), measure=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for part in (fast, fast.norm):
            part.train()
            fast(x)
            fast.eval()
    (missed,) = fxopt.report(fast).to_json()["missed"]
    assert (missed["guard"], missed["calls"]) == (
        "not self.norm.training (fold_batchnorm rewrote it for evaluation)",
        2,
    )
    with pytest.warns(fxopt.GuardWarning, match="half is False. Add this call to example_inputs"):
        fast(x, True)
