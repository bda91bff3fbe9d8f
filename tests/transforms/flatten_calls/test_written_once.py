"""A graph is written out a second time only where what keeps the state of random generators was left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.transforms.flatten_calls import write


class Called(nn.Linear):
    """Stays a call, which may draw random numbers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().__call__(*args, **kwargs) + 1


def test_a_graph_is_written_out_once_where_nothing_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written, made = list[bool](), write._written

    def noted(*args: Any, draws: bool) -> Any:
        written.append(draws)
        return made(*args, draws=draws)

    monkeypatch.setattr(write, "_written", noted)
    model = nn.Sequential(nn.Linear(4, 4), Called(4, 4), nn.Linear(4, 4)).eval()
    program = fxopt.capture(model, torch.randn(2, 4))
    flat = write.flattened(program, "", program.captures[""].specializations[0])
    assert [str(node.target) for node in flat.specialization.graph.find_nodes(op="call_module")] == ["1"]
    assert written == [False]
