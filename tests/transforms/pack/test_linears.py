"""pack on linear layers: what it writes, refuses and leaves as it was, and what happens when tensors change."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.errors import FusedMemberError, UsageError
from fxopt.passes.pipeline import parse
from fxopt.transforms.pack import Pack

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

needs_bfloat16 = pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


def network(*behind: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), *behind, nn.Linear(24, 4, bias=False)).eval()


def packed(model: nn.Module, x: object = X, **options: object) -> nn.Module:
    return fxopt.optimize(model, Pack(), example_inputs=x, measure=False, **options)  # type: ignore[arg-type]


def calls(model: nn.Module, x: Tensor = X) -> int:
    """Return how many packed operators a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        model(x)
    return sum(event.name.startswith("mkldnn::_linear_pointwise") for event in found.events())


def same(one: nn.Module, other: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        torch.testing.assert_close(one(x), other(x))


def reasons(model: nn.Module, x: object = X) -> list[str]:
    fast = packed(model, x)
    return [decision.reason for decision in fxopt.plan(fast).decisions if decision.status == "refused"]


# -- it fires --------------------------------------------------------------------------------------------------------


def test_it_packs_layers_with_what_is_behind_them() -> None:
    model = network(nn.GELU())
    fast = packed(model)
    graph = fxopt.graphs(fast)[""]
    assert [node.name for node in graph.nodes if node.op == "call_function"] == ["packed_linear", "packed_linear_1"]
    assert not graph.find_nodes(op="call_module")
    with torch.no_grad():
        assert (calls(model), calls(fast)) == (0, 2)
    same(fast, model)


ACTIVATIONS = (
    nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.Hardswish(),
    nn.Hardsigmoid(), nn.LeakyReLU(0.3), nn.LeakyReLU(0.0), nn.Hardtanh(-0.5, 0.25), nn.ReLU6(),
)  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_are_computed_with_the_layer(activation: nn.Module) -> None:
    model = network(activation)
    fast = packed(model)
    assert not fxopt.graphs(fast)[""].find_nodes(op="call_module")
    same(fast, model, X * 3)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_what_is_not_finite_stays_so(activation: nn.Module) -> None:
    model, x = network(activation), X.clone()
    x[0, 0], x[1, 0], x[2, 0] = float("nan"), float("inf"), -float("inf")
    fast = packed(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), equal_nan=True)


class Spelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weight)
        return torch.relu(h) + h


def test_a_function_of_a_parameter_is_a_layer_and_what_is_read_twice_stays() -> None:
    model = Spelled().eval()
    fast = packed(model)
    names = [node.name for node in fxopt.graphs(fast)[""].nodes if node.op == "call_function"]
    assert names == ["packed_linear", "relu", "add"]
    same(fast, model)


def test_an_activation_that_is_not_known_stays() -> None:
    model = network(nn.ELU())
    fast = packed(model)
    assert [node.name for node in fxopt.graphs(fast)[""].nodes if node.op == "call_module"] == ["_1"]
    same(fast, model)


# -- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16,), (0, 16), (1, 16), (2, 3, 16), (2, 0, 16), (5, 1, 2, 16)], ids=str)
def test_calls_of_any_shape(shape: tuple[int, ...]) -> None:
    model = network(nn.ReLU())
    same(packed(model), model, torch.randn(shape))


def test_inputs_in_any_order_of_memory() -> None:
    model = network(nn.ReLU())
    same(packed(model), model, torch.randn(16, 6).t())


def test_wrong_inputs_raise_what_they_raised() -> None:
    fast = packed(network(nn.ReLU()))
    with torch.no_grad(), pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        fast(torch.randn(2, 15))
    with torch.no_grad(), pytest.raises(RuntimeError, match="same dtype"):
        fast(torch.randn(2, 16).double())


@pytest.mark.parametrize(
    "bias",
    [torch.tensor(0.5), torch.ones(1), torch.arange(144.0).view(6, 24), torch.arange(48.0)[::2]],
    ids=["number", "one", "rows", "strided"],
)
def test_biases_of_other_shapes(bias: Tensor) -> None:
    model = network()
    fast = packed(model)
    model[0].bias, fast[0].bias = nn.Parameter(bias), nn.Parameter(bias)  # type: ignore[index, union-attr]
    same(fast, model)


def test_inputs_without_dimensions_raise_what_they_raised() -> None:
    model = network()
    with torch.no_grad(), pytest.raises(RuntimeError) as expected:
        model(torch.tensor(1.0))
    with torch.no_grad(), pytest.raises(RuntimeError) as found:
        packed(model)(torch.tensor(1.0))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("grad", [False, True])
def test_tangents_are_those_of_the_layer(grad: bool) -> None:
    model, fast = network(nn.ReLU()).requires_grad_(False), packed(network(nn.ReLU()).requires_grad_(False))
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        tangents = [
            forward_ad.unpack_dual(each(forward_ad.make_dual(X, torch.ones_like(X)))).tangent for each in (fast, model)
        ]
    torch.testing.assert_close(*tangents)
    assert calls(fast) == 2


def test_gradients_are_those_of_the_layer() -> None:
    model = network(nn.GELU())
    fast = packed(model)
    found = torch.autograd.grad(fast(X).sum(), list(fast.parameters()))
    expected = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_training_runs_the_layers_themselves() -> None:
    model = network(nn.ReLU())
    fast = packed(model).train()
    assert calls(fast) == 0
    torch.testing.assert_close(fast(X), model(X))


def test_frozen_parameters_need_no_gradients() -> None:
    assert calls(packed(network(nn.ReLU()).requires_grad_(False))) == 2


def test_autocast_computes_as_ever() -> None:
    model = network(nn.ReLU())
    fast = packed(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fast(X).dtype is torch.bfloat16
        assert torch.equal(fast(X), model(X))


def test_transforms_and_compilers_see_the_layers() -> None:
    model = network(nn.ReLU())
    fast = packed(model)
    with torch.no_grad():
        fast(X)
        exported = torch.export.export(fast, (X,))
        assert "mkldnn" not in str(exported.graph)
        torch.testing.assert_close(exported.module()(X), model(X))
        torch.testing.assert_close(torch.vmap(fast)(X), model(X))
        torch.testing.assert_close(torch.compile(fast, backend="eager", fullgraph=True)(X), model(X))
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        torch.testing.assert_close(
            torch.func.functional_call(fast, state, (X,)), torch.func.functional_call(model, state, (X,))
        )


def test_inference_mode() -> None:
    model = network(nn.ReLU())
    fast = packed(model)
    with torch.inference_mode():
        torch.testing.assert_close(fast(X), model(X))
        assert calls(fast) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_after_packing(dtype: torch.dtype) -> None:
    model = network(nn.ReLU())
    fast = packed(model)
    same(fast, model)
    same(fast.to(dtype), model.to(dtype), X.to(dtype))
    same(fast.float(), model.float())


# -- the originals are the truth -------------------------------------------------------------------------------------


def change_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[index]


def load(model: nn.Module) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def set_data(model: nn.Module) -> None:
    model[2].weight.data = torch.ones_like(model[2].weight)  # type: ignore[index]


def assign(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(torch.ones(4, 24))  # type: ignore[index]


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(X).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", [change_in_place, load, set_data, assign, step])
def test_changed_originals_are_packed_anew(change: object) -> None:
    model = network(nn.ReLU())
    fast = packed(model)
    same(fast, model)
    before = fast(X).detach()
    change(model), change(fast)  # type: ignore[operator]
    same(fast, model)
    assert not torch.allclose(before, fast(X))


def test_state_copies_and_pickles_know_the_originals_alone(tmp_path: Path) -> None:
    model = network(nn.ReLU())
    fast = packed(model)
    same(fast, model)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [name for name, _ in fast.named_parameters()] == [name for name, _ in model.named_parameters()]
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fxopt.restore(fast)):
        same(other, model)
    other = copy.deepcopy(fast)
    change_in_place(other)
    same(fast, model)
    fxopt.save(fast, tmp_path / "model.fxopt")
    same(fxopt.load(tmp_path / "model.fxopt", model=network(nn.ReLU())), model)


def test_threads_see_old_or_new_weights_and_nothing_else() -> None:
    model = network(nn.ReLU())
    fast = packed(model)
    results: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            results.extend(fast(X) for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(2)]
    with torch.no_grad():
        old = model(X)
        for thread in threads:
            thread.start()
        fast[0].weight.copy_(model[0].weight * 2)
        for thread in threads:
            thread.join()
        model[0].weight.mul_(2)
        new = model(X)
        torch.testing.assert_close(fast(X), new)
    assert len(results) == 100
    assert all(any(torch.allclose(each, known, atol=1e-5) for known in (old, new)) for each in results)


# -- it refuses ------------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_subclasses_hooks_and_parametrizations_are_refused() -> None:
    model = network(nn.ReLU())
    model[0] = Doubled(16, 24)
    assert reasons(model.eval()) == ["it is a Doubled, which may compute something else than nn.Linear"]
    model = network(nn.ReLU())
    model[0].register_forward_hook(lambda module, args, result: result + 1)
    assert reasons(model) == ["it has hooks"]
    model = network(nn.ReLU())
    nn.utils.parametrizations.weight_norm(model[0])
    assert reasons(model) == ["it has parametrizations"]


def test_other_types_are_refused() -> None:
    assert reasons(network(nn.ReLU()).double(), X.double())[0] == "its weight is of float64; only float32 is packed"


def test_training_is_refused() -> None:
    assert "call model.eval() first" in reasons(network(nn.ReLU()).train())[0]


def test_a_hook_that_comes_later_is_refused() -> None:
    with pytest.raises(FusedMemberError):
        packed(network(nn.ReLU()))[0].register_forward_hook(lambda *_: None)


def test_unknown_types_are_refused() -> None:
    with pytest.raises(UsageError, match="use float32 or bfloat16"):
        fxopt.optimize(network(), Pack(dtype=torch.float16), example_inputs=X)


def test_a_machine_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt.transforms.pack.pack.why_no_packing", lambda _: "this PyTorch has no oneDNN")
    assert reasons(network()) == ["this PyTorch has no oneDNN"]


# -- bfloat16 --------------------------------------------------------------------------------------------------------


@needs_bfloat16
def test_bfloat16_inside_a_model_of_float32() -> None:
    model = network(nn.ReLU())
    fast = fxopt.optimize(model, Pack(torch.bfloat16), example_inputs=X, measure=False)
    with torch.no_grad():
        found, expected = fast(X), model(X)
    assert found.dtype is torch.float32
    error = (found - expected).abs().max() / expected.abs().max()
    assert 1e-5 < error < 2e-2


@needs_bfloat16
def test_the_budget_is_held() -> None:
    fast = fxopt.optimize(network(nn.ReLU()), Pack(torch.bfloat16, budget=1e-5), example_inputs=X, measure=False)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["refused", "refused"]


# -- the pass --------------------------------------------------------------------------------------------------------


def test_twice_is_once() -> None:
    model = network(nn.ReLU())
    once = packed(model)
    twice = packed(once)
    assert str(fxopt.graphs(twice)[""]) == str(fxopt.graphs(once)[""])
    same(twice, model)


def test_the_users_model_is_untouched_and_restored() -> None:
    model = network(nn.ReLU())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast = packed(model)
    assert type(fxopt.restore(fast)) is nn.Sequential
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_plan_is_replayed() -> None:
    model = network(nn.ReLU())
    again = fxopt.optimize(model, Pack(), example_inputs=X, plan=fxopt.plan(packed(model)))
    with torch.no_grad():
        assert calls(again) == 2


@given(st.sampled_from([torch.float32, torch.bfloat16]), st.floats(1e-4, 1.0))
def test_options_as_text(dtype: torch.dtype, budget: float) -> None:
    pass_ = Pack(dtype, budget)
    assert parse(str(pass_)) == (pass_,)
