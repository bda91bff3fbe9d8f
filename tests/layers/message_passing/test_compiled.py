"""Convolutions over compressed rows, compiled: what is counted between calls compiles nothing anew."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

pytest.importorskip("torch_geometric")

from torch_geometric import nn as pyg

from fxopt.layers.message_passing import compressed, module


@pytest.mark.parametrize("calls_unobserved", [0, 24])
def test_a_layer_that_is_not_observed_is_compiled_once(calls_unobserved: int) -> None:
    layer = pyg.SAGEConv(6, 4).eval()
    fast = compressed(layer, torch.nn.Sequential(layer), trains=False)
    vars(fast)[module._UNOBSERVED] = calls_unobserved
    x, edge_index = torch.randn(10, 6), torch.randint(10, (2, 30))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(fast, backend=counter)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
    assert counter.frame_count == 1
    assert vars(fast)[module._UNOBSERVED] == calls_unobserved
