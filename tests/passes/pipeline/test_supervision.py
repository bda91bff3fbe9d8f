"""Supervision: a pass's own code is stopped in time, and its failures carry its name."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest

from fxopt.collection import collection_paused
from fxopt.errors import BudgetError, CaptureError, MatchFailure, PassError
from fxopt.passes.pipeline import supervised


def spin() -> None:
    while True:
        pass


def spin_and_catch() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # as careless passes do
            continue


HANGS = {"sleep": lambda: time.sleep(60), "busy loop": spin, "catches everything": spin_and_catch}


@pytest.mark.parametrize("kind", HANGS)
def test_what_hangs_is_stopped_and_named(kind: str) -> None:
    with pytest.raises(PassError, match=r"^pass 'slow' \(find\) took longer than 0\.05 s and was stopped$"):
        supervised(HANGS[kind], what="pass 'slow' (find)", seconds=0.05)


def test_results_and_arguments_pass_through() -> None:
    assert supervised(lambda: 3, what="pass", seconds=5) == 3


def test_zero_is_no_limit() -> None:
    started = signal.getitimer(signal.ITIMER_REAL)[0]
    supervised(lambda: time.sleep(0.02), what="pass", seconds=0)
    assert signal.getitimer(signal.ITIMER_REAL)[0] <= started


def test_the_outer_alarm_and_handler_come_back() -> None:
    def ring(signum: int, frame: object) -> None:
        pytest.fail("the outer alarm went off")

    before = signal.signal(signal.SIGALRM, ring)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, 50)
    try:
        for seconds in (5.0, 0.02):
            with pytest.raises(PassError):
                supervised(lambda: time.sleep(0.1) or 1 / 0, what="pass", seconds=seconds)
            assert signal.getsignal(signal.SIGALRM) is ring
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
    finally:
        signal.setitimer(signal.ITIMER_REAL, outer)
        signal.signal(signal.SIGALRM, before)


def test_one_inside_another() -> None:
    def inner() -> str:
        with pytest.raises(PassError, match="inner"):
            supervised(spin, what="inner", seconds=0.03)
        spin()
        return "never"

    with pytest.raises(PassError, match="outer"):
        supervised(inner, what="outer", seconds=0.2)


def test_failures_are_named_and_chained() -> None:
    with pytest.raises(PassError, match="pass 'odd' raised ZeroDivisionError: division by zero") as caught:
        supervised(lambda: 1 / 0, what="pass 'odd'", seconds=5)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.exit_code == 4


def test_fxopt_s_own_errors_are_named_too() -> None:
    def fail() -> None:
        raise CaptureError("no such node")

    with pytest.raises(PassError, match=r"^pass 'odd': no such node$"):
        supervised(fail, what="pass 'odd'", seconds=5)


@pytest.mark.parametrize("error", [MatchFailure("too small"), PassError("named already"), KeyboardInterrupt()])
def test_what_is_no_failure_goes_on_as_it_is(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        supervised(fail, what="pass", seconds=5)
    assert caught.value is error


def test_in_other_threads_it_runs_without_a_limit() -> None:
    results: list[object] = []

    def work() -> None:
        results.append(supervised(lambda: time.sleep(0.05) or "done", what="pass", seconds=0.01))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == ["done"]


def test_collection_is_as_before() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(PassError):
        supervised(lambda: 1 / 0, what="pass", seconds=5)
    assert gc.isenabled()


def test_a_budget_that_cannot_be_met_is_no_failure_of_the_pass() -> None:
    def fail() -> None:
        raise BudgetError("the least is 3 KiB")

    with pytest.raises(BudgetError, match=r"^the least is 3 KiB$") as caught:
        supervised(fail, what="pass 'odd'", seconds=5)
    assert caught.value.exit_code == 2
