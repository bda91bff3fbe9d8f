"""The pass of docs/writing-a-pass.md, written with public names only, does what the page says, in every spelling."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent

PAGE = Path(__file__).resolve().parents[3] / "docs" / "writing-a-pass.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
[CODE] = [block for block in BLOCKS if "class FuseSilu" in block]


def fuse_silu() -> fxopt.Pass:
    names: dict[str, object] = {"__name__": "newcomer"}
    exec(compile(CODE, str(PAGE), "exec"), names)
    return names["FuseSilu"]()


class Model(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.gate, self.compute = nn.Linear(4, 4), nn.Sigmoid(), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.layer(x))


def optimized(model: nn.Module, x: Tensor) -> tuple[nn.Module, list[fxopt.Decision]]:
    fast = fxopt.optimize(model, fuse_silu(), example_inputs=(x,), measure=False)
    return fast, list(fxopt.plan(fast).decisions)


FUSED = {
    "operator": lambda self, x: x * torch.sigmoid(x),
    "commuted": lambda self, x: torch.sigmoid(x) * x,
    "functions": lambda self, x: torch.mul(x, F.sigmoid(x)),
    "keywords": lambda self, x: torch.mul(other=x, input=torch.sigmoid(input=x)),
    "methods": lambda self, x: x.mul(x.sigmoid()),
    "synonyms": lambda self, x: torch.special.expit(x).multiply(x),
    "module": lambda self, x: x * self.gate(x),
    "module, by keyword": lambda self, x: self.gate(input=x) * x,
    "in place": lambda self, x: x.sigmoid().mul_(x),
    "in place, the value": lambda self, x: x.mul_(torch.sigmoid(x)),
    "in place, by operator": lambda self, x: operator.imul(torch.sigmoid(x), x),
    "operators of torch": lambda self, x: torch.ops.aten.mul.Tensor(x, torch.ops.aten.sigmoid(x)),
}


@pytest.mark.parametrize("spelling", FUSED)
def test_it_fires_in_every_spelling(spelling: str) -> None:
    model, x = Model(FUSED[spelling]).eval().requires_grad_(False), torch.randn(3, 4)
    fast, decisions = optimized(model, x)
    assert [decision.status for decision in decisions] == ["applied"], decisions
    assert [node.name for node in fxopt.graphs(fast)[""].nodes] == ["x", "layer", "silu", "output"]
    assert "gate" in dict(fast.named_children())
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("spelling", ["operator", "keywords", "methods", "module"])
def test_numerics(spelling: str) -> None:
    model, x = Model(FUSED[spelling]), torch.randn(3, 4)
    assert_equivalent(model, optimized(model, x)[0], (x,))


LEFT_ALONE = {
    "another value": lambda self, x: x * torch.sigmoid(x + 1),
    "another function": lambda self, x: x * torch.tanh(x),
    "the gate overwrites the value": lambda self, x: x * x.sigmoid_(),
}


@pytest.mark.parametrize("spelling", LEFT_ALONE)
def test_it_leaves_others_alone(spelling: str) -> None:
    fast, decisions = optimized(Model(LEFT_ALONE[spelling]), torch.randn(3, 4))
    assert not decisions and "silu" not in str(fxopt.graphs(fast)[""])


def test_it_refuses_a_sigmoid_that_is_read_elsewhere() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        return x * gate + gate

    fast, [decision] = optimized(Model(forward), torch.randn(3, 4))
    assert (decision.status, decision.reason) == ("refused", "the sigmoid is read elsewhere too")
    assert "silu" not in str(fxopt.graphs(fast)[""])


def test_several_in_one_graph_and_a_second_time() -> None:
    """The value of the second is the result of the first."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = x * torch.sigmoid(x)
        return y * self.gate(y)

    model, x = Model(forward), torch.randn(3, 4)
    fast, decisions = optimized(model, x)
    assert [decision.status for decision in decisions] == ["applied", "applied"]
    assert str(fxopt.graphs(fast)[""]).count("call_function[target=torch.nn.functional.silu]") == 2
    again, decisions = optimized(fast, x)
    assert len(decisions) == 2  # those of the first time
    assert str(fxopt.graphs(again)[""]) == str(fxopt.graphs(fast)[""])


def test_it_is_short_and_uses_public_names_only() -> None:
    assert CODE.count("\n") < 45
    assert set(re.findall(r"^(?:from|import) (\S+)", CODE, re.MULTILINE)) <= {
        "collections.abc", "dataclasses", "fxopt", "fxopt.passes", "torch.nn.functional",
    }  # fmt: skip
    assert "._" not in CODE
