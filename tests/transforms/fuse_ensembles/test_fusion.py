"""fuse_ensembles: it fires in every spelling, refuses with reasons, and changes neither results nor training."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.shares import share
from torch import Tensor, nn

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.testing import assert_equivalent
from fxopt.transforms.fuse_ensembles import FuseEnsembles, Lowering

N = 6


def head(inside: int = 5, hidden: int = 7, outside: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, hidden), nn.Tanh(), nn.Linear(hidden, outside))


class Heads(nn.Module):
    """Hold the members; subclasses spell the loop."""

    def __init__(self, count: int = N) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head() for _ in range(count))


class Comprehension(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([h(x) for h in self.heads], dim=-1)


class Loop(Heads):
    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for h in self.heads:
            outputs.append(h(x))  # noqa: PERF401  this loop is what is tested
        return torch.stack(outputs, dim=1)


class StackMean(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([h(x) for h in self.heads]).mean(0)


class PythonSum(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return sum(h(x) for h in self.heads) / len(self.heads)


class RunningTotal(Heads):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0], 3, dtype=x.dtype)
        for h in self.heads:
            total += h(x)
        return total


class WeightedSum(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(N))

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for i, h in enumerate(self.heads):
            total = total + self.mix[i] * h(x)
        return total


class Residual(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head(5, 7, 5) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x + torch.relu(h(x)) for h in self.heads]).sum(0)


class SeparateInputs(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([h(x[:, i]) for i, h in enumerate(self.heads)], dim=1)


class UserMember(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(x), approximate="tanh")) * self.scale


class UserMembers(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(UserMember() for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([h(x) for h in self.heads], 1)


class Functional(nn.Module):
    """Two lists instead of one list of pairs, functional calls, a method and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(5, 7) for _ in range(N))
        self.second = nn.ModuleList(nn.Linear(7, 3) for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        hidden = [F.relu(F.linear(x, m.weight, m.bias), inplace=True) for m in self.first]
        return torch.stack([m(h.sigmoid()) for m, h in zip(self.second, hidden, strict=True)])


class Nested(nn.Module):
    """An ensemble of ensembles below the root."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.groups = nn.ModuleList(Comprehension(3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return torch.stack([group(x) for group in self.groups])


SPELLINGS = [
    Comprehension, Loop, StackMean, PythonSum, RunningTotal, WeightedSum, Residual, SeparateInputs, UserMembers,
    Functional, Nested,
]  # fmt: skip
LOWERINGS = ["wide", "wide_input_first", "bmm", "grouped_conv", "vmap", "mlp"]


def example(model: nn.Module, batch: int = 4) -> Tensor:
    return torch.randn(batch, N, 5) if isinstance(model, SeparateInputs) else torch.randn(batch, 5)


def fused(model: nn.Module, lowering: str = "bmm", **options: Any) -> nn.Module:
    if "example_inputs" not in options:
        options["example_inputs"] = (example(model),)
    return fxopt.optimize(model, FuseEnsembles(Lowering(lowering)), **options)


def calls(model: nn.Module) -> int:
    """Count the linear layers and batched products that one forward runs."""
    return sum("linear" in str(node.target) for graph in fxopt.graphs(model).values() for node in graph.nodes)


# -- 1. it fires ---------------------------------------------------------------------------------------------------


def test_the_names_of_stacked_parameters_hold_no_name_of_a_member() -> None:
    """A filter by `"heads.0." in name` means one member, and must not find the stack of all."""
    names = [name for name, _ in fused(Comprehension(3), "bmm").named_parameters()]
    assert names and not any("heads." in name for name in names)


def test_the_graph_before_and_after() -> None:
    model = Comprehension(3)
    before = str(fxopt.capture(model, (torch.randn(2, 5),)).graphs[""]).split()
    assert before.count("call_module[target=heads.1](args") == 1
    after = [
        (node.op, getattr(node.target, "__name__", node.target))
        for node in fxopt.graphs(fused(model, "wide"))[""].nodes
    ]
    assert after == [
        ("placeholder", "x"),
        ("get_attr", "heads_fused.0.weight"),
        ("get_attr", "heads_fused.0.bias"),
        ("call_function", "wide_linear"),
        ("call_function", "tanh"),
        ("get_attr", "heads_fused.2.weight"),
        ("get_attr", "heads_fused.2.bias"),
        ("call_function", "batched_linear"),
        ("call_function", "concatenate_members"),
        ("output", "output"),
    ]


def covering() -> list[tuple[type[nn.Module], str, bool]]:
    """Return each spelling in both modes, under lowerings that take turns, and each lowering for one spelling."""
    turns = itertools.cycle(LOWERINGS)
    pairs = [(spelling, next(turns), training) for spelling in SPELLINGS for training in (True, False)]
    return pairs + [(Comprehension, lowering, training) for lowering in LOWERINGS for training in (True, False)]


@pytest.mark.parametrize(("spelling", "lowering", "training"), share(2, covering()))
def test_every_spelling_is_fused_and_equivalent(spelling: type[nn.Module], lowering: str, training: bool) -> None:
    torch.manual_seed(0)
    model = spelling().train(training)
    fast = fused(model, lowering)
    assert [d.status for d in fxopt.plan(fast).decisions].count("applied") >= 1, fxopt.plan(fast).decisions
    assert calls(fast) <= 4
    for batch in (4, 1, 9):
        inputs = (example(model, batch),)
        assert_equivalent(model, fast, inputs, map_state=fxopt.runtime.record.record_of(fast).state_map.forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = Comprehension().to(dtype)
    fast = fused(model, "wide", example_inputs=(torch.randn(4, 5, dtype=dtype),))
    x = torch.randn(3, 5, dtype=dtype)
    torch.testing.assert_close(fast(x), model(x))
    assert fast(x).dtype is dtype


def test_empty_batch_and_extra_dimensions() -> None:
    model = Comprehension()
    for lowering in LOWERINGS:
        fast = fused(model, lowering, example_inputs=(torch.randn(2, 4, 5),))
        for shape in ((2, 4, 5), (0, 4, 5), (3, 1, 5)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), model(x))


def test_input_first_changes_the_memory_layout_of_the_shared_linear_alone() -> None:
    model = Comprehension()
    fast = fused(model, "wide_input_first")
    strides = {name: weight.stride() for name, weight in fast.named_parameters() if weight.ndim == 3}
    first, *others = strides.values()
    assert first[1] == 1 and first[2] == max(first)
    assert all(weight[2] == 1 for weight in others)
    for copied in (copy.deepcopy(fast), copy.deepcopy(fast).double(), pickle.loads(pickle.dumps(fast))):
        assert {name: w.stride() for name, w in copied.named_parameters() if w.ndim == 3} == strides
    assert all(tensor.is_contiguous() for tensor in fxopt.state_dict(fast).values())
    assert all(parameter.is_contiguous() for parameter in fxopt.restore(fast).parameters())
    fxopt.load_state_dict(fast, {name: tensor * 2 for name, tensor in model.state_dict().items()})
    torch.testing.assert_close(
        fxopt.state_dict(fast), {name: tensor * 2 for name, tensor in model.state_dict().items()}
    )
    assert {name: w.stride() for name, w in fast.named_parameters() if w.ndim == 3} == strides


def test_nan_stays_where_it_was() -> None:
    model = Comprehension()
    fast = fused(model)
    x = torch.randn(4, 5)
    x[1, 2] = torch.nan
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


# -- 2. it refuses -------------------------------------------------------------------------------------------------


def reasons(model: nn.Module, *, training: bool = True, inputs: object = None) -> list[str]:
    """Return the reasons of the refusals; the graph must be as it was."""
    model.train(training)
    fast = fxopt.optimize(model, FuseEnsembles(Lowering.BMM), example_inputs=inputs or (example(model),))
    decisions = fxopt.plan(fast).decisions
    assert not [d for d in decisions if d.status == "applied"], decisions
    return [d.reason for d in decisions if d.status == "refused"]


def test_refuses_hooks() -> None:
    model = Comprehension()
    model.heads[2].register_forward_hook(lambda module, args, output: output * 2)
    assert any("member 2 cannot be fused: it has hooks" in reason for reason in reasons(model))


def test_refuses_parametrizations() -> None:
    model = Comprehension()
    nn.utils.parametrizations.weight_norm(model.heads[1][0])
    assert any("member 1 cannot be fused: it has parametrizations" in reason for reason in reasons(model))


def test_refuses_tied_parameters() -> None:
    model = Comprehension()
    model.heads[3][0].weight = model.heads[1][0].weight
    assert any("heads.1.0.weight" in reason for reason in reasons(model))


def test_refuses_shared_modules() -> None:
    model = Comprehension()
    model.heads[3] = model.heads[1]
    assert any("share the parameter" in reason or "is tied to" in reason for reason in reasons(model))


@pytest.mark.parametrize("training", [True, False])
def test_refuses_mixed_requires_grad(training: bool) -> None:
    model = Comprehension().train(training)
    model.heads[2].requires_grad_(False)
    assert any("differ in requires_grad" in reason for reason in reasons(model))


class ListOutput(Heads):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [h(x) for h in self.heads]


class OneLeftOut(Heads):
    def forward(self, x: Tensor) -> Tensor:
        outputs = [h(x) for h in self.heads]
        return torch.stack(outputs[:-1])


@pytest.mark.parametrize("model_class", [ListOutput, OneLeftOut])
def test_refuses_members_that_need_not_receive_gradients(model_class: type[nn.Module]) -> None:
    assert any("may give gradients to some of them only" in reason for reason in reasons(model_class()))


@pytest.mark.parametrize("model_class", [ListOutput, OneLeftOut])
def test_fuses_them_for_inference(model_class: type[nn.Module]) -> None:
    model = model_class().eval()
    fast = fused(model)
    assert calls(fast) <= 3
    torch.testing.assert_close(fast(x := torch.randn(4, 5)), model(x))


class WriteBetween(Heads):
    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        x = x.clone()
        for h in self.heads:
            outputs.append(h(x))
            x.mul_(0.5)
        return torch.stack(outputs)


def test_refuses_a_write_between_the_members() -> None:
    assert any("written in place between the members" in reason for reason in reasons(WriteBetween()))


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_members_are_left_alone(count: int) -> None:
    model = PythonSumOf(count)
    fast = fused(model)
    x = torch.randn(4, 5)
    torch.testing.assert_close(torch.as_tensor(fast(x)), torch.as_tensor(model(x)))
    assert not fxopt.plan(fast).decisions


class PythonSumOf(Heads):
    def forward(self, x: Tensor) -> Tensor | int:
        return sum(h(x) for h in self.heads)


def test_large_members_are_left_alone_without_inputs() -> None:
    fast = fxopt.optimize(LargeHeads(), "fuse_ensembles")
    assert ["give example_inputs" in d.reason for d in fxopt.plan(fast).decisions] == [True]


class LargeHeads(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(256, 512) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([h(x) for h in self.heads], -1)


# -- rules without inputs, unequal members -------------------------------------------------------------------------


def test_without_inputs_the_rule_decides() -> None:
    model = Comprehension()
    fast = fxopt.optimize(model, "fuse_ensembles")
    assert [d.choice for d in fxopt.plan(fast).decisions] == ["wide"]
    torch.testing.assert_close(fast(x := torch.randn(2, 3, 5)), model(x))


class UnequalTails(Heads):
    """Equal trunks, unequal last layers: the trunks are fused, the tails stay."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(head(5, 7, 2 + i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([h(x) for h in self.heads], -1)


def test_unequal_tails() -> None:
    model = UnequalTails()
    fast = fused(model)
    assert any(d.status == "applied" for d in fxopt.plan(fast).decisions)
    assert_equivalent(
        model, fast, (torch.randn(4, 5),), map_state=fxopt.runtime.record.record_of(fast).state_map.forward
    )


# -- 4. modes, hooks outside, containers ---------------------------------------------------------------------------


def test_the_old_container_stays_usable() -> None:
    model = Comprehension()
    fast = fused(model)
    assert len(fast.heads) == N and isinstance(fast.heads[1][0], nn.Linear)
    x = torch.randn(4, 5)
    torch.testing.assert_close(torch.cat([h(x) for h in fast.heads], -1), model(x))
    with torch.no_grad():
        fast.heads[2][0].weight.zero_()
        model.heads[2][0].weight.zero_()
    torch.testing.assert_close(fast(x), model(x))
    with pytest.raises(fxopt.FusedMemberError, match="restore"):
        fast.heads[0] = head()


def test_hooks_on_the_ensemble_itself_still_run() -> None:
    model = Comprehension()
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(args)))
    fast = fused(model)
    seen.clear()
    fast(torch.randn(4, 5))
    assert seen == [1]


def test_copies_and_pickles_are_independent() -> None:
    model = Comprehension()
    fast = fused(model)
    x = torch.randn(4, 5)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
        assert not torch.allclose(twin(x), fast(x))
        torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(twin.heads[1](x), fxopt.restore(twin).heads[1](x))


# -- 5. idempotence ------------------------------------------------------------------------------------------------


def test_twice_is_once() -> None:
    once = fused(Comprehension())
    twice = fused(once, example_inputs=(torch.randn(4, 5),))
    assert str(fxopt.graphs(twice)[""]) == str(fxopt.graphs(once)[""])
    assert list(fxopt.state_dict(twice)) == list(Comprehension().state_dict())


# -- 6. checkpoints and training -----------------------------------------------------------------------------------


def test_checkpoints_go_both_ways() -> None:
    model, other = Comprehension(), Comprehension()
    fast = fused(model)
    x = torch.randn(4, 5)
    fast.load_state_dict(other.state_dict())
    torch.testing.assert_close(fast(x), other(x))
    saved = fxopt.state_dict(fast)
    assert list(saved) == list(model.state_dict())
    model.load_state_dict(saved)
    torch.testing.assert_close(model(x), other(x))
    back = fxopt.restore(fast)
    assert type(back) is Comprehension
    torch.testing.assert_close(back(x), other(x))
    fast.load_state_dict(fast.state_dict())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("spelling", [Comprehension, WeightedSum, SeparateInputs])
def test_training_fused_equals_training_members(
    name: str, spelling: type[nn.Module], step: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    model = spelling().double()
    inputs = [example(model).double() for _ in range(20)]
    optimizer = OPTIMIZERS[name](model.parameters())
    for x in inputs[:3]:
        step(model, optimizer, x)
    fast = fused(model, example_inputs=(inputs[0],))
    twin = copy.deepcopy(model)
    reference = OPTIMIZERS[name](twin.parameters())
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 5, 0.5) for o in (optimizer, reference)]
    fxopt.translate_optimizer(optimizer, fast)
    for x in inputs:
        torch.testing.assert_close(step(fast, optimizer, x), step(twin, reference, x), rtol=1e-9, atol=1e-9)
        for scheduler in schedulers:
            scheduler.step()
    for one, other in zip(fxopt.state_dict(fast).values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# -- 7. the user's model is untouched ------------------------------------------------------------------------------


def test_the_user_model_is_untouched() -> None:
    model = Comprehension()
    before = pickle.dumps(model)
    state = torch.random.get_rng_state()
    x = torch.randn(4, 5)
    torch.random.set_rng_state(state)
    fused(model, example_inputs=(x,))
    assert pickle.dumps(model) == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_inplace_keeps_identities() -> None:
    model = Comprehension()
    heads, first = model.heads, model.heads[0]
    x = torch.randn(4, 5)
    expected = model(x)
    fast = fused(model, inplace=True)
    assert fast is model and fast.heads is heads and fast.heads[0] is first
    torch.testing.assert_close(model(x), expected)


# -- 8. text -------------------------------------------------------------------------------------------------------


@given(st.sampled_from(Lowering))
def test_text_round_trip(lowering: Lowering) -> None:
    assert parse(str(FuseEnsembles(lowering))) == (FuseEnsembles(lowering),)
