"""In which threads nodes are timed, where other programs have the cores: by a made clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fxopt.reporting.picture import profile_of, profiles_of
from fxopt.tracing.examples import Inputs

NOW = [0.0]
CALL = Inputs(torch.ones(2))


class Told(nn.Module):
    """Take so many seconds in several threads, and so many in one."""

    def __init__(self, in_several: float, in_one: float) -> None:
        super().__init__()
        self.in_several, self.in_one = in_several, in_one

    def forward(self, x: Tensor) -> Tensor:
        NOW[0] += self.in_several if torch.get_num_threads() > 1 else self.in_one
        return x + 1


@pytest.fixture(autouse=True)
def _two_threads_and_a_made_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for clock in ("perf_counter", "thread_time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: NOW[0])
    yield
    torch.set_num_threads(threads)


def test_where_threads_wait_for_their_turn_a_call_is_timed_in_one():
    assert profile_of(Told(0.296, 0.002), CALL).modules[""].seconds == pytest.approx(0.002)
    assert torch.get_num_threads() == 2


def test_where_threads_gain_a_call_is_timed_in_them():
    assert profile_of(Told(0.010, 0.018), CALL).modules[""].seconds == pytest.approx(0.010)


def test_models_that_are_compared_are_timed_in_the_same_threads():
    found = profiles_of(Told(0.296, 0.002), Told(0.003, 0.004), CALL)
    assert [each.modules[""].seconds for each in found] == pytest.approx([0.002, 0.004])
