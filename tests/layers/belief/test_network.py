"""Deep belief networks: each machine trained on what the one below gives, and drawn from again."""

from __future__ import annotations

import copy
import dataclasses
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxopt
from fxopt.layers import RBM, DeepBeliefNetwork, DeepBeliefRelaxationNetwork
from fxopt.layers.belief.network import FitOptions
from fxopt.layers.belief.training import Options


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stripes(rows: int = 120) -> Tensor:
    """Images of 2 x 3 with one full row, and a little noise."""
    images = torch.tensor([[1.0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]).repeat(rows // 2, 1)
    return (images - (torch.rand(rows, 6, generator=seeded()) < 0.02).float()).abs()


def test_a_network_takes_the_options_that_a_machine_takes():
    taken = set(inspect.signature(RBM.fit).parameters) - {"self", "data", "epochs", "learning_rate"}
    assert set(FitOptions.__annotations__) == taken
    assert {each.name for each in dataclasses.fields(Options)} <= taken | {"learning_rate"}


def test_machines_are_trained_one_after_the_other_on_probabilities():
    torch.manual_seed(0)
    network = DeepBeliefNetwork([6, 5, 4])
    low, high = (copy.deepcopy(machine) for machine in network.machines)
    one, other = seeded(), seeded()
    assert network.fit(stripes(), [3, 2], [0.1, 0.2], generator=one, batch_size=16) is network
    low.fit(stripes(), 3, learning_rate=0.1, generator=other, batch_size=16)
    with torch.no_grad():
        probabilities = low(stripes())
    high.fit(probabilities, 2, learning_rate=0.2, generator=other, batch_size=16)
    assert torch.equal(network.machines[0].weight, low.weight)
    assert torch.equal(network.machines[1].weight, high.weight)
    torch.testing.assert_close(network(stripes()), high(low(stripes())))


def test_a_loader_trains_all_machines():
    network = DeepBeliefNetwork([6, 5, 4], dtype=torch.float64)
    loader = DataLoader(TensorDataset(stripes(), torch.zeros(120)), batch_size=50)
    before = copy.deepcopy(network.state_dict())
    network.fit(loader, 2, k=2, persistent=True)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_samples_of_a_trained_network_look_like_the_data():
    torch.manual_seed(0)
    network = DeepBeliefNetwork([6, 8, 6]).fit(stripes(), 80, 0.1, batch_size=10, persistent=True, generator=seeded())
    near = {}
    for name, drawn in {
        "trained": network.sample(400, 100, generator=seeded()),
        "new": DeepBeliefNetwork([6, 8, 6]).sample(400, 100, generator=seeded()),
    }.items():
        assert drawn.shape == (400, 6) and set(drawn.unique().tolist()) <= {0.0, 1.0}
        near[name] = float((torch.cdist(drawn, stripes(2), p=1).min(1).values <= 1).float().mean())
    assert near["trained"] > 0.6 > 0.4 > near["new"]


def test_sampling_goes_up_from_given_rows_and_gives_means():
    torch.manual_seed(0)
    network = DeepBeliefNetwork([6, 8]).fit(stripes(), 60, 0.1, batch_size=10, generator=seeded())
    start = stripes(200)
    up_and_down = network.sample(200, 1, start=start, generator=seeded())
    assert float((up_and_down != start).float().mean()) < 0.2
    means = network.sample(200, 1, start=start, means=True, generator=seeded())
    torch.testing.assert_close(means.mean(0), up_and_down.mean(0), atol=0.1, rtol=0)
    assert torch.equal(network.sample(3, 2, generator=seeded(1)), network.sample(3, 2, generator=seeded(1)))


def test_gaussian_units_are_those_of_the_lowest_machine():
    network = DeepBeliefNetwork([3, 4, 2], "gaussian")
    assert [machine.kind for machine in network.machines] == ["gaussian", "bernoulli"]
    network.fit(torch.randn(50, 3), 2, [0.01, 0.05])
    assert len(network.sample(50, 3).unique()) == 150


def test_the_feedforward_network_computes_what_the_machines_do():
    network = DeepBeliefNetwork([6, 5, 4], dtype=torch.float64)
    v = stripes().double()
    classifier = network.to_feedforward(3)
    assert [type(layer) for layer in classifier] == [nn.Linear, nn.Sigmoid] * 2 + [nn.Linear]
    torch.testing.assert_close(classifier[:-1](v), network(v))
    assert classifier(v).shape == (120, 3) and classifier[-1].weight.dtype == torch.float64
    classifier[0].weight.data.zero_()
    assert network.machines[0].weight.any()
    assert isinstance(network.to_feedforward(3, nn.Tanh)[1], nn.Tanh)


def test_state_copies_and_the_other_name():
    assert DeepBeliefRelaxationNetwork is DeepBeliefNetwork
    network = DeepBeliefRelaxationNetwork([6, 5, 4])
    other = DeepBeliefNetwork([6, 5, 4])
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(stripes()), network(stripes()))
    assert torch.equal(copy.deepcopy(network)(stripes()), network(stripes()))
    network.reset_parameters()
    assert not torch.equal(other(stripes()), network(stripes()))
    assert DeepBeliefNetwork([2, 3], device="meta", dtype=torch.bfloat16).machines[0].weight.is_meta


@pytest.mark.parametrize("training", [True, False])
def test_it_is_captured_whole(training: bool):
    network = DeepBeliefNetwork([6, 5, 4], "gaussian").train(training)
    program = fxopt.capture(network, (torch.randn(3, 6),))
    assert program.coverage().share == 1.0
    for rows in (1, 7):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(program.model(x), network(x), rtol=0, atol=0)
    assert not program.coverage().missed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DeepBeliefNetwork([6]), r"sizes is \[6\]; give the visible units and at least one layer"),
        (lambda: DeepBeliefNetwork(6), "sizes is of type int"),
        (lambda: DeepBeliefNetwork([6, 0]), "hidden is 0"),
        (lambda: DeepBeliefNetwork([6, 3], "poisson"), "unknown kind 'poisson'"),
        (lambda: DeepBeliefNetwork([6, 3]).fit(stripes(), [1, 2]), "epochs has 2 values for 1 machines"),
        (lambda: DeepBeliefNetwork([6, 3]).fit(stripes(), k=0), "k is 0"),
        (lambda: DeepBeliefNetwork([6, 3]).sample(0), "rows is 0"),
        (lambda: DeepBeliefNetwork([6, 3]).sample(2, 0), "steps is 0"),
        (lambda: DeepBeliefNetwork([6, 3]).sample(2, start=stripes()), r"start has the shape \[120, 6\]"),
        (lambda: DeepBeliefNetwork([6, 3]).to_feedforward(0), "classes is 0"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(call, message: str):
    with pytest.raises(fxopt.UsageError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_machine_alone_is_a_network_of_one():
    torch.manual_seed(0)
    network, rbm = DeepBeliefNetwork([6, 4]), RBM(6, 4)
    rbm.load_state_dict(network.machines[0].state_dict())
    network.fit(stripes(), 2, generator=seeded())
    rbm.fit(stripes(), 2, generator=seeded())
    assert torch.equal(network(stripes()), rbm(stripes()))
