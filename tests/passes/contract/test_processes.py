"""Passes for several processes say which command to run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import distributed

from fxopt.errors import UsageError
from fxopt.passes.contract import require_process_group


def test_outside_torchrun_the_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/fit.py"])
    with pytest.raises(UsageError, match=r"run `torchrun --nproc-per-node=4 fit\.py`, and call") as raised:
        require_process_group("fsdp", 4)
    assert "pass 'fsdp'" in str(raised.value)


def test_under_torchrun_the_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UsageError, match=r"there is no process group; call torch\.distributed\.init_process_group\(\)"):
        require_process_group("ddp")


def test_with_a_process_group_nothing_is_said(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        require_process_group("fsdp")
    finally:
        distributed.destroy_process_group()
