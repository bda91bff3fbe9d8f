"""Where a check misses, the random numbers that were drawn before it are drawn again, not further ones."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxopt.tracing.analyses import may_draw
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


class Around(nn.Module):
    """Calls what draws, and checks nothing itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


class NoisyIfOdd(nn.Module):
    """Draws in the calls only that its graph is not for."""

    def forward(self, x):
        return x + random.random() + float(np.random.rand()) if x.shape[0] % 2 else x


class NoisyOnDemand(nn.Module):
    """Draws once its graph is gone."""

    def __init__(self):
        super().__init__()
        self.noisy = False

    def forward(self, x):
        return x + random.random() if self.noisy else x


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


class Attends(nn.Module):
    """Drops nothing in evaluation, and something in training, before it decides."""

    def __init__(self, chance):
        super().__init__()
        self.chance, self.halving = chance, Halving()

    def forward(self, x):
        y = nn.functional.dropout(x, self.chance, training=True)
        chance = self.chance if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=chance)[0]
        return y * 2 if y[y.shape[0] // 2 :].shape[0] == 2 else -y


@pytest.mark.parametrize("chance", [0, 0.0, 0.5])
@pytest.mark.parametrize("training", [False, True])
def test_what_drops_nothing_draws_nothing(chance, training, monkeypatch):
    model = Attends(chance).train(training)
    fast = capture_program(copy.deepcopy(model), (EVEN,)).model
    for x in (EVEN, ODD, EVEN):
        assert all(map(torch.equal, seeded(fast, x), seeded(model, x)))
    source = inspect.getsource(type(fast).forward)
    assert ("generators_now" in source) == (chance > 0)


NESTED = {
    "in a module": lambda: Around(NumpyNoise()),
    "in a Sequential": lambda: nn.Sequential(nn.Identity(), Around(nn.Sequential(PythonNoise()))),
    "in a module that checks": lambda: PaddingUp(Around(NumpyNoise())),
    "twice": lambda: nn.Sequential(PythonNoise(), PaddingUp(NumpyNoise()), NumpyNoise()),
    "where a graph misses": lambda: Around(NoisyIfOdd()),
    "under a context": lambda: InNoGrad(Around(PythonNoise())),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("nested", NESTED)
def test_draws_deep_inside_are_taken_back(nested, copied):
    model = PaddingUp(NESTED[nested]()).train()
    fast = copied(capture_program(copy.deepcopy(model), (EVEN,)).model)
    for x in (EVEN, ODD, ODD, EVEN):
        assert all(map(torch.equal, seeded(fast, x), seeded(model, x)))


def test_draws_of_a_module_that_lost_its_graph_are_taken_back():
    model = PaddingUp(Around(NoisyOnDemand()))
    fast = capture_program(copy.deepcopy(model), (EVEN,)).model
    for each in (model, fast):
        each.noise.inner.noisy = True
    for x in (ODD, EVEN, ODD):
        assert all(map(torch.equal, seeded(fast, x), seeded(model, x)))


@pytest.mark.parametrize(
    ("noise", "notes"), [(nn.Identity, 0), (lambda: Around(Noise()), 0), (NumpyNoise, 1), (NESTED["twice"], 2)]
)
def test_generators_outside_torch_are_noted_where_something_draws(noise, notes, monkeypatch):
    taken = []
    state = random.getstate
    model = capture_program(PaddingUp(PaddingUp(noise())), (EVEN,)).model
    monkeypatch.setattr(random, "getstate", lambda: taken.append(1) or state())
    model(EVEN)
    assert len(taken) == notes


def test_nothing_is_noted_for_a_forward_that_ended(monkeypatch):
    model, noise = (
        capture_program(PaddingUp(nn.Identity()), (EVEN,)).model,
        capture_program(Around(NumpyNoise()), (EVEN,)),
    )
    model(EVEN)
    monkeypatch.setattr(random, "getstate", lambda: pytest.fail("nobody asks"))
    noise.model(EVEN)


def test_copies_draw_the_same_numbers():
    model = PaddingUp(Noise()).train()
    captured = capture_program(copy.deepcopy(model), (EVEN,)).model
    for fast in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert all(map(torch.equal, seeded(fast, ODD), seeded(model, ODD)))


def test_a_graph_that_draws_before_a_check_compiles_whole():
    captured = capture_program(PaddingUp(Noise()).train(), (EVEN,)).model
    assert torch.compile(captured, backend="eager", fullgraph=True)(EVEN).shape == (2, 6)


@pytest.mark.parametrize(
    ("target", "draws"),
    [
        (torch.rand, True), (torch.randn_like, True), (torch.randint, True), (torch.randperm, True),
        (torch.bernoulli, True), (torch.multinomial, True), (F.dropout, True), (F.rrelu, True), ("uniform_", True),
        ("bernoulli", True), (torch.sin, False), (F.linear, False), ("view", False), ("add_", False),
    ],
)  # fmt: skip
def test_functions_that_draw_are_known(target: Any, draws: bool) -> None:
    graph, kind = fx.Graph(), "call_method" if isinstance(target, str) else "call_function"
    node = graph.create_node(kind, target, (graph.placeholder("x"),))
    assert may_draw(node) == draws


TRACED_FIRST = """
import fxopt, torch
from fxopt.tracing.program import capture_program
from fxopt.tracing.analyses import may_draw

class Noise(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand(())

program = capture_program(Noise(), (torch.ones(2),))
print([may_draw(node) for node in program.graph("").nodes])
"""


def test_a_process_that_traces_first_knows_what_draws():
    """While a model is traced, other functions are in the places of torch's: what is looked up then must know these."""
    done = subprocess.run([sys.executable, "-c", TRACED_FIRST], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[False, True, False, False]"
