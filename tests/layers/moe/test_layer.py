"""A mixture of experts beside separate networks, in every mode, dtype and place that a layer is used in."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.shares import share
from torch import Tensor, nn
from torch.nn import functional as F

import fxopt
from fxopt.layers import MixtureOfExperts

WIDTH, HIDDEN, EXPERTS = 16, 24, 8


class Expert(nn.Module):
    """One expert of a mixture, as a network of its own."""

    def __init__(self, layer: MixtureOfExperts, number: int) -> None:
        super().__init__()
        self.gated, self.activation = layer.gated, layer.activation
        self.first = self.linear(getattr(layer, layer.first), getattr(layer, f"{layer.first}_bias"), number)
        self.down = self.linear(layer.down_proj, layer.down_proj_bias, number)

    @staticmethod
    def linear(weights: Tensor, biases: Tensor | None, number: int) -> nn.Linear:
        linear = nn.Linear(weights.shape[2], weights.shape[1], biases is not None, dtype=weights.dtype)
        linear.weight.data.copy_(weights[number])
        if biases is not None:
            linear.bias.data.copy_(biases[number])
        return linear

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(self.activation(self.first(x)))
        gate, up = self.first(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


class Separate(nn.Module):
    """What a mixture computes, by a loop over separate experts."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        self.router, self.shared = copy.deepcopy(layer.router), copy.deepcopy(layer.shared)
        self.experts = nn.ModuleList(Expert(layer, number) for number in range(layer.num_experts))
        self.gated, self.activation = layer.gated, layer.activation

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        _, indices, weights = self.router(tokens)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(indices == number)
            if len(rows):
                output = output.index_add(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        if self.shared:
            hidden = self.shared[next(iter(self.shared))](tokens)
            gate, up = hidden.chunk(2, -1) if self.gated else (hidden, 1)
            output = output + self.shared["down_proj"](self.activation(gate) * up)
        return output.view(x.shape)


class Block(nn.Module):
    """A model that a mixture is a part of."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mixture = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, router = self.mixture(self.before(x), return_router=True)
        return output + self.mixture(x), router.load_balancing_loss + router.z_loss


VARIANTS = [
    {},
    {"gate": "sigmoid", "top_k": 3},
    {"normalize": False, "bias": True, "activation": "gelu"},
    {"gate": "sigmoid", "normalize": False, "gated": False, "activation": "relu", "bias": True},
    {"top_k": 1, "shared_experts": 2},
    {"gated": False, "shared_experts": 1, "top_k": EXPERTS, "activation": torch.tanh},
    {"gate": "noisy_topk"},
    {"capacity_factor": 0.5},
]


def named(options: dict[str, Any]) -> str:
    """Return the name of a test case, the same in every process: functions print their address."""
    return ",".join(f"{option}={getattr(value, '__name__', value)}" for option, value in options.items())


@pytest.mark.parametrize("options", VARIANTS, ids=named)
def test_it_gives_what_separate_experts_give(options):
    torch.manual_seed(0)
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, **{"top_k": 2, **options}).double().eval()
    separate = Separate(layer)
    for shape in ((WIDTH,), (1, WIDTH), (2, 9, WIDTH)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(layer(x), separate(x[None])[0])
    upstream = torch.randn_like(x)
    layer(x).backward(upstream), separate(x).backward(upstream)
    for name in (layer.first, "down_proj"):
        child = "first" if name == layer.first else "down"
        for kind in ("weight", "bias") if options.get("bias") else ("weight",):
            stacked = getattr(layer, name if kind == "weight" else f"{name}_bias")
            own = [getattr(getattr(expert, child), kind) for expert in separate.experts]
            expected = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in own])
            torch.testing.assert_close(stacked.grad, expected)
    torch.testing.assert_close(layer.router.weight.grad, separate.router.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_dtypes_and_copies(dtype):
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, bias=True, shared_experts=1, gate="noisy_topk", dtype=dtype)
    layer = layer.eval()
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer.gate_up_proj.shape == (EXPERTS, 2 * HIDDEN, WIDTH)
    assert layer.down_proj_bias.shape == (EXPERTS, WIDTH)
    x = torch.randn(5, WIDTH, dtype=dtype)
    other = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, bias=True, shared_experts=1, gate="noisy_topk")
    other.load_state_dict(layer.state_dict())
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other.to(dtype).eval()):
        assert same(x).dtype == dtype
        torch.testing.assert_close(same(x), layer(x))


def test_it_computes_what_mixtral_computes():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = modeling.MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    block = modeling.MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2)
    theirs = {name.removeprefix("experts."): tensor for name, tensor in block.state_dict().items()}
    layer.load_state_dict({"router.weight": theirs.pop("gate.weight"), **theirs})
    x = torch.randn(3, 7, WIDTH)
    torch.testing.assert_close(layer(x), block(x))
    router = layer(x, return_router=True)[1]
    loss = modeling.load_balancing_loss_func((router.logits,), EXPERTS, 2)
    torch.testing.assert_close(router.load_balancing_loss, loss / 2)


def test_the_seed_decides_the_parameters():
    torch.manual_seed(3)
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2)
    again = copy.deepcopy(layer)
    torch.manual_seed(4)
    again.reset_parameters()
    assert not torch.equal(layer.down_proj, again.down_proj)
    assert layer.down_proj.abs().max() <= HIDDEN**-0.5
    assert layer.gate_up_proj.abs().max() <= WIDTH**-0.5


def test_no_tokens_and_a_single_token():
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, shared_experts=1, capacity_factor=1.0)
    x = torch.randn(0, 3, WIDTH, requires_grad=True)
    output, router = layer(x, return_router=True)
    assert output.shape == x.shape
    assert router.load_balancing_loss == 0
    assert router.z_loss == 0
    (output.sum() + router.load_balancing_loss).backward()
    assert not any(p.grad.any() for p in layer.parameters())
    assert layer(torch.randn(WIDTH)).shape == (WIDTH,)


def test_a_token_that_is_nan_stays_alone():
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2)
    x = torch.randn(9, WIDTH)
    x[4, 3] = float("nan")
    output = layer(x)
    assert output.isnan().all(1).tolist() == [token == 4 for token in range(9)]
    x[4] = 0.0
    torch.testing.assert_close(output[5:], layer(x)[5:])


@pytest.mark.parametrize("tokens", [1, 40])
def test_under_autocast_the_router_stays_in_float32(tokens):
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, shared_experts=1)
    x = torch.randn(tokens, WIDTH)
    expected, routed = layer(x, return_router=True)
    with torch.autocast("cpu", torch.bfloat16):
        output, router = layer(x, return_router=True)
    assert output.dtype == torch.bfloat16
    assert torch.equal(router.logits, routed.logits)
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.02)
    output.sum().backward()
    assert layer.down_proj.grad.dtype == torch.float32


def test_meta_tensors_have_the_right_shape():
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, capacity_factor=1.0, device="meta")
    assert layer(torch.empty(2, 5, WIDTH, device="meta")).shape == (2, 5, WIDTH)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_gives_the_same_without_a_break(dynamic):
    torch.manual_seed(0)
    block = Block(capacity_factor=1.0, shared_experts=1)
    compiled = torch.compile(block, backend="eager", fullgraph=True, dynamic=dynamic)
    for tokens in (6, 30):
        x = torch.randn(tokens, WIDTH)
        for one, other in zip(compiled(x), block(x), strict=True):
            torch.testing.assert_close(one, other)
    sum(out.sum() for out in compiled(x)).backward()
    found = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    sum(out.sum() for out in block(x)).backward()
    for one, parameter in zip(found, block.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_it_takes_any_number_of_tokens(dtype):
    block = Block(gate="sigmoid").to(dtype)
    batch = torch.export.Dim("batch", min=1)
    exported = torch.export.export(block, (torch.randn(4, WIDTH, dtype=dtype),), dynamic_shapes=({0: batch},)).module()
    for tokens in (2, 7, 50):
        x = torch.randn(tokens, WIDTH, dtype=dtype)
        for one, other in zip(exported(x), block(x), strict=True):
            tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "noisy_topk"])
@pytest.mark.parametrize("training", [False, True])
def test_a_captured_model_gives_what_the_model_gives(gate, training):
    block = Block(gate=gate, shared_experts=1).train(training)
    program = fxopt.capture(block, (torch.randn(6, WIDTH),))
    assert program.coverage().share == 1
    for mode in (training, not training):
        block.train(mode), program.model.train(mode)
        for tokens in (6, 1, 33):
            x = torch.randn(tokens, WIDTH)
            torch.manual_seed(5)
            expected = block(x)
            torch.manual_seed(5)
            for one, other in zip(program.model(x), expected, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_small_mixture_trains_like_separate_experts(top_k):
    """Compare each step, not only the end."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, top_k).double()
    separate = Separate(layer)
    x, y = torch.randn(48, WIDTH, dtype=torch.float64), torch.randn(48, WIDTH, dtype=torch.float64)
    losses: list[list[float]] = []
    for model in (layer, separate):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.995 * losses[0][0]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)


def test_adam_moves_idle_experts_whose_parameters_are_stacked():
    """The gradient of an idle expert is zero here and None there: momentum goes on, as the docs say."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 1)
    separate = Separate(layer)
    x = torch.randn(64, WIDTH)
    first = int(layer.router(x)[1][0])
    alone = x[layer.router(x)[1][:, 0] == first]
    idle = next(e for e in range(EXPERTS) if e != first)
    moved = []
    for model, weight in (
        (layer, lambda: layer.down_proj[idle]),
        (separate, lambda: separate.experts[idle].down.weight),
    ):
        optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if "router" not in n])
        model(x).square().sum().backward()
        optimizer.step()
        before = weight().detach().clone()
        optimizer.zero_grad()
        model(alone).square().sum().backward()
        optimizer.step()
        moved.append(not torch.equal(before, weight()))
    assert moved == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k=9 of 8 experts; give at most num_experts"),
        ({"top_k": 0}, "top_k of a MixtureOfExperts is 0; give a whole number, at least 1"),
        ({"num_experts": 2.0}, "num_experts of a MixtureOfExperts is of type float; give a whole number, at least 1"),
        ({"hidden": -1}, "hidden of a MixtureOfExperts is -1; give"),
        ({"shared_experts": -1}, "shared_experts of a MixtureOfExperts is -1; give a whole number, at least 0"),
        ({"gate": "top"}, "unknown gate 'top'; give one of softmax, sigmoid, noisy_topk"),
        ({"activation": "swish"}, "unknown activation 'swish'; give one of silu"),
        ({"capacity_factor": 0}, "capacity_factor=0 .* factor over 0"),
        ({"capacity_factor": float("nan")}, "capacity_factor=nan"),
        ({"capacity_factor": True}, "capacity_factor=True .* factor over 0"),
        ({"activation": [1]}, r"unknown activation \[1\]"),
        ({"gated": 2}, "gated=2 .* True or False"),
        ({"normalize": "yes"}, "normalize='yes' .* True or False"),
        ({"bias": None}, "bias=None .* True or False"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, message):
    with pytest.raises(fxopt.UsageError, match=message) as error:
        MixtureOfExperts(**{"dim": WIDTH, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": 2, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(3, WIDTH + 1), r"of dim=16 was given \[3, 17\]; give \[..., 16\]"),
        (torch.tensor(1.0), r"was given \[\]"),
        (torch.ones(3, WIDTH, dtype=torch.long), "in torch.float32 was given torch.int64; give torch.float32"),
        (torch.randn(3, WIDTH).double(), "was given torch.float64"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(x, message):
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2)
    with pytest.raises(fxopt.UsageError, match=message):
        layer(x)


def test_autocast_does_not_cast_float64_and_a_float32_token_is_refused():
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fxopt.UsageError, match="was given"):
        layer(torch.randn(3, WIDTH))


@pytest.mark.parametrize("gate", share(2, ["softmax", "sigmoid"]))
def test_numbers_of_tokens_recompile_it_no_more_than_a_linear_layer(gate):
    def compilations(model: nn.Module) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter)
        for tokens in (5, 1, 2, 3, 4, 7, 8, 16, 17, 31, 64, 100, 6):
            compiled(torch.randn(tokens, WIDTH))
        return counter.frame_count

    layer = MixtureOfExperts(WIDTH, HIDDEN, 4, 2, gate=gate)
    assert compilations(layer) <= compilations(nn.Linear(WIDTH, WIDTH))


def test_its_text_says_what_it_is():
    layer = MixtureOfExperts(WIDTH, HIDDEN, EXPERTS, 2, gate="sigmoid", capacity_factor=1.5)
    assert "16, hidden=24, num_experts=8, activation=silu, gated=True, bias=False" in repr(layer)
    assert "16, num_experts=8, top_k=2, gate=sigmoid, normalize=True, capacity_factor=1.5" in repr(layer)
