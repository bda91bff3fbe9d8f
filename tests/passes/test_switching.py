"""When two lowerings share a graph: what measurement must say, and where the limit lies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxopt.passes.measure import Timings
from fxopt.passes.switching import Switch, best_switch, calls_by_rows, pays, rows_of
from fxopt.tracing.program import capture_program

NAMES = ("wide", "bmm", "vmap")


def timed(**seconds: float) -> Timings:
    """Return timings without noise."""
    return Timings([dict(seconds) for _ in range(20)])


@given(st.sampled_from(("wide", "bmm")), st.integers(0, 10**9), st.sampled_from(("wide_input_first", "grouped_conv")))
def test_a_switch_is_its_text(small: str, limit: int, large: str) -> None:
    assert Switch.parse(str(Switch(small, limit, large))) == Switch(small, limit, large)


@pytest.mark.parametrize("text", ["wide", "wide up to", "wide up to x rows, then bmm", "a up to 3 rows, then b, too"])
def test_other_texts_are_no_switch(text: str) -> None:
    assert Switch.parse(text) is None


def test_the_limit_is_the_geometric_mean_of_the_sizes_on_both_sides() -> None:
    timings = {1: timed(wide=1, bmm=2, vmap=9), 4: timed(wide=1, bmm=2, vmap=9), 256: timed(wide=3, bmm=2, vmap=9)}
    assert best_switch(timings, NAMES, ("wide", "bmm")) == Switch("wide", 32, "bmm")


@pytest.mark.parametrize("wide", [1.0, 2.0, 2.03])
def test_nothing_is_switched_where_one_is_good_at_all_sizes(wide: float) -> None:
    timings = {1: timed(wide=1, bmm=2, vmap=9), 256: timed(wide=wide, bmm=2, vmap=9)}
    assert best_switch(timings, NAMES, ("wide", "bmm")) is None


def test_nothing_is_switched_that_cannot_stand_in_one_graph() -> None:
    timings = {1: timed(wide=1, bmm=2, vmap=9), 256: timed(wide=3, bmm=4, vmap=1)}
    assert best_switch(timings, NAMES, ("wide", "bmm")) is None


def test_nothing_is_switched_back() -> None:
    timings = {1: timed(wide=1, bmm=2), 16: timed(wide=2, bmm=1), 256: timed(wide=1, bmm=2)}
    assert best_switch(timings, ("wide", "bmm"), ("wide", "bmm")) is None


def test_a_switch_must_pay_somewhere_and_cost_nowhere() -> None:
    better, equal, worse = timed(one=2, two=1), timed(one=1, two=1.01), timed(one=1, two=1.1)
    assert pays({1: better, 256: equal}, "one", "two")
    assert not pays({1: equal, 256: equal}, "one", "two")
    assert not pays({1: better, 256: worse}, "one", "two")


@pytest.mark.parametrize(("shape", "rows"), [((4,), 1), ((3, 4), 3), ((2, 3, 4), 6), ((0, 4), 0)])
def test_rows(shape: tuple[int, ...], rows: int) -> None:
    assert rows_of(torch.zeros(shape)) == rows


def test_calls_are_spread_over_the_sizes() -> None:
    home = capture_program(nn.Sequential(nn.Linear(4, 2)), (torch.zeros(2, 4),)).model
    calls = [SimpleNamespace(args=(torch.zeros(rows, 4),), kwargs={}) for rows in (7, 1, 2, 3, 4, 5, 6, 7)]
    placeholder = next(iter(home._fxopt_capture.variants[0].graph.nodes)).name
    found = calls_by_rows(home, calls, placeholder)
    assert {size: len(group) for size, group in found.items()} == {1: 1, 3: 1, 5: 1, 7: 2}
    assert calls_by_rows(home, calls, "other") == {}
    assert calls_by_rows(home, [], placeholder) == {}
