"""autocast: what gains runs in 16 bits, what needs float32 does not, and nobody outside sees another type."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxopt
from fxopt.compat import modules_by_name
from fxopt.passes.contract import Pass
from fxopt.passes.pipeline import parse
from fxopt.runtime.graphs import WrappedRegion
from fxopt.transforms.autocast import Autocast

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


class Types(TorchDispatchMode):
    """Note in which types operators compute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, Tensor):
            self.seen.setdefault(func.overloadpacket.__name__, set()).add(first.dtype)
        return result


class Attention(nn.Module):
    """Attention written out, with a softmax between two products, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 4
        mixed = F.softmax(scores, dim=-1) @ self.v(x)
        return self.norm(x + F.gelu(self.out(mixed)))


class Heads(nn.Module):
    """Two uses of one projection, and another with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.body(x).tanh()) + self.body(torch.exp(self.tied(x) * 0.1))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def optimized(model: nn.Module, pass_: Pass | str = "autocast", inputs: Any = (X,), **options: Any) -> nn.Module:
    return fxopt.optimize(model, pass_, example_inputs=inputs, measure=False, **options)


def decisions(model: nn.Module) -> list[tuple[str, str, str]]:
    return [(each.label, each.status, each.reason) for each in fxopt.plan(model).decisions]


def regions(model: nn.Module) -> list[str]:
    return [name for name, module in modules_by_name(model).items() if isinstance(module, WrappedRegion)]


def types_of(model: nn.Module, x: Tensor = X) -> dict[str, set[torch.dtype]]:
    with torch.no_grad(), Types() as types:
        model(x)
    return types.seen


def operations(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]


# -- what it does ------------------------------------------------------------------------------------------------------


def test_what_computes_in_float32_inside_follows_bfloat16_alone() -> None:
    fast = optimized(made(Attention))
    graphs = fxopt.graphs(fast)
    inside = ["q", "k", "transpose", "matmul", "truediv", "softmax", "v", "matmul_1", "out", "gelu", "add"]
    assert operations(graphs[""]) == ["autocast", "norm"]
    assert operations(graphs["autocast"]) == inside
    seen = types_of(fast)
    assert seen["_softmax"] == {torch.bfloat16}
    assert seen["native_layer_norm"] == {torch.float32}


class Activation(nn.Module):
    """GELU written out, as GPT-2 has it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_power_in_a_module_follows_what_it_reads(dtype: torch.dtype) -> None:
    model = made(lambda: nn.Sequential(nn.Linear(16, 32), Activation(), nn.Linear(32, 16), nn.LayerNorm(16)))
    seen = types_of(optimized(model, Autocast(dtype=dtype)))
    widened = dtype is torch.float16
    assert (torch.float32 in seen["pow"]) is widened
    assert (torch.float32 in seen["native_layer_norm"]) is widened
    assert types_of(optimized(nn.Sequential(nn.LayerNorm(16), *model)))["native_layer_norm"] >= {torch.float32}


def test_products_are_in_regions_and_softmax_and_norm_are_islands() -> None:
    fast = optimized(made(Attention), Autocast(dtype=torch.float16))
    graphs = fxopt.graphs(fast)
    assert operations(graphs[""]) == ["autocast", "getitem", "getitem_1", "softmax", "autocast_1", "norm"]
    assert operations(graphs["autocast"]) == ["q", "k", "transpose", "matmul", "truediv", "v"]
    assert operations(graphs["autocast_1"]) == ["matmul_1", "out", "gelu", "add"]
    seen = types_of(fast)
    assert seen["addmm"] == seen["gelu"] == {torch.float16}
    assert seen["_softmax"] == {torch.float32}
    assert fast(X).dtype is torch.float32


@pytest.mark.parametrize("kind", [Attention, Heads, mlp])
def test_outputs_and_gradients_are_within_the_budget(kind: Callable[[], nn.Module]) -> None:
    model, pass_ = made(kind), Autocast(budget=0.02)
    fast = optimized(model, pass_)
    assert all(status == "applied" for _, status, _ in decisions(fast))
    plain, quick = model(X), fast(X)
    assert 0 < (plain - quick).abs().max() <= 0.02 * plain.abs().max()
    plain.sin().sum().backward()
    quick.sin().sum().backward()
    for (name, expected), (same, found) in zip(model.named_parameters(), fast.named_parameters(), strict=True):
        assert name == same
        assert expected.grad is not None and found.grad is not None and found.grad.dtype is torch.float32
        if name != "k.bias":  # zero in exact arithmetic
            assert (expected.grad - found.grad).abs().max() <= 0.05 * expected.grad.abs().max()


def test_statistics_may_be_written_where_a_layer_is_never_called() -> None:
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16)).train()
    model[1].register_module("unused", nn.Linear(16, 16))
    before = copy.deepcopy(model.state_dict())
    fast = optimized(model, Autocast())
    assert all(torch.equal(value, before[name]) for name, value in fast.state_dict().items())
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)


def test_gradients_that_jump_behind_a_relu_are_told_apart_from_the_error() -> None:
    for seed in range(40):
        torch.manual_seed(seed)
        fast = optimized(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).train(), Autocast(budget=0.05))
        (figures,) = (d.figures for d in fxopt.plan(fast).decisions if d.status == "applied")
        assert figures["precision_error"] <= 0.05
        if figures.get("gradient_jump"):
            break
    assert figures["gradient_jump"] > 0.05
    assert "where those of the original jump, too" in str(fxopt.report(fast))


def test_a_budget_that_16_bits_cannot_keep_leaves_float32() -> None:
    fast = optimized(made(mlp).eval(), Autocast(budget=1e-5))
    ((_, status, reason),) = decisions(fast)
    assert status == "undone" and reason.startswith("over the budget of 1e-05: ")
    assert torch.equal(fast(X), made(mlp)(X)) and not regions(fast)


class Rough(nn.Module):
    """What 16 bits get wrong: a small difference of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.two.weight.data.copy_(self.one.weight + 1e-2 * torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) - self.two(x)


def test_in_training_what_torchs_autocast_errs_is_allowed_beside_the_budget() -> None:
    model, pass_ = made(Rough), Autocast(budget=0.02)
    plain = model(X)
    with torch.autocast("cpu", torch.bfloat16):
        error = (model(X).float() - plain).abs().max() / plain.abs().max()
    assert error > 0.02
    ((_, trained, _),) = decisions(optimized(model.train(), pass_, phase="train"))
    ((_, served, reason),) = decisions(optimized(model.eval(), pass_, phase="eval"))
    assert trained == "applied"
    assert served == "undone" and reason.startswith("over the budget of 0.02: ")


def saved_bytes(model: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes that autograd keeps of a forward, memory that is kept twice once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(x)
    assert result.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(
    "kind", [Attention, lambda: nn.Sequential(nn.Linear(16, 64), Activation(), nn.Linear(64, 16), nn.LayerNorm(16))]
)
def test_no_more_is_kept_for_the_backward_than_under_torchs_autocast(kind: Callable[[], nn.Module]) -> None:
    model, x = made(kind).train(), torch.randn(512, 16)
    fast = optimized(model, inputs=(x,), phase="train")

    def by_torch(given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(given)

    assert saved_bytes(fast, x) <= 1.02 * saved_bytes(by_torch, x) < 0.9 * saved_bytes(model, x)


class Recurrent(nn.Module):
    """One block of attention, run several times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Attention()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x.tanh()


class Casts(TorchDispatchMode):
    """Count the casts of tensors of one shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


def test_a_block_that_is_called_again_casts_its_weights_once() -> None:
    model = made(Recurrent).train()
    fast = optimized(model, phase="train")
    assert [status for _, status, _ in decisions(fast)] == ["applied"]
    assert operations(fxopt.graphs(fast)[""]) == ["casts", "tanh"]
    for _ in range(2):
        with Casts((16, 16)) as casts:
            loss = fast(X).sum()
        assert casts.count == 4
        loss.backward()
        with torch.no_grad():  # the next forward computes with what the weights are then
            fast.block.out.weight.zero_()
            fast.block.out.bias.zero_()
    expected = copy.deepcopy(model)
    expected.load_state_dict(fast.state_dict())
    torch.testing.assert_close(fast(X), expected(X))
    assert operations(fxopt.graphs(optimized(fast))[""]) == ["casts", "tanh"]


def test_float16_with_a_scaler_unscales_and_skips_steps_with_infinities() -> None:
    model = made(mlp).train()
    fast = optimized(model, Autocast(dtype=torch.float16), phase="train")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    before = copy.deepcopy(model.state_dict())
    step(fast(X).square().mean())
    model(X).square().mean().backward()
    for (name, plain), own in zip(model.named_parameters(), fast.parameters(), strict=True):
        assert plain.grad is not None and own.grad is not None
        assert (plain.grad - own.grad).abs().max() <= 0.02 * plain.grad.abs().max()
        torch.testing.assert_close(own.detach(), before[name] - 0.1 * own.grad)
    kept, scale = copy.deepcopy(fast.state_dict()), scaler.get_scale()
    step(1e8 * fast(X).square().mean())  # more than float16 holds on the way back
    assert not all(parameter.grad.isfinite().all() for parameter in fast.parameters() if parameter.grad is not None)
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(value, kept[name]) for name, value in fast.state_dict().items())


def test_float16() -> None:
    fast = optimized(made(mlp), Autocast(dtype=torch.float16))
    assert types_of(fast)["addmm"] == {torch.float16}


def test_gradients_of_a_relu_that_flips_are_no_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    x = torch.randn(2, 3, 12, 12)
    fast = optimized(model.eval(), inputs=(x,))
    assert [status for _, status, _ in decisions(fast)] == ["applied"]
    assert types_of(fast, x)["convolution"] == {torch.bfloat16}


# -- whose types hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_the_users_autocast_its_types_hold(dtype: torch.dtype) -> None:
    model = made(Attention)
    fast = optimized(model)
    with torch.autocast("cpu", dtype):
        expected, found = model.out(X), fast.out(X)
        assert expected.dtype is found.dtype is dtype
        assert torch.equal(model(X), fast(X))


def test_a_thread_of_its_own_computes_the_same() -> None:
    fast = optimized(made(Attention))
    expected, found = fast(X), list[Tensor]()
    thread = threading.Thread(target=lambda: found.append(fast(X)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_in_float64_it_stands_aside() -> None:
    model = made(Attention)
    fast = optimized(model).double()
    assert torch.equal(fast(X.double()), model.double()(X.double()))


class Switched(nn.Module):
    """The user keeps a product in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = torch.exp(self.first(x) * 0.1)
        return self.second(x)


def test_what_the_user_switched_stays_so() -> None:
    fast = optimized(made(Switched))
    assert any(status == "refused" and "the model itself opens autocast" in why for _, status, why in decisions(fast))
    assert operations(fxopt.graphs(fast)["autocast"]) == ["second"]
    assert types_of(fast)["addmm"] == {torch.float32, torch.bfloat16}


# -- what is left out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["q", "*q", "matmul"])
def test_keep_names_modules_and_operators(word: str) -> None:
    graphs = fxopt.graphs(optimized(made(Attention), Autocast(keep=(word,))))
    inside = [name for owner, graph in graphs.items() if owner for name in operations(graph)]
    kept = {"matmul": {"matmul", "matmul_1"}}.get(word, {"q"})
    assert inside and not kept.intersection(inside) and kept <= set(operations(graphs[""]))


def test_keep_names_classes() -> None:
    fast = optimized(made(Attention), Autocast(keep=("Linear",)))
    assert types_of(fast)["addmm"] == {torch.float32} and regions(fast)


def test_hooks_see_float32() -> None:
    model = made(mlp)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    fast = optimized(model)
    assert ("0", "refused", "its hooks would see results in 16 bits") in decisions(fast)
    seen.clear()
    fast(X)
    assert seen == [torch.float32]


def test_other_types_are_refused() -> None:
    fast = optimized(made(mlp).double(), inputs=(X.double(),))
    assert ("0", "refused", "it computes in float64; autocast is for float32") in decisions(fast)
    recurrent = nn.Sequential(nn.LSTM(16, 4))
    ((where, status, why),) = decisions(optimized(recurrent))
    assert (where, status) == ("0", "refused") and "LSTM is one operation" in why


def test_without_example_inputs_nothing_is_known() -> None:
    ((_, status, why),) = decisions(fxopt.optimize(made(mlp), "autocast"))
    assert status == "refused" and "give example_inputs" in why


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("autocast{dtype=float32}", "use bfloat16 or float16"),
        ("autocast{device=xla}", "nothing of the model is on such a device"),
        ("autocast{keep=[Linaer]}", "names nothing in the model; did you mean 'Linear'"),
        ("autocast{budget=0}", "give a relative error"),
    ],
)
def test_bad_options_are_refused_before_any_work(text: str, message: str) -> None:
    with pytest.raises(fxopt.UsageError, match=message):
        fxopt.optimize(made(mlp), text, example_inputs=(X,))


def test_a_device_that_lacks_the_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such arithmetic")

    monkeypatch.setattr(torch, "autocast", lacking)
    with pytest.raises(fxopt.UsageError, match=r"cpu does not compute in bfloat16.*no such arithmetic.*dtype=float16"):
        Autocast().check(made(mlp))


# -- code without a graph ----------------------------------------------------------------------------------------------


class Opaque(nn.Module):
    """What a value decides cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().sum().item() > 0) + len({id(x)})):
            x = torch.tanh(self.layer(x))
        return x


def test_a_layer_that_only_code_calls() -> None:
    model = made(Opaque)
    fast = optimized(model)
    assert [(where, status) for where, status, _ in decisions(fast)] == [("layer", "applied")]
    assert type(fast.layer).__name__ == "Linear" and isinstance(fast.layer, nn.Linear)
    assert types_of(fast)["addmm"] == {torch.bfloat16} and fast(X).dtype is torch.float32
    assert torch.equal(pickle.loads(pickle.dumps(fast))(X), fast(X))
    assert torch.equal(copy.deepcopy(fast)(X), fast(X))
    assert torch.equal(fxopt.restore(fast)(X), model(X))


# -- the model around it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Attention, Heads, mlp])
def test_state_copies_and_restoring(kind: Callable[[], nn.Module]) -> None:
    model = made(kind)
    before = copy.deepcopy(model.state_dict())
    fast = optimized(model)
    assert list(fast.state_dict()) == list(before) and list(dict(fast.named_parameters()))
    assert all(torch.equal(fast.state_dict()[name], value) for name, value in before.items())
    assert all(torch.equal(copied(X), fast(X)) for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))))
    assert torch.equal(fxopt.restore(fast)(X), model(X)) and not regions(model)
    again = optimized(fast)
    assert regions(again) == regions(fast) and torch.equal(again(X), fast(X))
    other = {name: value + 0.1 for name, value in before.items()}
    fast.load_state_dict(other)
    model.load_state_dict(other)
    assert not torch.equal(fast(X), model(X))
    assert (fast(X) - model(X)).abs().max() < 0.05 * model(X).abs().max()


@pytest.mark.parametrize("kind", [Attention, Opaque])
def test_a_plan_and_an_archive_repeat_it(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    fast = optimized(made(kind))
    again = fxopt.optimize(made(kind), plan=fxopt.plan(fast), example_inputs=(X,))
    assert torch.equal(again(X), fast(X))
    fxopt.save(fast, tmp_path / "fast.fxopt")
    loaded = fxopt.load(tmp_path / "fast.fxopt", model=made(kind))
    assert torch.equal(loaded(X), fast(X))


def test_compiled_and_exported() -> None:
    fast = optimized(made(Attention).eval())
    with torch.no_grad():
        compiled = torch.compile(fast, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), fast(X))
        exported = torch.export.export(fast, (X,))
        assert torch.equal(exported.module()(X), fast(X))


@given(
    st.builds(
        Autocast,
        dtype=st.sampled_from([torch.bfloat16, torch.float16]),
        device=st.sampled_from(["auto", "cuda", "cpu"]),
        keep=st.lists(st.sampled_from(["head", "encoder.*", "LayerNorm", "a b"]), max_size=3).map(tuple),
        budget=st.floats(1e-6, 1.0),
    )
)
def test_its_text_is_read_again(pass_: Autocast) -> None:
    assert list(parse(str(pass_))) == [pass_]


@pytest.mark.parametrize("training", [False, True])
def test_experts_gain_and_their_router_stays_in_float32(training: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), fxopt.layers.MixtureOfExperts(16, 32, 4, 2, shared_experts=1))
    model.train(training)
    x, seen = torch.randn(2, 8, 16), list[torch.dtype]()
    fast = fxopt.optimize(model, "autocast{dtype=bfloat16}", example_inputs=(x,), measure=False, time_budget=60)
    assert [(each.status, each.detail) for each in fxopt.plan(fast).decisions] == [("applied", "_0, _1")]
    experts = next(each for each in fast.modules() if isinstance(each, fxopt.layers.MixtureOfExperts))
    hook = experts.router.register_forward_hook(lambda _, __, output: seen.append(output[0].dtype))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=0.05, atol=0.02)
    hook.remove()
    assert set(seen) == {torch.float32}
