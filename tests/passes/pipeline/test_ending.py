"""What the ranks say when a training ends: which of them is the cause."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch import distributed

import fxopt
from fxopt.compat.distributed import is_of_a_collective
from fxopt.passes.pipeline import Ranks
from fxopt.passes.pipeline.ending import Said, _cause, _say

SOON = timedelta(milliseconds=50)
FINISHED: Said = ("finished", "")
STOPPED: Said = ("stopped", "RuntimeError: gloo: connection closed")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ([FINISHED, FINISHED, FINISHED], ""),
        ([STOPPED, ("failed", "ValueError: enough"), STOPPED], "rank 1 failed: ValueError: enough"),
        ([None, ("failed", "ValueError: enough"), STOPPED], "rank 1 failed: ValueError: enough"),
        ([STOPPED, None, STOPPED], "rank 1 did not answer: killed, or it hangs; see the last lines of its output"),
        ([None, FINISHED, None], "ranks 0, 2 did not answer: killed, or it hangs; see the last lines of its output"),
        ([STOPPED, FINISHED, STOPPED], "rank 1 had ended while ranks 0, 2 went on; give all ranks equally many steps"),
        ([STOPPED, STOPPED, STOPPED], ""),
    ],
)
def test_who_is_the_cause(said: list[Said | None], cause: str) -> None:
    store = distributed.HashStore()
    for rank, word in enumerate(said):
        if word is not None:
            _say(Ranks(rank, 3, store), word)
    assert _cause(Ranks(0, 3, store), SOON) == cause


def test_a_store_that_is_gone_is_a_cause() -> None:
    host = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=5))
    guest = distributed.TCPStore("127.0.0.1", host.port, None, False, timeout=timedelta(seconds=5))
    del host
    assert "the store of the process group, which rank 0 or torchrun holds, is gone" in _cause(Ranks(1, 2, guest), SOON)


@pytest.mark.parametrize(
    ("error", "of_a_collective"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_which_errors_are_of_a_collective(error: Exception, of_a_collective: bool) -> None:
    assert is_of_a_collective(error) == of_a_collective


def test_one_process_by_itself_is_left_alone() -> None:
    with pytest.raises(ValueError, match="enough"), fxopt.ending_together():
        raise ValueError("enough")
