"""Ensembles that a forward calls under a context: fused there, their parameters owned by the module around it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt.errors import FusedMemberError
from fxopt.transforms.fuse_ensembles import FuseEnsembles, Lowering

X = (torch.randn(5, 6, generator=torch.Generator().manual_seed(0)),)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": autocast,
}


class Heads(nn.Module):
    """Heads under a context, and a layer behind it."""

    def __init__(self, context: str = "no_grad") -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(4))
        self.tail = nn.Linear(12, 2)
        self.context = context

    def under(self, x: Tensor) -> Tensor:
        with CONTEXTS[self.context]():
            return torch.cat([head(x) for head in self.heads], -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.under(x).float().clone())


class Inside(Heads):
    """A context within a context."""

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__(inner)
        self.outer = outer

    def under(self, x: Tensor) -> Tensor:
        with CONTEXTS[self.outer]():
            return super().under(x * 2)


class Checkpointed(Heads):
    def under(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.cat([head(x) for head in self.heads], -1), x, use_reentrant=False)


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], count: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.widen = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.widen(block(x))
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{context: lambda context=context: Heads(context) for context in CONTEXTS},
    "no_grad, autocast": lambda: Inside("no_grad", "autocast"),
    "checkpoint": Checkpointed,
    "block": lambda: Blocks(lambda: Heads("no_grad")),
    "equal blocks": lambda: Blocks(lambda: Heads("autocast"), 3),
}
REGIONS = ("no_grad", "enable_grad", "inference_mode", "autocast", "checkpoint")


def made(kind: str, *, training: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]().train(training)


def optimized(model: nn.Module, lowering: str = "bmm", **options: Any) -> nn.Module:
    return fxopt.optimize(
        model, FuseEnsembles(Lowering(lowering)), **{"example_inputs": X, "measure": False, **options}
    )


def outcomes(fast: nn.Module) -> list[tuple[str, str]]:
    return [(decision.status, decision.reason) for decision in fxopt.plan(fast).decisions]


def fused(model: nn.Module, **options: Any) -> nn.Module:
    fast = optimized(model, **options)
    assert {status for status, _ in outcomes(fast)} == {"applied"}
    return fast


def assert_same_output(one: nn.Module, other: nn.Module, x: Tensor = X[0]) -> None:
    result, expected = one(x), other(x)
    assert result.dtype == expected.dtype
    assert result.requires_grad == expected.requires_grad
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_the_graph_under_the_context() -> None:
    fast = fused(made("no_grad"))
    graph = fxopt.graphs(fast)["no_grad_0"]
    assert [str(node.target) for node in graph.find_nodes(op="get_attr")] == [
        "heads_fused.0.weight", "heads_fused.0.bias", "heads_fused.2.weight", "heads_fused.2.bias",
    ]  # fmt: skip
    assert not graph.find_nodes(op="call_module")
    assert fast.no_grad_0.heads_fused is fast.heads_fused


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_fused_under_a_context_it_stays_the_same_model(kind: str, training: bool) -> None:
    model = made(kind, training=training)
    before = copy.deepcopy(model.state_dict())
    fast = fused(model)
    assert_same_output(fast, model)
    assert_same_output(fast, model, torch.randn(7, 6))
    names = [name for name, _ in fast.named_parameters()]
    assert not [name for name in names if any(region in name for region in REGIONS)]
    assert sum("heads_fused" in name for name in names) == 4 * len(outcomes(fast))
    assert list(fxopt.state_dict(fast)) == list(before)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_and_copies(kind: str) -> None:
    model, other = made(kind), made(kind, seed=1)
    fast = fused(model)
    fast.load_state_dict(other.state_dict())
    assert_same_output(fast, other)
    restored = fxopt.restore(fast)
    assert list(restored.state_dict()) == list(other.state_dict())
    torch.testing.assert_close(restored(*X), other(*X), rtol=0, atol=0)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        twin.load_state_dict(model.state_dict())
        assert_same_output(twin, model)
        assert_same_output(fast, other)
    again = optimized(fast)
    assert_same_output(again, other)
    torch.testing.assert_close(fxopt.state_dict(again), dict(other.state_dict()), rtol=0, atol=0)
    repeated = optimized(model, plan=fxopt.plan(fast))
    assert [str(graph) for graph in fxopt.graphs(repeated).values()] == [str(g) for g in fxopt.graphs(fast).values()]
    assert_same_output(repeated, model)


@pytest.mark.parametrize("kind", ["no_grad", "enable_grad", "autocast", "checkpoint", "block"])
def test_an_optimizer_moves_over(kind: str) -> None:
    model = made(kind, training=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(*X).square().mean().backward()
        optimizer.step()

    step(model, optimizer)
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fast = fused(model)
    ours = fxopt.translate_optimizer(optimizer, fast)
    for _ in range(3):
        step(twin, theirs)
        step(fast, ours)
    tolerance = 5e-2 if kind == "autocast" else 1e-4
    torch.testing.assert_close(fxopt.state_dict(fast), dict(twin.state_dict()), rtol=tolerance, atol=tolerance)


def test_members_are_views_and_what_would_cut_them_loose_is_refused() -> None:
    model = made("block")
    fast = fused(model)
    with torch.no_grad():
        for each in (model, fast):
            each.blocks[0].heads[1][0].weight.mul_(3)
    assert_same_output(fast, model)
    with pytest.raises(FusedMemberError):
        fast.blocks[0].heads[1] = nn.Linear(6, 3)
    with pytest.raises(FusedMemberError):
        fast.blocks[0].heads_fused = nn.Linear(6, 3)


def test_a_call_that_no_graph_fits_runs_the_forward() -> None:
    class Scaled(Heads):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x if scale == 1.0 else x * scale)

    torch.manual_seed(0)
    model = Scaled().eval()
    fast = fused(model)
    for _ in range(3):
        torch.testing.assert_close(fast(*X, scale=2.0), model(*X, scale=2.0))
        torch.testing.assert_close(fast(*X), model(*X))


def test_timed_it_lands_or_says_why_not() -> None:
    (status, reason), *_ = outcomes(optimized(made("autocast"), "auto", measure=True))
    assert status == "applied" or reason.startswith(("no faster", "not clearly faster"))


def test_the_report_names_the_context() -> None:
    assert "no_grad_0.heads" in str(fxopt.report(fused(made("no_grad"))))


# -- what is refused -----------------------------------------------------------------------------------------------


class Twice(Heads):
    """Equal members under two contexts, or under one and outside."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        first = super().forward(x)
        if self.second == "outside":
            return first + sum(head(x).sum() for head in self.heads)
        with CONTEXTS[self.second]():
            return first + torch.cat([head(x) for head in self.heads], -1).sum()


class ByMode(Heads):
    """Another graph for each mode, both with the members."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x * 2)


def refused(model: nn.Module, **options: Any) -> str:
    fast = optimized(model.eval(), **options)
    assert_same_output(fast, model)
    return " ".join(reason for status, reason in outcomes(fast) if status in ("refused", "undone"))


def test_members_that_something_else_uses_too() -> None:
    assert "under no_grad(), and module '(root)' uses members too" in refused(Twice("outside"))
    assert "under no_grad(), and region 'inference_mode_0' uses members too" in refused(Twice("inference_mode"))


@pytest.mark.parametrize("training", [False, True])
def test_members_that_another_graph_of_the_module_uses(training: bool) -> None:
    model = ByMode().train(training)
    fast = optimized(model)
    assert {status for status, _ in outcomes(fast)} == {"refused"}
    assert "region 'no_grad_1' uses members too" in outcomes(fast)[0][1]
    for mode in (training, not training):
        assert_same_output(fast.train(mode), model.train(mode))


def test_tied_members() -> None:
    model = Heads()
    model.heads[1][0].weight = model.heads[0][0].weight
    assert "'heads.0.0.weight'" in refused(model)


def test_what_cannot_be_compared_under_autocast() -> None:
    assert "give example_inputs to compare the types" in refused(Heads("autocast"), example_inputs=None)
    assert "no_grad() within autocast" in refused(Inside("autocast", "no_grad"))


def test_members_run_one_by_one_where_autocast_does_not_reach_a_lowering() -> None:
    model = Heads("autocast").eval()
    fast = optimized(model, "vmap")
    assert [status for status, _ in outcomes(fast)] == ["applied"]
    assert_same_output(fast, model)


def test_a_rewrite_that_is_refused_leaves_no_trace() -> None:
    model = Heads("autocast").eval()
    model.heads[1][0].weight = model.heads[0][0].weight
    fast = optimized(model, "bmm")
    assert list(dict(fast.named_parameters())) == list(dict(model.named_parameters()))
    assert not hasattr(fast, "heads_fused")
    assert not hasattr(fast.autocast_0, "heads_fused")
    assert list(fast.autocast_0.borrowed) == [f"heads.{i}" for i in range(4)]
