"""fold_constants: literals are computed once; what a checkpoint, a caller or a write could change is not touched."""

from __future__ import annotations

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.testing import assert_equivalent
from fxopt.transforms.fold_constants import FoldConstants


class Mask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(8) < 4
        return x * mask


class FromBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale * 2)


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(8)
        total.view(-1).add_(x.sum())
        return total * 1


class HandedOut(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.ones(3)


class HandedOutAsViews(nn.Module):
    """What is returned lies in the memory of constants, if not in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()
        self.flat = _Flat()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        cast, wide = torch.arange(4.0).to(x), torch.ones(1, 4).expand(x.shape[0], 4)
        return cast, wide, self.same(torch.zeros(4)), self.flat(torch.full((4,), 2.0)), x + torch.full((4,), 3.0)


class _Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)


class Large(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(100)


class BatchDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[0]).unsqueeze(1)


def folded(model: nn.Module, x: Tensor, options: str = "") -> nn.Module:
    return fxopt.optimize(model, f"fold_constants{options}", example_inputs=(x,))


HANDED_OUT = "the constant, or a view of it, is handed to the caller, who may write into it"


def reasons(model: nn.Module) -> list[str]:
    return [d.reason for d in fxopt.plan(model).decisions]


def test_the_graph_before_and_after() -> None:
    model, x = Mask(), torch.randn(3, 8)
    fast = folded(model, x)
    assert [(n.op, str(n.target)) for n in fxopt.graphs(fast)[""].nodes][1] == ("get_attr", "constant_lt")
    assert len(fxopt.graphs(fast)[""].nodes) == 4
    assert_equivalent(model, fast, (x,))
    assert not fast.state_dict()


def test_buffers_are_never_folded() -> None:
    model, x = FromBuffer(), torch.randn(8)
    fast = folded(model, x)
    assert reasons(fast) == []
    fast.load_state_dict({"scale": torch.full((8,), 5.0)})
    torch.testing.assert_close(fast(x), x * 10)


def test_refuses_constants_that_are_written_to() -> None:
    model, x = Written(), torch.randn(8)
    fast = folded(model, x)
    assert reasons(fast) == ["the constant, or a view of it, is written to"]
    torch.testing.assert_close(fast(x), fast(x))


def test_refuses_constants_handed_to_the_caller() -> None:
    assert reasons(folded(HandedOut(), torch.randn(3))) == [HANDED_OUT]


def test_refuses_constants_of_which_the_caller_gets_a_view() -> None:
    model, x = HandedOutAsViews(), torch.randn(1, 4)
    fast = folded(model, x)
    assert sorted(reasons(fast)) == ["", *[HANDED_OUT] * 4]
    for output in fast(x):
        output.fill_(9.0)
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)


def test_refuses_large_constants() -> None:
    x = torch.randn(100)
    assert reasons(folded(Large(), x, "{limit=99}")) == ["the constant has 100 elements, more than limit=99"]
    assert reasons(folded(Large(), x, "{limit=100}")) == [""]


def test_shapes_of_inputs_are_not_constants() -> None:
    model = BatchDependent()
    fast = folded(model, torch.randn(3, 2))
    torch.testing.assert_close(fast(torch.zeros(5, 2)), model(torch.zeros(5, 2)))


def test_copies_and_repetition() -> None:
    x = torch.randn(3, 8)
    fast = folded(Mask(), x)
    torch.testing.assert_close(copy.deepcopy(fast)(x), fast(x))
    assert str(fxopt.graphs(folded(fast, x))[""]) == str(fxopt.graphs(fast)[""])


@given(st.integers(0, 1 << 40).map(FoldConstants))
def test_text_round_trip(pass_: FoldConstants) -> None:
    assert parse(str(pass_)) == (pass_,)
