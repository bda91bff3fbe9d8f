"""How ranks agree on one plan: a protocol over a store, run here by threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn

from fxopt.errors import BudgetError, PassError, UsageError
from fxopt.passes.pipeline import Asked, check_alike, optimized_on_all, ranks
from fxopt.passes.pipeline.ranks import Ranks
from fxopt.runtime.record import Decision, Plan
from fxopt.transforms.eliminate_dead_code import EliminateDeadCode

PASSES = (EliminateDeadCode(),)
PLAN = Plan(("p",), "eval", tuple(Decision(0, "p", key, "applied") for key in ("a", "b", "c")))


def at_once(size: int, act: Callable[[Ranks], Any]) -> list[Any]:
    """Let as many ranks act; return what each returned or raised."""
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def safely(rank: int) -> Any:
        try:
            return act(Ranks(rank, size, distributed.PrefixStore("test", store)))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(safely, range(size)))


def marked(plan: Plan, failing: set[str]) -> Plan:
    decisions = (
        dataclasses.replace(d, status="undone", reason=f"{d.key} is wrong") if d.key in failing else d
        for d in plan.decisions
    )
    return dataclasses.replace(plan, decisions=tuple(decisions))


def run(failing: dict[int, set[str]]) -> list[Any]:
    """Let three ranks optimize, some of which find sites wrong; each model knows the plan that it was made by."""

    def act(each: Ranks) -> Plan:
        def follow(plan: Plan) -> tuple[nn.Module, Plan]:
            model = nn.Linear(1, 1)
            model.plan = plan
            return model, marked(plan, failing.get(each.rank, set()))

        return optimized_on_all(each, lambda: follow(PLAN), follow).plan

    return at_once(3, act)


def test_all_follow_the_first() -> None:
    assert run({}) == [PLAN] * 3


def test_what_fails_anywhere_is_undone_everywhere() -> None:
    results = run({1: {"a"}, 2: {"a", "c"}})
    assert results == [results[0]] * 3
    assert [(d.key, d.status, d.reason) for d in results[0].decisions] == [
        ("a", "undone", "on rank 1: a is wrong"), ("b", "applied", ""), ("c", "undone", "on rank 2: c is wrong"),
    ]  # fmt: skip


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(
    ("error", "elsewhere"), [(ValueError, PassError), (KeyboardInterrupt, PassError), (BudgetError, BudgetError)]
)
def test_whatever_is_raised_reaches_all(
    failing: int, error: type[BaseException], elsewhere: type[BaseException]
) -> None:
    """What is about the user's request is of the same class everywhere."""

    def act(each: Ranks) -> Any:
        def made(plan: Plan = PLAN) -> tuple[nn.Module, Plan]:
            if each.rank == failing:
                raise error("enough")
            return nn.Linear(1, 1), plan

        return optimized_on_all(each, made, made)

    results = at_once(3, act)
    for rank, result in enumerate(results):
        if rank == failing:
            assert type(result) is error
        else:
            assert type(result) is elsewhere
            assert str(result) == f"rank {failing} failed, so nothing is optimized on any: {error.__name__}: enough"


def test_a_rank_that_does_not_take_part_is_named() -> None:
    store = distributed.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(UsageError, match=r"rank 1 did not answer .*never called fxopt.optimize"):
        Ranks(0, 2, store).exchange("here", list)


def test_the_silent_rank_is_named_not_the_first_that_waits_for_it() -> None:
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=1))

    def act(rank: int) -> str:
        with pytest.raises(UsageError) as raised:
            Ranks(rank, 3, store).exchange("here", list)
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        first, last = pool.map(act, (0, 2))
    assert first.startswith("rank 1 did not answer") and last.startswith("rank 1 did not answer")


def test_models_and_passes_are_compared() -> None:
    def act(each: Ranks) -> Any:
        model = nn.Linear(1, 1 + each.rank).to(torch.float32)
        return check_alike(each, model, PASSES, Asked((), ()))

    for result in at_once(2, act):
        assert type(result) is UsageError
        assert "the modules of rank 1's model have other classes or tensors" in str(result)


def test_a_process_by_itself_has_no_ranks() -> None:
    assert ranks() is None
