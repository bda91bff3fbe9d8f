"""Effects: what may be removed, merged or moved, and what may not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.small_models import HeadsAndOne
from torch import Tensor, nn

import fxopt
from fxopt.passes.rewriting import handed_out, has_effects, writes, written_values
from fxopt.tracing.program import Program


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * 1


class CountsLargeBatches(Counting):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 100:
            self.count.add_(1)
        return x * 1


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x * 1


def hooked() -> nn.Module:
    layer = nn.ReLU()
    layer.register_forward_pre_hook(lambda module, args: None)
    return layer


def program_of(*children: nn.Module, forward: Callable[..., object] | None = None) -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.children_ = nn.ModuleList(children)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("variance", torch.ones(4))
            self.weight = nn.Parameter(torch.randn(5, 4))

        def forward(self, x: Tensor) -> object:
            for child in self.children_:
                child(x)
            return x

    if forward is not None:
        Model.forward = forward
    return fxopt.capture(Model(), (torch.randn(2, 4),))


def effects(program: Program) -> dict[str, tuple[bool, bool]]:
    """Return (has effects, writes) of each node but inputs, outputs and reads, by its name."""
    nodes = (node for node in program.graph("").nodes if node.op not in ("placeholder", "output", "get_attr"))
    return {node.name: (has_effects(node, program, ""), writes(node, program, "")) for node in nodes}


PURE, DRAWS, WRITES = (False, False), (True, False), (True, True)
WOULD_IN_TRAINING = (True, False)

MODULES = {
    "linear": (lambda: nn.Linear(4, 4), PURE),
    "relu": (nn.ReLU, PURE),
    "relu in place": (lambda: nn.ReLU(inplace=True), WRITES),
    "dropout": (nn.Dropout, DRAWS),
    "dropout in place": (lambda: nn.Dropout(inplace=True), WRITES),
    "dropout in evaluation": (lambda: nn.Dropout().eval(), WOULD_IN_TRAINING),
    "batch norm": (lambda: nn.BatchNorm1d(4), WRITES),
    "batch norm in evaluation": (lambda: nn.BatchNorm1d(4).eval(), WOULD_IN_TRAINING),
    "hooked": (hooked, WRITES),
    "sequential": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), PURE),
    "sequential with dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), DRAWS),
    "counting": (Counting, WRITES),
    "sequential that counts": (lambda: nn.Sequential(Counting()), WRITES),
    "counting in another case": (CountsLargeBatches, (True, False)),
    "opaque": (Opaque, WRITES),
    "of one operator": (lambda: nn.LPPool1d(2, 2), PURE),
    "unknown": (lambda: nn.ReflectionPad1d(1), WRITES),
}


@pytest.mark.parametrize("kind", MODULES)
def test_modules(kind: str) -> None:
    make, expected = MODULES[kind]
    [found] = effects(program_of(make())).values()
    assert found == expected


def test_embeddings_that_renormalise_write() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        self.children_[0](x.long())
        self.children_[1](x.long())
        F.embedding(x.long(), self.weight)
        F.embedding(x.long(), self.weight, max_norm=1.0)
        return x

    embeddings = nn.Embedding(5, 4), nn.Embedding(5, 4, max_norm=1.0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.children_ = nn.ModuleList(embeddings)
            self.register_buffer("weight", torch.randn(5, 4))

    Model.forward = forward
    program = fxopt.capture(Model(), (torch.zeros(2),))
    found = {name: has for name, (has, _) in effects(program).items() if not name.startswith("long")}
    assert found == {"children__0": False, "children__1": True, "embedding": False, "embedding_1": True}


FUNCTIONS = {
    "sin": (lambda self, x: torch.sin(x), PURE),
    "method": (lambda self, x: x.sum(-1), PURE),
    "view": (lambda self, x: x.view(-1), PURE),
    "native": (lambda self, x: F.linear(x, self.weight), PURE),
    "comparison": (lambda self, x: operator.lt(x, 1), PURE),
    "dropout": (lambda self, x: F.dropout(x), DRAWS),
    "rand": (lambda self, x: torch.rand_like(x), DRAWS),
    "random method": (lambda self, x: x.bernoulli(0.5), DRAWS),
    "in place": (lambda self, x: x.add_(1), WRITES),
    "in place and random": (lambda self, x: x.normal_(), WRITES),
    "setitem": (lambda self, x: operator.setitem(x, 0, 1.0), WRITES),
    "statistics": (lambda self, x: F.batch_norm(x, self.mean, self.variance, training=True), WRITES),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_and_methods(kind: str) -> None:
    call, expected = FUNCTIONS[kind]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = x + 0
        call(self, x)
        return x

    found = effects(program_of(forward=forward))
    del found["add"]
    assert list(found.values()) == [expected]


def test_unknown_functions_may_do_anything() -> None:
    program = program_of(forward=lambda self, x: torch.sin(x))
    graph = program.graph("")
    node = graph.call_function(print, (next(iter(graph.nodes)),))
    method = graph.call_method("append", (node,))
    assert has_effects(node, program, "") and has_effects(method, program, "")


def test_checks_stay_but_write_nothing() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = x.sum(-1).sin()
        return y * 2 if y.sum(0).ndim == 0 else y

    assert effects(program_of(forward=forward))["require"] == DRAWS


def test_writes_reach_through_views() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        written, read = x.sin(), x.cos()
        written.view(-1)[0].add_(1)
        return written + read

    program = program_of(forward=forward)
    nodes = {node.name: node for node in program.graph("").nodes}
    written = written_values(program.graph(""), program, "")
    assert nodes["sin"] in written
    assert nodes["cos"] not in written
    assert nodes["add"] not in written


def test_what_the_caller_gets() -> None:
    program = program_of(forward=lambda self, x: {"a": [x.sin()], "b": x.cos() + 1})
    assert {node.name for node in handed_out(program.graph(""), program, "")} == {"sin", "add"}


def test_what_the_caller_gets_by_way_of_views() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.view(x.shape) * y

    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        same, act, inner = self.children_
        return x.sin().view(-1), same(x.cos()), act(x.tan()), inner(x.exp(), x.sqrt()), x.neg().relu_()

    program = program_of(nn.Identity(), nn.ReLU(), Inner(), forward=forward)
    handed = {node.name for node in handed_out(program.graph(""), program, "")}
    assert {"sin", "cos", "neg"} <= handed
    assert not handed & {"tan", "exp", "sqrt"}


def test_fused_members_stay_pure() -> None:
    fast = fxopt.optimize(
        HeadsAndOne(), "fuse_ensembles{lowering=bmm}", example_inputs=(torch.randn(2, 4),), measure=False
    )
    program = Program(fast)
    [call] = program.graph("").find_nodes(op="call_module")
    assert program.callee("", call) is fast.heads[0]
    assert not has_effects(call, program, "")


def test_batch_norms_in_evaluation_write_nothing() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        F.batch_norm(x, self.mean, self.variance)
        F.batch_norm(x, self.mean, self.variance, training=False)
        F.batch_norm(x, self.mean, self.variance, None, None, False)
        F.batch_norm(x, self.mean, self.variance, None, None, True)
        F.batch_norm(x, self.mean, self.variance, training=self.training)
        return x

    found = [write for _, write in effects(program_of(forward=forward)).values()]
    assert found[1:4] == [False, False, True]
    assert found[-1]
