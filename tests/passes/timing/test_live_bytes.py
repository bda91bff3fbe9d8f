"""What a model takes in memory, counted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxopt.passes.timing import LiveBytes, memory_use
from fxopt.tracing.examples import normalize_inputs


def test_memory_counts_until_it_is_freed() -> None:
    with LiveBytes() as live:
        a = torch.zeros(256)
        view = a.view(16, 16)
        assert live.now == 1024
        b = a + 1
        assert live.now == 2048
        del a, b
        assert live.now == 1024, "the view holds it"
        del view
    assert (live.now, live.peak) == (0, 2048)


def test_what_was_there_before_does_not_count() -> None:
    x = torch.zeros(256)
    with LiveBytes() as live:
        x.add_(1).view(16, 16)
        live.expect(x)
    assert live.peak == 0


def test_the_memory_of_a_step() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.count = nn.Parameter(torch.ones(256)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return torch.exp(torch.exp(self.weight * x)).sum()

    model = Keeps()
    use = memory_use(model, normalize_inputs((torch.ones(256),)))
    assert use.live == 2 * 1024, "each exponential is saved; the input and the parameter were there"
    assert use.peak > use.live
    assert model.count == 0
