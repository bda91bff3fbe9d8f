"""Whole experts go: rows of routers, slices of stacked weights, items of lists; what is left routes as it did."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fxopt
from fxopt.errors import StateWarning, UsageError
from fxopt.layers import MixtureOfExperts
from fxopt.passes.pipeline import parse
from fxopt.transforms.prune import Prune

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(14).view(2, 7)


class Mixing(nn.Module):
    def __init__(self, experts: int = 5, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.moe = nn.Linear(16, 16), MixtureOfExperts(16, 24, experts, 2, **options)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.inner(x)))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Looping(nn.Module):
    """A user's own: modules in a list, a linear router, softmax and topk."""

    def __init__(self, experts: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts = experts
        self.gate = nn.Linear(16, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number in range(self.num_experts):
            tokens, slot = torch.where(chosen == number)
            if len(tokens):
                out.index_add_(0, tokens, weights[tokens, slot, None] * self.experts[number](flat[tokens]))
        return out.reshape(x.shape)


class Around(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.moe, self.head = mixture, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(x))


def family(name: str, layers: int = 1, **options: Any) -> nn.Module:
    experts = {"num_local_experts": 5} if name == "Mixtral" else {"num_experts": 5, "moe_intermediate_size": 24}
    config = getattr(transformers, f"{name}Config")(
        hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2,
        num_experts_per_tok=2, vocab_size=20, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **experts, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def prune(model: nn.Module, inputs: Tensor, amount: float = 0.4, **options: Any) -> nn.Module:
    options = {"scope": "layer", "kinds": ("experts",), **options}
    return fxopt.optimize(
        model, Prune(method="structured", amount=amount, **options), example_inputs=inputs, measure=False
    )


def decisions(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {each.label: (each.status, each.detail or each.reason) for each in fxopt.plan(model).decisions}


def masked(model: nn.Module, router: str, kept: list[int]) -> nn.Module:
    """Return a copy of a model whose router gives logits of minus infinity to experts that are gone."""
    made = copy.deepcopy(model)
    weight = made.get_submodule(router).weight
    bias = torch.full((len(weight),), float("-inf"), dtype=weight.dtype)
    bias[kept] = 0
    linear = torch.nn.functional.linear

    class Masked(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out + bias if func is linear and out.shape[-1] == len(bias) else out

    forward = made.forward

    def run(*args):
        with Masked():
            return forward(*args)

    made.forward = run
    return made


def result(model: nn.Module, inputs: Tensor) -> Tensor:
    out = model(inputs)
    return out if isinstance(out, Tensor) else out.logits


CASES = {
    **{name: (lambda name=name: family(name), IDS, "model.layers.0.mlp.gate") for name in
       ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe")},
    "eager": (lambda: family("Mixtral", experts_implementation="eager"), IDS, "model.layers.0.mlp.gate"),
    "own": (lambda: Mixing(bias=True), X, "moe.router"),
    "sigmoid": (lambda: Mixing(gate="sigmoid", gated=False), X, "moe.router"),
    "list": (lambda: Around(Looping()), X, "moe.gate"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "training"), [*((case, False) for case in CASES), *((case, True) for case in ("Mixtral", "own", "list"))]
)
def test_the_rest_is_the_original_whose_router_never_takes_what_is_gone(case: str, training: bool) -> None:
    make, inputs, router = CASES[case]
    model = make().train(training)
    fast = prune(model, inputs)
    assert decisions(fast)[router] == ("applied", f"removes 2 of 5 experts of {router}")
    kept = fxopt.plan(fast).decisions[-1].site["data"]["units"][router][2]
    assert len(kept) == 3 and fast.get_submodule(router).weight.shape[0] == 3
    assert torch.equal(fast.get_submodule(router).weight, model.get_submodule(router).weight[kept])
    assert sum(p.numel() for p in fast.parameters()) < sum(p.numel() for p in model.parameters())
    reference = masked(model, router, kept)
    found, expected = (result(each.eval(), inputs) for each in (fast, reference))
    assert torch.allclose(found, expected, atol=1e-5)
    loss = result(fast.train(training), inputs).sum()
    loss.backward()


@pytest.mark.parametrize("case", ["Mixtral", "own", "list"])
@pytest.mark.filterwarnings("ignore::fxopt.errors.StateWarning")
def test_checkpoints_optimizers_copies_and_restoring(case: str) -> None:
    make, inputs, router = CASES[case]
    model, other = make(), make()
    optimizer = torch.optim.Adam(model.parameters())
    result(model, inputs).sum().backward()
    optimizer.step()
    fast = fxopt.optimize(
        model, Prune(method="structured", scope="layer", amount=0.4, kinds=("experts",)), example_inputs=inputs,
        optimizer=optimizer, measure=False,
    )  # fmt: skip
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in fast.parameters()}
    weight = fast.get_submodule(router).weight
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape
    saved = fast.state_dict()
    assert {name: each.shape for name, each in saved.items()} == {n: e.shape for n, e in other.state_dict().items()}
    fast.load_state_dict(other.state_dict())
    kept = fxopt.plan(fast).decisions[-1].site["data"]["units"][router][2]
    assert torch.equal(weight, other.get_submodule(router).weight[kept])
    fast.load_state_dict(saved)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(result(twin, inputs), result(fast, inputs))
    restored = fxopt.restore(fast)
    assert restored.get_submodule(router).weight.shape[0] == 5
    assert [type(each) for each in restored.modules()] == [type(each) for each in model.modules()]
    optimizer.step()


@pytest.mark.parametrize("case", ["Qwen3Moe", "list"])
@pytest.mark.filterwarnings("ignore::fxopt.errors.StateWarning")
def test_plans_and_archives_take_the_same_experts(case: str, tmp_path: Any) -> None:
    make, inputs, router = CASES[case]
    model, other = make().eval(), make().eval()
    with torch.no_grad():
        other.get_submodule(router).weight.mul_(torch.linspace(3, 1, 5)[:, None])
    fast = prune(model, inputs)
    again = fxopt.optimize(other, plan=fxopt.plan(fast), example_inputs=inputs)
    units = [fxopt.plan(each).decisions[-1].site["data"]["units"] for each in (fast, again)]
    assert units[0] == units[1]
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=make().eval(), example_inputs=inputs)
    assert loaded.get_submodule(router).weight.shape[0] == 3
    assert torch.equal(result(loaded, inputs), result(fast, inputs))


@pytest.mark.filterwarnings("ignore::fxopt.errors.StateWarning")
def test_what_is_left_of_a_list_has_its_items_alone_and_all_names() -> None:
    model = Around(Looping())
    fast = prune(model, X)
    experts = fast.moe.experts
    assert type(experts).__name__ == "KeptExperts" and len(experts) == 3 == fast.moe.num_experts
    assert [type(each) for each in experts] == [Expert] * 3 and experts[-1] is list(experts)[2]
    assert list(fast.state_dict()) == list(model.state_dict())
    assert sum(each.numel() for each in fast.moe.experts.parameters()) * 5 == 3 * sum(
        each.numel() for each in model.moe.experts.parameters()
    )
    fewer = prune(fast, X, amount=0.34)
    assert len(fewer.moe.experts) == 2 and len(fast.moe.experts) == 3


def test_experts_and_the_units_in_them_go_together() -> None:
    fast = prune(family("Mixtral"), IDS, 0.5, kinds=("channels", "heads", "hidden", "experts"))
    stacked = fast.model.layers[0].mlp.experts
    assert stacked.gate_up_proj.shape == (3, 24, 8) and stacked.down_proj.shape == (3, 8, 12)
    assert stacked.num_experts == 3 and fast.model.layers[0].mlp.gate.num_experts == 3
    fast.train()(IDS).logits.sum().backward()
    only = prune(family("Mixtral"), IDS, 0.5, kinds=("hidden",)).model.layers[0].mlp.experts
    assert only.gate_up_proj.shape[:2] == (5, 24)


def test_experts_that_are_multiplied_together_keep_rows_of_whole_16_bytes() -> None:
    fast = prune(family("Mixtral"), IDS, 0.41, kinds=("channels", "hidden"))  # 14 of 24, and 9 of 16
    assert fast.model.layers[0].mlp.experts.gate_up_proj.shape == (5, 32, 8)
    assert {status for status, _ in decisions(fast).values()} == {"applied"}


def chosen(model: nn.Module) -> list[int]:
    return fxopt.plan(model).decisions[-1].site["data"]["units"]["moe.router"][2]


def test_what_decides() -> None:
    model = Mixing()
    with torch.no_grad():
        model.moe.down_proj[1].mul_(9)
        model.moe.down_proj[3].mul_(5)
    assert {1, 3} < set(chosen(prune(model, X)))
    scores = {"moe.down_proj": torch.arange(5.0)[:, None, None].expand_as(model.moe.down_proj)}
    assert chosen(prune(model, X, scores=scores)) == [2, 3, 4]
    tokens = model.inner(X).reshape(-1, 16)
    _, indices, _ = model.moe.router(tokens)
    busiest = indices.flatten().bincount(minlength=5).argsort(descending=True, stable=True)[:3]
    assert chosen(prune(model, X, criterion="routing")) == sorted(busiest.tolist())
    batches = [X[:1, :2]]
    _, indices, _ = model.moe.router(model.inner(batches[0]).reshape(-1, 16))
    taken = chosen(prune(model, X, criterion="routing", data=batches, loss=lambda net, batch: net(batch)))
    assert set(indices.unique().tolist()[:3]) <= set(taken)
    assert len(chosen(prune(model, X, criterion="taylor"))) == 3


def test_no_layer_is_left_with_fewer_experts_than_a_token_goes_to() -> None:
    fast = prune(Mixing(), X, amount=0.8)
    reason = "each token goes to 2 of its 5 experts, and amount=0.8 would leave 1"
    assert decisions(fast)["moe.router"] == ("refused", reason)
    assert decisions(prune(Mixing(experts=2), X, amount=0.1))["moe.router"] == (
        "refused", "each token goes to 2 of its 2 experts",
    )  # fmt: skip
    assert len(chosen(prune(Mixing(), X, amount=0.8, scope="global"))) == 2
    assert len(chosen(prune(Mixing(), X, amount=0.38, target="parameters"))) == 3


class OneGroup(Looping):
    """Chooses among groups of experts first, of which there is one (`n_group=1` of DeepSeek-V3)."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x.reshape(-1, 16))
        best = logits.view(len(logits), 1, -1).topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1, sorted=False)[1]
        return super().forward(x) + best.sum()


def test_one_group_of_experts_is_no_choice() -> None:
    fast = prune(Around(OneGroup()), X)
    assert decisions(fast)["moe.gate"][0] == "applied" and fast.moe.gate.weight.shape == (3, 16)


class Limited(Looping):
    """Chooses among pairs of experts first."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x.reshape(-1, 16))
        best = logits.view(-1, 2, 2).amax(-1).topk(1)[1]
        return super().forward(x) + best.sum()


class Dense(Looping):
    """Runs all experts on all tokens, written out."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        weights = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, weights)
        return sum(weights[..., number, None] * expert(x) for number, expert in enumerate(self.experts))


class Unclear(Looping):
    """Two linear layers have a row for each expert."""

    def __init__(self, experts: int = 5) -> None:
        super().__init__(experts)
        self.noise = nn.Linear(16, experts)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.noise(x).sum()


def shared() -> Looping:
    model = Looping()
    model.experts[1].up = model.experts[0].up
    return model


@pytest.mark.parametrize(
    ("model", "router", "reason"),
    [
        (
            Mixing(capacity_factor=1.5), "moe.router",
            "their number decides how many tokens each serves (capacity_factor)",
        ),
        (Around(Limited(4)), "moe.gate", "the router also chooses among groups of them"),
        (Around(Dense()), "moe.gate", "the graph of 'moe' calls them one by one"),
        (Around(Unclear()), "moe.noise", "'moe.gate' may be their router, too"),
        (Around(shared()), "moe.gate", "they share tensors"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(model: nn.Module, router: str, reason: str) -> None:
    before = copy.deepcopy(model.state_dict())
    assert decisions(prune(model, X))[router] == ("refused", f"its experts cannot be removed: {reason}")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("by_config", [True, False])
def test_a_model_that_returns_its_logits_keeps_their_width(by_config: bool) -> None:
    model = family("Mixtral", **({"output_router_logits": True} if by_config else {}))
    inputs = IDS if by_config else fxopt.Inputs(IDS, output_router_logits=True)
    fast = prune(model, inputs)
    reason = (
        "the model returns the logits of all, and balances their load by them; set config.output_router_logits = False"
    )
    router = "model.layers.0.mlp.gate"
    assert decisions(fast) == {router: ("refused", f"its experts cannot be removed: {reason}")}


def test_kinds_are_read_and_written() -> None:
    pass_ = Prune(method="structured", kinds=("experts", "heads"), criterion="routing")
    assert parse(str(pass_)) == (pass_,) and "kinds=[experts,heads]" in str(pass_)
    with pytest.raises(UsageError, match="kinds"):
        Prune(kinds=("experts",))
    with pytest.raises(UsageError, match="kinds='towers'"):
        Prune(method="structured", kinds=("towers",))  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore::fxopt.errors.StateWarning")
@pytest.mark.parametrize("passes", ["prune{amount=0.5,scope=layer}", "quantize{scheme=int8_weight,aim=size}"])
def test_what_is_gone_is_no_layer_for_other_passes(passes: str) -> None:
    fast = prune(Around(Looping()).eval(), X)
    both = fxopt.optimize(fast, passes, example_inputs=X, measure=False)
    assert not [label for label, (status, _) in decisions(both).items() if status == "undone"]
    assert len(both.moe.experts) == 3 and both(X).shape == (2, 8, 4)


def test_zeros_come_back_with_a_warning() -> None:
    fast = prune(Mixing(), X)
    with pytest.warns(StateWarning):
        saved = fast.state_dict()
    gone = sorted(set(range(5)) - set(chosen(fast)))
    assert not saved["moe.down_proj"][gone].any() and not saved["moe.router.weight"][gone].any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(fast.moe.down_proj) == 3
