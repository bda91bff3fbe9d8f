"""Where a check misses, the random numbers that were drawn before it are drawn again, not further ones."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from fxopt.tracing.program import capture_program

EVEN, ODD = torch.ones(4, 6), torch.ones(5, 6)


class Halving(nn.Module):
    """Give half of the rows; of how many in all, only its caller can tell."""

    def forward(self, x):
        return x[: x.shape[0] // 2]


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand(())


class NumpyNoise(nn.Module):
    def forward(self, x):
        return x + float(np.random.rand())


class PythonNoise(nn.Module):
    def forward(self, x):
        return x + random.random()


class PaddingUp(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise, self.drop, self.halving = noise, nn.Dropout(0.5), Halving()

    def forward(self, x):
        y = self.halving(self.drop(self.noise(x)))
        missing = x.shape[0] - 2 * y.shape[0]
        if missing > 0:
            y = nn.functional.pad(y, (0, 0, 0, missing))
        return y


class InNoGrad(PaddingUp):
    def forward(self, x):
        with torch.no_grad():
            y = self.halving(self.drop(self.noise(x)))
            if 2 * y.shape[0] < x.shape[0]:
                y = -y
        return self.drop(y)


def seeded(model, x):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    return model(x), torch.rand(2), torch.tensor(random.random()), torch.tensor(np.random.rand())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("noise", [nn.Identity, Noise, NumpyNoise, PythonNoise])
@pytest.mark.parametrize("kind", [PaddingUp, InNoGrad])
def test_a_miss_draws_the_same_numbers(kind, noise, training, misses):
    model = kind(noise()).train(training)
    program = capture_program(copy.deepcopy(model), (EVEN,))
    for x in (EVEN, ODD, EVEN):
        assert all(map(torch.equal, seeded(program.model, x), seeded(model, x)))
    assert misses(program) == 1


def test_copies_draw_the_same_numbers():
    model = PaddingUp(Noise()).train()
    captured = capture_program(copy.deepcopy(model), (EVEN,)).model
    for fast in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert all(map(torch.equal, seeded(fast, ODD), seeded(model, ODD)))


def test_a_graph_that_draws_before_a_check_compiles_whole():
    captured = capture_program(PaddingUp(Noise()).train(), (EVEN,)).model
    assert torch.compile(captured, backend="eager", fullgraph=True)(EVEN).shape == (2, 6)
