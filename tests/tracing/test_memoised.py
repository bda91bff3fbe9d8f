"""Memoised functions in forwards: what would put a value of the trace into a memo is opaque, and memos stay clean."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from torch import nn

from fxopt.tracing.program import capture_program


def memoised(function):
    """Memoise a function as libraries do that must not do so while they are compiled."""
    memo = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return memo(*args, **kwargs)

    wrapper.memo = memo
    return wrapper


@functools.lru_cache
def ramp(length: int) -> torch.Tensor:
    return torch.arange(length) * 2


@memoised
def scaled(length: int, scale: float = 1.0) -> torch.Tensor:
    return torch.arange(length) * scale


@functools.cache
def half(length: int) -> int:
    return length // 2


@functools.cache
def row_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


elsewhere = types.ModuleType("elsewhere")
elsewhere.torch, elsewhere.functools = torch, functools
exec("@functools.lru_cache\ndef ramp(n): return torch.arange(n) * 3\ndef call(n): return ramp(n)\n", vars(elsewhere))
call_elsewhere = elsewhere.call


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.width = kind, 5
        self.linear = nn.Linear(5, 5)

    @staticmethod
    @memoised
    def positions(length: int) -> torch.Tensor:
        return torch.linspace(0, 1, length)

    @functools.lru_cache  # noqa: B019
    def method(self, length: int) -> torch.Tensor:
        return torch.arange(length) + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(getattr(self, self.kind)(x))

    def number(self, x):
        return x * half(6) + half(self.width)

    def plain(self, x):
        return x + ramp(5)

    def of_size(self, x):
        return x + ramp(x.shape[1])

    def wrapped(self, x):
        return x + scaled(x.shape[1], scale=0.5)

    def static(self, x):
        return x + self.positions(5)

    def static_of_size(self, x):
        return x + self.positions(x.shape[1])

    def of_self(self, x):
        return x + self.method(x.shape[1])

    def of_tensor(self, x):
        return x + row_sums(x)[:, None]

    def in_another_file(self, x):
        return x + call_elsewhere(x.shape[1])


KEEPS = "it calls a memoised function, which would keep what it is given"
NO_NAME = "it uses a tensor that is no parameter"
REFUSED = {
    "plain": NO_NAME,
    "of_size": KEEPS,
    "wrapped": KEEPS,
    "static": NO_NAME,
    "static_of_size": KEEPS,
    "of_self": KEEPS,
    "of_tensor": KEEPS,
    "in_another_file": KEEPS,
}
MEMOS = (ramp, scaled.memo, half, row_sums, Net.__dict__["positions"].__func__.memo, Net.method, elsewhere.ramp)


@pytest.fixture(autouse=True)
def fresh_memos():
    for memo in MEMOS:
        memo.cache_clear()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_put_values_of_the_trace_into_a_memo_is_opaque(kind: str):
    model, x = Net(kind).eval(), torch.randn(3, 5)
    program = capture_program(copy.deepcopy(model), (x,))
    assert REFUSED[kind] in program.opaque[""].reason
    torch.testing.assert_close(program.model(x), model(x))


@pytest.mark.parametrize("kind", REFUSED)
def test_memos_hold_real_values_afterwards(kind: str):
    model = Net(kind)
    capture_program(model, (torch.randn(3, 5),))
    assert type(ramp(5)) is torch.Tensor
    assert type(scaled.memo(5, scale=0.5)) is torch.Tensor
    assert type(Net.positions(5)) is torch.Tensor
    assert type(elsewhere.ramp(5)) is torch.Tensor


def test_plain_values_of_plain_values_are_constants():
    model, x = Net("number").eval(), torch.randn(3, 5)
    program = capture_program(copy.deepcopy(model), (x,))
    assert not program.opaque
    program.model.width = model.width = 9
    torch.testing.assert_close(program.model(x), model(x))
