"""attention: what is written out is computed by torch's operator, in every spelling, or stays for a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.operators import canonical_name
from fxopt.testing import assert_equivalent

LENGTH = 5


class Attends(nn.Module):
    """Queries, keys and values of an input, and some function of them."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function, self.qkv, self.scale, self.drop = function, nn.Linear(8, 24), 0.5, nn.Dropout(0.5)
        self.register_buffer("seen", torch.tril(torch.ones(1, 1, 16, 16)))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.function(self, q, k, v)


def above(q: Tensor, dtype: torch.dtype = torch.bool) -> Tensor:
    size = q.size(-2)
    return torch.triu(torch.ones(size, size, dtype=dtype), diagonal=1)


def lowered(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.softmax(scores.masked_fill(m.seen[:, :, : q.size(2), : q.size(2)] == 0, -10.0), -1) @ v


def by_einsum(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.size(-1) ** 0.5
    weights = scores.masked_fill(above(q), torch.finfo(scores.dtype).min).softmax(dim=-1)
    return torch.einsum("bhij, bhjd -> bhid", weights, v)


def in_batches(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(torch.full((5, 5), -torch.inf).triu(1), q, k.transpose(1, 2), alpha=m.scale)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)


def by_buffer(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    hidden = m.seen[:, :, : q.size(2), : q.size(2)] == 0
    return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v


def by_where(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shown = m.seen[:, :, : q.size(2), : q.size(2)].bool()
    return torch.where(shown, torch.matmul(q * m.scale, k.mT), -torch.inf).softmax(3).matmul(v)


FOUND: dict[str, tuple[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]]] = {
    "plain": ("", lambda m, q, k, v: torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v),
    "divided": ("", lambda m, q, k, v: (q.matmul(k.transpose(2, 3)) / math.sqrt(4)).softmax(-1) @ v),
    "module": ("", lambda m, q, k, v: nn.Softmax(dim=-1)(q @ k.mT * m.scale) @ v),
    "added": ("", lambda m, q, k, v: torch.softmax(m.seen[..., 0, :5].log() + m.scale * (q @ k.mT), -1) @ v),
    "no dropout": ("", lambda m, q, k, v: F.dropout(torch.softmax(q @ k.mT, -1), 0.0, m.training) @ v),
    "batches": ("", in_batches),
    "buffer": ("", by_buffer),
    "where": ("", by_where),
    "einsum": ("causal", by_einsum),
    "added, causal": (
        "causal",
        lambda m, q, k, v: (
            torch.softmax(q @ k.mT + torch.triu(torch.full((q.size(2), q.size(2)), -torch.inf), 1), -1) @ v
        ),
    ),
    "lower": (
        "causal",
        lambda m, q, k, v: (
            (q @ k.mT).masked_fill(torch.ones(q.size(2), q.size(2)).tril() == 0, -torch.inf).softmax(-1) @ v
        ),
    ),
    "flags of numbers": (
        "causal",
        lambda m, q, k, v: (q @ k.mT).masked_fill(above(q, torch.float32).bool(), -1e9).softmax(-1) @ v,
    ),
}


def optimized(model: nn.Module, x: Any) -> tuple[nn.Module, list[Any]]:
    fast = fxopt.optimize(model, "attention", example_inputs=x, measure=False)
    return fast, list(fxopt.plan(fast).decisions)


def calls(fast: nn.Module, name: str = "") -> list[Any]:
    found = [n for n in fxopt.graphs(fast)[name].nodes if canonical_name(n) == "scaled_dot_product_attention"]
    return [found[0].kwargs["attn_mask"] is not None, found[0].kwargs["is_causal"] is not False] if found else []


@pytest.mark.parametrize("name", FOUND)
def test_a_spelling_is_found_and_equal(name: str):
    kind, function = FOUND[name]
    model, x = Attends(function), torch.randn(3, LENGTH, 8)
    fast, (decision,) = optimized(model, (x,))
    assert decision.status == "applied", decision.reason
    assert calls(fast)[1] is (kind == "causal")
    assert not (kind and calls(fast)[0])
    assert_equivalent(model, fast, (x,))  # in training: gradients, too


def test_the_graph_before_and_after():
    model, x = Attends(FOUND["plain"][1]).eval(), torch.randn(3, LENGTH, 8)
    fast, _ = optimized(model, (x,))
    functions = [str(node.target) for node in fxopt.graphs(fast)[""].nodes if "softmax" in str(node.target)]
    assert functions == []
    assert len(calls(fast)) == 2


@pytest.mark.parametrize("length", [1, 3, 9])
def test_other_lengths_run(length: int):
    for _, function in (FOUND["einsum"], FOUND["lower"], FOUND["buffer"]):
        model = Attends(function).eval()
        fast, _ = optimized(model, (torch.randn(3, LENGTH, 8),))
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(fast(x), model(x))


STAYS: dict[str, tuple[str, Callable[[Any, Tensor, Tensor, Tensor], Any]]] = {
    "returned": ("read by the caller", lambda m, q, k, v: ((w := torch.softmax(q @ k.mT, -1)) @ v, w)),
    "used": ("is read elsewhere too", lambda m, q, k, v: ((w := torch.softmax(q @ k.mT, -1)) @ v) * w.sum()),
    "another dimension": ("another dimension", lambda m, q, k, v: torch.softmax(q @ k.mT, -2) @ v),
    "broadcast": ("not of one batch", lambda m, q, k, v: torch.softmax(q @ k[:, :1].mT, -1) @ v),
    "lowered": ("-10", lowered),
    "flags added": (
        "no floating-point",
        lambda m, q, k, v: torch.softmax(q @ k.mT + (m.seen[..., :5, :5] > 0), -1) @ v,
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_cannot_be_replaced_stays_for_a_reason(name: str):
    reason, function = STAYS[name]
    model, x = Attends(function).eval(), torch.randn(3, LENGTH, 8)
    fast, (decision,) = optimized(model, (x,))
    assert decision.status == "refused"
    assert reason in decision.reason
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)


DROPS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "module": lambda m, q, k, v: m.drop(torch.softmax(q @ k.mT, -1)) @ v,
    "function": lambda m, q, k, v: F.dropout(torch.softmax(q @ k.mT, -1), 0.5, m.training) @ v,
}


@pytest.mark.parametrize("name", DROPS)
def test_dropout_of_the_weights_is_left_out_in_evaluation_only(name: str):
    model = Attends(DROPS[name])
    x = torch.randn(3, LENGTH, 8)
    _, (refused,) = optimized(model, (x,))
    assert "evaluation" in refused.reason
    fast, (applied,) = optimized(model.eval(), (x,))
    assert applied.status == "applied"
    torch.testing.assert_close(fast(x), model(x))
    torch.manual_seed(0)
    dropped = fast.train()(x)
    torch.manual_seed(0)
    torch.testing.assert_close(dropped, model.train()(x))


def test_dropout_in_evaluation_stays():
    model, x = Attends(lambda m, q, k, v: F.dropout(torch.softmax(q @ k.mT, -1), 0.5) @ v), torch.randn(3, LENGTH, 8)
    fast, decisions = optimized(model.eval(), (x,))
    assert all(each.status != "applied" for each in decisions)
    assert calls(fast) == []


def test_twice_is_once_and_the_original_is_untouched():
    model, x = Attends(by_buffer).eval(), torch.randn(3, LENGTH, 8)
    expected, state = model(x), list(model.state_dict())
    fast, _ = optimized(model, (x,))
    again, _ = optimized(fast, (x,))
    assert str(fxopt.graphs(again)[""]) == str(fxopt.graphs(fast)[""])
    assert list(again.state_dict()) == state
    assert torch.equal(model(x), expected)
    assert torch.equal(fxopt.restore(fast)(x), expected)


def test_gradients_of_rows_without_anything_to_attend_to_are_not_what_they_were_and_verification_tells():
    def function(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(m.seen[:, :, :5, :5] >= 0, -1e30).softmax(-1) @ v

    model, x = Attends(function).eval(), torch.randn(3, LENGTH, 8)
    fast, (decision,) = optimized(model, (x,))
    assert decision.status == "undone"
    assert "gradient" in decision.reason
    assert torch.equal(fast(x), model(x))


class Layer(nn.Module):
    """Attention that returns its weights, and a caller that reads them or does not."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.inner, self.reads = Attends(STAYS["returned"][1]), reads

    def forward(self, x: Tensor) -> Tensor:
        result, weights = self.inner(x)
        return result + weights.sum() if self.reads else result


def test_weights_that_no_caller_reads_are_not_computed_until_a_hook_asks():
    model, x = Layer(reads=False).eval(), torch.randn(3, LENGTH, 8)
    fast, (decision,) = optimized(model, (x,))
    assert decision.status == "applied"
    assert len(calls(fast, "inner")) == 2
    torch.testing.assert_close(fast(x), model(x))
    seen: list[Any] = []
    fast.inner.register_forward_hook(lambda module, given, returned: seen.append(returned[1]))
    with pytest.warns(fxopt.GuardWarning, match="leaves its weights out"):
        fast(x)
    torch.testing.assert_close(seen[0], model.inner(x)[1])


def test_weights_that_a_caller_or_a_hook_reads_stay():
    x = torch.randn(3, LENGTH, 8)
    hooked = Layer(reads=False).eval()
    hooked.inner.register_forward_hook(lambda module, given, returned: None)
    for model in (Layer(reads=True).eval(), hooked):
        fast, (decision,) = optimized(model, (x,))
        assert "may be read by the caller" in decision.reason
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)


class Asked(nn.Module):
    """A layer that returns weights if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attends(STAYS["returned"][1])

    def forward(self, x: Tensor, weights: bool = False) -> Any:
        result, seen = self.inner(x)
        return seen.mean(1) if weights else result


@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_call_reads_after_all_are_an_error():
    model, x = Asked().eval(), torch.randn(3, LENGTH, 8)
    fast, (decision,) = optimized(model, (x,))
    assert decision.status == "applied"
    with pytest.raises(fxopt.FxoptError, match="left out by the pass 'attention'"):
        fast(x, weights=True)
    torch.testing.assert_close(fxopt.restore(fast)(x, weights=True), model(x, weights=True))


class Cross(nn.Module):
    """Queries of the second argument, keys and values of the first."""

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        return torch.softmax(x @ memory.mT, -1) @ memory


@pytest.mark.parametrize("keys", [7, 24, 64])
def test_nan_in_queries_stays_where_calls_have_few_keys(keys: int):
    x = (torch.randn(2, 4, keys, 8), torch.randn(2, 4, 6, 8))
    model = Cross().eval()
    fast, (decision,) = optimized(model, x)
    assert decision.status == "applied", decision.reason
    for count in (1, 7, 15, 16, 17):
        memory, queries = torch.randn(2, 4, count, 8), torch.randn(2, 4, 6, 8)
        queries[0, 1, 2, 3] = torch.nan
        torch.testing.assert_close(fast(memory, queries), model(memory, queries), equal_nan=True)
        assert fast(memory, queries).isnan().any()


def test_nan_stays_under_a_causal_flag_where_there_are_few_keys():
    model, x = Attends(FOUND["einsum"][1]).eval(), torch.randn(3, 64, 8)
    fast, (decision,) = optimized(model, (x,))
    assert decision.status == "applied", decision.reason
    for length in (1, 9, 15, 16):
        x = torch.randn(2, length, 8)
        x[0, length // 2] = torch.nan
        torch.testing.assert_close(fast(x), model(x), equal_nan=True)


class Square(nn.Module):
    """A causal mask of as many rows and columns as there are queries."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        later = torch.ones(q.size(-2), q.size(-2)).triu(1).bool()
        return (q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ k


@pytest.mark.parametrize("keys", [7, 40])
def test_a_square_mask_that_does_not_fit_is_refused(keys: int):
    model, k = Square().eval(), torch.randn(2, 3, keys, 8)
    fast, (decision,) = optimized(model, (torch.randn(2, 3, keys, 8), k))
    assert decision.status == "applied", decision.reason
    one = torch.randn(2, 3, 1, 8)  # hides nothing: what a step of decoding has
    torch.testing.assert_close(fast(one, k), model(one, k))
    for each in (model, fast):
        with pytest.raises((RuntimeError, ValueError), match=r"match|fit"):
            each(torch.randn(2, 3, 3, 8), k)


def test_a_plan_is_replayed():
    model, x = Layer(reads=False).eval(), torch.randn(3, LENGTH, 8)
    fast, _ = optimized(model, (x,))
    again = fxopt.optimize(model, "attention", example_inputs=(x,), plan=fxopt.plan(fast))
    assert str(fxopt.graphs(again)["inner"]) == str(fxopt.graphs(fast)["inner"])


class Block(nn.Module):
    """Attention inside a module inside a block: its caller leaves the weights unread."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.linear = Layer(reads=False), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.layer(x)).mean(1)


def test_sites_over_several_modules_of_equal_blocks_are_found():
    model, x = nn.Sequential(*(Block() for _ in range(3))).eval(), torch.randn(3, LENGTH, 8)
    fast, decisions = optimized(model, (x,))
    assert [decision.status for decision in decisions] == ["applied"] * 3
    torch.testing.assert_close(fast(x), model(x))
