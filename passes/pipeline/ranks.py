"""Optimizing under `torch.distributed`: rank 0 decides, the others follow, and what fails on one rank fails on all.

The ranks talk through the group's store, with its timeout: collectives could hang, or mix with those of the user.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from torch import distributed, nn

from ...compat.distributed import shared_store
from ...errors import BudgetError, FxoptError, InputError, PassError, StateError, UsageError, one_line
from ...runtime.record import Decision, Plan

__all__ = ["Ranks", "heard_by_others", "heard_of_any", "named", "on_all_ranks", "optimized_on_all", "ranks"]

T = TypeVar("T")
_OF_THE_USER = {
    each.__name__: kind
    for kind in (UsageError, BudgetError, InputError, StateError)
    for each in (kind, *kind.__subclasses__())
}
Failures = dict[str, str]
"""Number of the pass and key of a site, as one text -> why it cannot be rewritten on all ranks."""


class Store(Protocol):
    """What is asked of a store of `torch.distributed`; `get` waits for a value until the store's timeout."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta = ..., /) -> None: ...


@dataclass
class Ranks:
    """This process among those that optimize the same model together, and the store that they share."""

    rank: int
    size: int
    store: Store
    said: int = 0

    def exchange(self, mine: Any, judge: Callable[[Sequence[Any]], Any]) -> Any:
        """Return on all ranks what rank 0 makes of what all say, in JSON; UsageError where one is silent."""
        self.said += 1
        try:
            self.store.set(f"{self.said}/{self.rank}", json.dumps(mine))
            if self.rank == 0:
                everyone = [json.loads(self.store.get(f"{self.said}/{rank}")) for rank in range(self.size)]
                self.store.set(f"{self.said}/all", json.dumps(judge(everyone)))
            return json.loads(self.store.get(f"{self.said}/all"))
        except RuntimeError as error:
            what = one_line(error).partition(", keys")[0]
            raise UsageError(
                f"{named(self._silent())} did not answer ({what}): killed, hangs, or never called "
                "fxopt.optimize; where a process group is initialized, every rank calls it, with the same model and "
                "passes; one rank alone can repeat a plan"
            ) from error

    def give_up(self, message: str) -> None:
        """Say at once, in the place of the next exchange, that this rank has failed; whoever listens need not wait."""
        self.said += 1
        with suppress(RuntimeError):  # of a store that is gone nobody hears
            self.store.set(f"{self.said}/{self.rank}", json.dumps(message))
            if self.rank == 0:
                self.store.set(f"{self.said}/all", json.dumps([0, message]))

    def _silent(self) -> list[int]:
        """Return the ranks that others wait for; rank 0 where all have spoken, or where its store is gone."""
        with suppress(RuntimeError):
            return [r for r in range(self.size) if not self.store.check([f"{self.said}/{r}"])] or [0]
        return [0]


def ranks() -> Ranks | None:
    """Return this process among the ranks of the default process group, or None where it is by itself."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size == 1 or distributed.get_backend() == "fake":
        return None
    store = shared_store("fxopt")
    return Ranks(rank, size, shared_store(f"fxopt/{store.add(f'calls/{rank}', 1)}"))


def on_all_ranks(ranks: Ranks | None, run: Callable[[], T]) -> T:
    """Return what `run` does here, once it has been done on every rank; None: here alone.

    Raises FxoptError if it raised on another rank, a UsageError there is one here; what it raises here, as it is.
    """
    if ranks is None:
        return run()
    attempt = _attempted(run)
    failed = ranks.exchange(attempt.message, _first_failure)
    if attempt.error is not None:
        raise attempt.error
    if failed is not None:
        raise _failed(*failed)
    return cast("T", attempt.result)


@contextmanager
def heard_by_others(*, listening: bool = True) -> Generator[None]:
    """Let the ranks that call `optimize` know at once if this one raises before it comes to speak with them."""
    try:
        yield
    except BaseException as error:
        others = ranks() if listening else None
        if others is not None:
            others.give_up(f"{type(error).__name__}: {one_line(error)}")
        raise


def heard_of_any(ranks: Ranks | None, mine: str) -> str:
    """Return on every rank what the first of them has to say that says anything, or ""."""
    if ranks is None:
        return mine
    said = ranks.exchange(mine, _first_failure)
    return "" if said is None else mine or f"on rank {said[0]}: {said[1]}"


def _first_failure(everyone: Sequence[str]) -> tuple[int, str] | None:
    return next(((rank, message) for rank, message in enumerate(everyone) if message), None)


def named(ranks: Sequence[int]) -> str:
    """Return some ranks in words: `rank 1`, `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


Result = tuple[nn.Module, Plan]
"""An optimized model, and the decisions behind it."""


@dataclass(frozen=True)
class _Attempt(Generic[T]):
    """What came of a run on this rank: a result, or an error."""

    result: T | None = None
    error: BaseException | None = None

    @property
    def message(self) -> str:
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


def _attempted(run: Callable[[], T]) -> _Attempt[T]:
    try:
        return _Attempt(run())
    except BaseException as error:  # the other ranks wait to hear of it, whatever it is
        return _Attempt(error=error)


def optimized_on_all(
    ranks: Ranks,
    decide: Callable[[], Result],
    follow: Callable[[Plan], Result],
) -> nn.Module:
    """Return the model, rewritten on every rank as rank 0 may `decide`; the others `follow` its plan and verify it.

    Raises UsageError where another rank is silent, PassError where it failed.
    """
    attempt = _attempted(decide) if ranks.rank == 0 else _Attempt[Result]()
    plan = _told(ranks, attempt)
    if ranks.rank != 0:
        attempt = _attempted(partial(follow, plan))
    while True:
        result, failures = _judged(ranks, attempt, plan)
        if not failures:
            return result
        plan = _without(plan, failures)
        attempt = _attempted(partial(follow, plan))


def _told(ranks: Ranks, attempt: _Attempt[Result]) -> Plan:
    """Return rank 0's plan; PassError if it has none, on rank 0 what went wrong there."""
    mine = None if attempt.result is None else attempt.result[1].to_json()
    plan, message = ranks.exchange((mine, attempt.message), lambda everyone: everyone[0])
    if message:
        raise attempt.error or _failed(0, message)
    return Plan.from_json(plan, "the plan of rank 0")


def _judged(ranks: Ranks, attempt: _Attempt[Result], plan: Plan) -> tuple[nn.Module, Failures]:
    """Return this rank's model, and what failed on any rank; PassError if a run failed altogether."""
    mine = {} if attempt.result is None else _differences(plan, attempt.result[1])
    raised, failed = ranks.exchange((attempt.message, mine), _first_of_each)
    if attempt.result is None or raised is not None:
        raise attempt.error or _failed(*raised)
    return attempt.result[0], failed


def _differences(plan: Plan, mine: Plan) -> Failures:
    """Return what is applied in a plan, but not in what became of it here."""
    landed = {(d.step, d.key): d for d in mine.decisions}
    failures: Failures = {}
    for wanted in plan.decisions:
        found = landed.get((wanted.step, wanted.key))
        if wanted.status == "applied" and (found is None or found.status != "applied"):
            failures[_site(wanted)] = found.reason if found else "the site is not there"
    return failures


def _first_of_each(everyone: Sequence[Any]) -> tuple[Any, Failures]:
    """Return the first rank that raised, with its message, and every failure as the first rank tells it."""
    raised = next(([rank, message] for rank, (message, _) in enumerate(everyone) if message), None)
    failed: Failures = {}
    for rank, (_, failures) in enumerate(everyone):
        for key, reason in failures.items():
            failed.setdefault(key, f"on rank {rank}: {reason}")
    return raised, failed


def _failed(rank: int, message: str) -> FxoptError:
    """Return another rank's error as one of this rank: of the same class where it is about what the user gave."""
    kind = _OF_THE_USER.get(message.partition(":")[0], PassError)
    return kind(f"rank {rank} failed, so nothing is optimized on any: {message}")


def _site(decision: Decision) -> str:
    return f"{decision.step} {decision.key}"


def _without(plan: Plan, failures: Mapping[str, str]) -> Plan:
    """Return the plan in which what failed somewhere is undone."""
    decisions = (
        dataclasses.replace(d, status="undone", reason=failures[_site(d)])
        if d.status == "applied" and _site(d) in failures
        else d
        for d in plan.decisions
    )
    return dataclasses.replace(plan, decisions=tuple(decisions))
