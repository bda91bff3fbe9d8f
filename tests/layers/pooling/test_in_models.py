"""Pooling over triples in models: captured, optimized, compiled, saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.layers import RO3Pooling


@pytest.fixture(scope="module")
def model() -> Any:
    return pytest.importorskip("torch_geometric").nn


class Network(nn.Module):
    """A GIN of two layers, pooled over triples."""

    def __init__(self, layers: Any, structure: Any) -> None:
        super().__init__()
        widths = ((3, 8), (8, 8))
        self.convs = nn.ModuleList(
            layers.GINConv(nn.Sequential(nn.Linear(*width), nn.BatchNorm1d(8), nn.ReLU())) for width in widths
        )
        self.pool = RO3Pooling(8, structure)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.head(self.pool(x, edge_index, batch=batch))


def calls(seed: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    pairs = torch.combinations(torch.arange(len(batch))).t()
    kept = (batch[pairs[0]] == batch[pairs[1]]) & (torch.rand(pairs.shape[1], generator=generator) < 0.4)
    edges = torch.cat([pairs[:, kept], pairs[:, kept].flip(0)], 1)
    return torch.randn(len(batch), 3, generator=generator), edges, batch


@pytest.mark.parametrize("structure", ["adjacency", "distance", "codegree"])
def test_a_network_is_captured_and_equal_on_other_graphs(model: Any, structure: str):
    network = Network(model, structure)
    program = fxopt.capture(network, calls(0, (6, 5)))
    assert "" in program.graphs
    for training in (True, False):
        network.train(training)
        program.model.train(training)
        for other in (calls(1, (7, 4, 9)), calls(2, (5,))):
            torch.testing.assert_close(program.model(*other), network(*other))


def test_an_optimized_network_is_equal_on_other_graphs_and_trains(model: Any):
    network = Network(model, "adjacency").eval()
    fast = fxopt.optimize(network, "inference", example_inputs=calls(0, (6, 5)), measure=False)
    other = calls(1, (7, 4, 9))
    torch.testing.assert_close(fast(*other), network(*other))
    network.load_state_dict(fast.state_dict())
    network.train()(*other).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_the_layer_is_compiled_whole_and_exported():
    pool, (x, edges, batch) = RO3Pooling(8, in_channels=3), calls(0, (6, 5))
    compiled = torch.compile(pool, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, edges, None, batch, 2), pool(x, edges, None, batch, 2))
    exported = torch.export.export(pool, (x, edges, None, batch, 2)).module()
    torch.testing.assert_close(exported(x, edges, None, batch, 2), pool(x, edges, None, batch, 2))


def test_exported_files_hold_the_layer_and_load_again_in_a_new_process(tmp_path: Path):
    """Loading is what finds the operators: whoever loads need not know of the layer."""
    pool, given = RO3Pooling(4, in_channels=3).eval(), calls(0, (6, 5))[:2]
    fxopt.export(pool, tmp_path / "pool.pt2", given)
    torch.save((given, pool(*given)), tmp_path / "calls.pt")
    script = """
import sys, torch, fxopt
given, expected = torch.load(sys.argv[2])
torch.testing.assert_close(fxopt.load(sys.argv[1])(*given), expected)
assert "fxopt.layers.pooling" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(tmp_path / "pool.pt2"), str(tmp_path / "calls.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_state_and_dtype_travel():
    pool = RO3Pooling(4, "distance", dtype=torch.float64)
    other = RO3Pooling(4, "distance").double()
    other.load_state_dict(pool.state_dict())
    x, edges, batch = calls(3, (6, 6))
    x = torch.cat([x, x[:, :1]], 1).double()
    assert torch.equal(other(x, edges, batch=batch), pool(x, edges, batch=batch))


def test_an_optimized_network_in_training_keeps_the_statistics(model: Any):
    network = Network(model, "adjacency").train()
    fast = fxopt.optimize(network, "training", example_inputs=calls(0, (6, 5)), measure=False)
    assert network.pool.norm.batches == 0 == fast.pool.norm.batches
    for seed in range(3):
        other = calls(seed, (7, 4, 9))
        torch.testing.assert_close(fast(*other), network(*other))
    torch.testing.assert_close(fast.pool.norm.mean, network.pool.norm.mean)
    assert network.pool.norm.batches == 3 == fast.pool.norm.batches
