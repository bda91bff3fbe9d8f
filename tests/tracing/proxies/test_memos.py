"""Memoised functions in forwards: asked at every call, never baked in, and left as they were by capturing."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxopt
from fxopt.tracing.program import capture_program

FACTOR = 2


def memoised(function):
    """Memoise a function as libraries do that must not do so while they are compiled."""
    memo = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) if torch.compiler.is_compiling() else memo(*args, **kwargs)

    wrapper.memo = memo
    return wrapper


@functools.lru_cache
def ramp(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.arange(length, dtype=dtype, device=device) * 2


@memoised
def scaled(length: int, scale: float = 1.0) -> torch.Tensor:
    return torch.arange(length) * scale


@functools.cache
def half(length: int) -> int:
    return length // 2


@functools.cache
def pair(length: int) -> tuple[torch.Tensor, int]:
    return torch.ones(length), length


@functools.cache
def row_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


@memoised
def weighted_sums(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x * FACTOR).sum(1, keepdim=True) * scale


def by_rows(function):
    """Memoise a function in a wrapper that does more than to ask whether it is compiled."""
    memo = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(x):
        return function(x) * 0.5 if x.shape[0] > 8 else memo(x)

    return wrapper


@by_rows
def halved_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


elsewhere = types.ModuleType("elsewhere")
elsewhere.torch, elsewhere.functools = torch, functools
exec(
    "@functools.lru_cache\ndef ramp(n): return torch.arange(n) * 3\ndef call(n): return ramp(n)\n",
    vars(elsewhere),
)
call_elsewhere = elsewhere.call


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(5, 5)

    @staticmethod
    @memoised
    def positions(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.linspace(0, 1, shape[0] * shape[1], dtype=dtype).reshape(shape)

    @functools.lru_cache  # noqa: B019
    def method(self, length: int) -> torch.Tensor:
        return torch.arange(length) + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(getattr(self, self.kind)(x)) * (2 if self.training else 1)

    def plain(self, x):
        return x + ramp(x.shape[1], x.dtype, x.device) + ramp(5, torch.float32, torch.device("cpu"))

    def wrapped(self, x):
        return x + scaled(x.shape[1], scale=0.5)

    def static(self, x):
        return x + self.positions(x.shape, x.dtype)

    def number(self, x):
        return x * half(x.shape[0])

    def decides(self, x):
        return x * 2 if half(x.shape[0]) > 1 else x

    def two(self, x):
        ones, count = pair(x.shape[0])
        return x + ones[:, None] * count

    def in_place(self, x):
        held = scaled(x.shape[1])
        held += 1
        return x + held

    def of_self(self, x):
        return x + self.method(x.shape[1])

    def of_tensor(self, x):
        return x + row_sums(x)[:, None]

    def of_computed(self, x):
        return x + weighted_sums(x * 2, scale=0.5)

    def in_another_file(self, x):
        return x + call_elsewhere(x.shape[1])


class Weighted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + weighted_sums(x * 2, scale=0.5)


KINDS = ["plain", "wrapped", "static", "number", "decides", "two", "of_computed"]
REFUSED = {
    "of_self": "with a Net",
    "of_tensor": "with a Tensor",
    "in_another_file": "neither in its file",
    "in_place": "another result",
}
MEMOS = (
    ramp,
    scaled.memo,
    half,
    pair,
    row_sums,
    weighted_sums.memo,
    Net.__dict__["positions"].__func__.memo,
    Net.method,
    elsewhere.ramp,
)


@pytest.fixture(autouse=True)
def fresh_memos():
    for memo in MEMOS:
        memo.cache_clear()


def _compare(first: Callable[..., torch.Tensor], second: Callable[..., torch.Tensor]) -> None:
    """Compare the two over several calls, each starting from empty memos of its own."""
    inputs = [torch.randn(rows, 5) for rows in (3, 1, 3, 6, 3)]
    outputs = []
    for model in (first, second):
        for memo in MEMOS:
            memo.cache_clear()
        outputs.append([model(x) for x in inputs])
    for given, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("kind", KINDS)
def test_memos_are_asked_at_every_call(kind: str, filled: bool, misses):
    model = Net(kind).eval()
    if filled:
        model(torch.randn(3, 5))
    program = capture_program(copy.deepcopy(model), (torch.randn(3, 5),))
    assert program.opaque == {}
    for training in (False, True):
        model.train(training)
        program.model.train(training)
        _compare(program.model, model)
    if kind != "decides":
        assert misses(program) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_optimized_copied_pickled_and_restored(kind: str):
    model = Net(kind).eval()
    fast = fxopt.optimize(model, "inference", example_inputs=(torch.randn(3, 5),), measure=False)
    for each in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fxopt.restore(fast)):
        _compare(each, model)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_memo_knows_by_identity_stays_opaque(kind: str):
    model = Net(kind).eval()
    program = capture_program(copy.deepcopy(model), (torch.randn(3, 5),))
    assert REFUSED[kind] in program.opaque[""].reason
    _compare(program.model, model)


@pytest.mark.parametrize("kind", [*KINDS, *REFUSED])
def test_capturing_leaves_only_real_values_in_memos(kind: str):
    model = Net(kind)
    model(torch.randn(2, 5))  # other sizes than the example's
    capture_program(model, (torch.randn(3, 5),))
    sizes = [memo.cache_info().currsize for memo in MEMOS]
    for rows in (2, 3):
        model.forward(torch.randn(rows, 5))
    assert type(ramp(5, torch.float32, torch.device("cpu"))) is torch.Tensor
    assert type(half(3)) is int
    assert type(elsewhere.ramp(5)) is torch.Tensor
    assert all(memo.cache_info().currsize <= size + 3 for memo, size in zip(MEMOS, sizes, strict=True))


def test_what_a_wrapped_memo_is_given_tensors_for_is_part_of_the_graph(monkeypatch):
    model = Weighted().eval()
    program = capture_program(copy.deepcopy(model), (torch.randn(3, 5),))
    assert "sum" in {node.target for node in program.graphs[""].nodes}
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 7)
    _compare(program.model, model)


def test_a_memo_that_is_cleared_or_refilled_is_not_remembered():
    program = capture_program(Net("two").eval(), (torch.randn(3, 5),))
    x = torch.randn(3, 5)
    before = program.model(x)
    pair.cache_clear()
    pair(3)[0].mul_(5)  # whoever writes into what the memo holds is seen by the forward, and by the graph
    after = program.model(x)
    torch.testing.assert_close(after, program.model.linear(x + 15))
    assert not torch.equal(before, after)


def test_a_wrapper_that_does_more_than_to_ask_for_the_compiler_is_not_left_out() -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return halved_sums(x)

    program = capture_program(Sums().eval(), (torch.randn(4, 3),))
    assert "with a Tensor" in program.opaque[""].reason
    x = torch.randn(16, 3)
    assert torch.equal(program.model(x), Sums()(x))
