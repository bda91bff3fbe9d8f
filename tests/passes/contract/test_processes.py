"""Passes for several processes say which command to run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from fxopt.errors import UsageError
from fxopt.passes.contract import device_type, require_process_group, require_same_weights


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
        model = nn.Linear(2, 2)
        for number, dtype in enumerate((torch.float64, torch.bfloat16, torch.bool, torch.complex128, torch.int64)):
            model.register_buffer(f"extra{number}", torch.ones(3, 2, dtype=dtype).T)
        model.register_buffer("empty", torch.empty(0))
        require_same_weights(model, "fsdp")
        assert device_type(model, "fsdp") == "cpu"
    finally:
        distributed.destroy_process_group()


def test_other_weights_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: list[object], mine: dict[str, str]) -> None:
        heard.append(mine)
        everyone[:] = [heard[0], mine]

    heard: list[dict[str, str]] = []
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    model = nn.Linear(3, 2)
    require_same_weights(model, "fsdp")
    require_same_weights(model, "fsdp")
    with torch.no_grad():
        model.weight[0, :2] = model.weight[0, :2].flip(0)
    with pytest.raises(UsageError, match="'weight' of rank 1 is not that of rank 0; seed all processes alike"):
        require_same_weights(model, "fsdp")
