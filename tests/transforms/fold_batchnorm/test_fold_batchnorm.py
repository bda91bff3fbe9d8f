"""fold_batchnorm: it fires for every layer that feeds a norm, computes the same, and once."""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from norms import IMAGE, Block, applied, block, folded, same_state, shaken
from torch import Tensor, nn

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.passes.timing import TimeBudget
from fxopt.testing import assert_equivalent
from fxopt.transforms.fold_batchnorm import FoldBatchnorm

# -- 1. it fires ---------------------------------------------------------------------------------------------------


def test_the_graph_before_and_after() -> None:
    model = block()
    before = [(n.op, str(n.target)) for n in fxopt.capture(model, (torch.randn(IMAGE),)).graphs[""].nodes]
    assert before[1:3] == [("call_module", "layer"), ("call_module", "norm")]
    after = [(n.op, str(n.target)) for n in fxopt.graphs(folded(model))[""].nodes]
    names = "layer.weight layer.bias norm.weight norm.bias norm.running_mean norm.running_var norm.num_batches_tracked"
    assert after[1:8] == [("get_attr", name) for name in names.split()]
    assert [op for op, _ in after[8:]] == ["call_function"] * 3 + ["call_method"] + ["call_function"] * 3 + ["output"]
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


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_an_image_without_a_batch_is_refused_as_the_norm_does(rank: int, transposed: bool) -> None:
    model, x = pair(rank, transposed)
    fast = folded(model, x)
    assert applied(fast) == 1
    with pytest.raises((ValueError, RuntimeError)):
        model(x[0])
    with pytest.raises(fxopt.GuardError, match=f"{rank + 2} dimensions, but this input has {rank + 1}"):
        fast(x[0])


def test_what_comes_from_one_input_is_checked_once() -> None:
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.ZeroPad2d(1), nn.MaxPool2d(2), nn.Dropout2d()]
    model = shaken(nn.Sequential(*layers, nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)))
    nodes = list(fxopt.graphs(folded(model))[""].nodes)
    assert [node.args[0].op for node in nodes if node.target == "dim"] == ["placeholder"]


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
    from fxopt.transforms.fold_batchnorm.write import Fold

    right = Fold.__call__

    def wrong(fold: Fold, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = right(fold, *tensors)
        return weight, -bias

    monkeypatch.setattr(Fold, "__call__", wrong)
    (decision,) = fxopt.plan(folded(block())).decisions
    assert decision.status == "refused" and "off by" in decision.reason


def test_verification_computes_the_fold_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxopt.transforms.fold_batchnorm import fold_batchnorm, write

    right = write.fold_of
    for module in (fold_batchnorm, write):
        monkeypatch.setattr(module, "fold_of", lambda *a, **options: replace(right(*a, **options), eps=1e-5 + 1e-8))
    (decision,) = fxopt.plan(folded(block())).decisions
    assert decision.status == "refused" and "float64" in decision.reason


def test_of_a_deep_network_all_norms_are_folded_however_short_the_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[TimeBudget.__module__], "_LEAST_FOR_LEAVING", 100.0)  # for a slow machine
    torch.manual_seed(0)
    model = shaken(nn.Sequential(*(Block(nn.Conv2d(3, 3, size), nn.BatchNorm2d(3)) for size in (1, 2, 3, 4, 5))))
    x = torch.randn(2, 3, 16, 16)
    fast = fxopt.optimize(model, "fold_batchnorm", example_inputs=x, time_budget=0.01)
    assert applied(fast) == 5
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


# -- 5. idempotence ------------------------------------------------------------------------------------------------


def test_twice_is_once() -> None:
    once = folded(nn.Sequential(block(), nn.Conv2d(6, 2, 1)))
    twice = folded(once)
    assert {n: str(g) for n, g in fxopt.graphs(twice).items()} == {n: str(g) for n, g in fxopt.graphs(once).items()}
    assert list(fxopt.state_dict(twice)) == list(fxopt.state_dict(once))
    assert list(twice.state_dict()) == list(once.state_dict())


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
    with pytest.warns(fxopt.GuardWarning, match="half is False.*Add this call to example_inputs"):
        fast(x, True)
