"""The normalizing constant of a machine, beside the sum over all states; softmax units beside all their states."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.errors import InputError, UsageError
from fxopt.layers import RBM, DeepBeliefNetwork

GROUPS, CLASSES, HIDDEN = 3, 4, 5
KINDS: dict[str, dict[str, Any]] = {"bernoulli": {}, "gaussian": {}, "softmax": {"classes": CLASSES}}


def machine(kind: str, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> RBM:
    torch.manual_seed(2)
    rbm = RBM(GROUPS * CLASSES, HIDDEN, kind, dtype=dtype, **KINDS[kind])
    for parameter in rbm.parameters():
        nn.init.normal_(parameter, std=scale / (3 if kind == "gaussian" else 1))
    return rbm


def binary(units: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=units)), dtype=torch.float64)


def one_of_each() -> Tensor:
    """Return all states of the softmax units."""
    chosen = torch.tensor(list(itertools.product(range(CLASSES), repeat=GROUPS)))
    return nn.functional.one_hot(chosen, CLASSES).flatten(1).double()


@torch.no_grad()
def exact(rbm: RBM) -> float:
    """Return log Z by a sum over the hidden states, each with all visible ones together."""
    h = binary(HIDDEN).to(rbm.weight)
    total = h @ rbm.weight + rbm.visible_bias
    if rbm.kind == "bernoulli":
        visible = nn.functional.softplus(total).sum(1)
    elif rbm.kind == "softmax":
        visible = total.unflatten(1, (GROUPS, CLASSES)).logsumexp(-1).sum(1)
    else:
        squares = (total.square() - rbm.visible_bias.square()).sum(1) / 2
        visible = squares + rbm.visible / 2 * math.log(2 * math.pi)
    return float((h @ rbm.hidden_bias + visible).logsumexp(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_estimate_is_that_of_all_states(kind: str, dtype: torch.dtype):
    rbm = machine(kind, dtype=dtype)
    found = rbm.log_partition(400, 300, generator=torch.Generator().manual_seed(0))
    assert abs(found.estimate - exact(rbm)) < 0.1
    assert found.low <= exact(rbm) <= found.high and found.low < found.estimate < found.high


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_from_the_means_of_data(kind: str):
    rbm = machine(kind)
    generator = torch.Generator().manual_seed(0)
    v = (
        torch.randn(50, rbm.visible, dtype=torch.float64)
        if kind == "gaussian"
        else rbm.gibbs(torch.zeros(50, rbm.visible, dtype=torch.float64), 20, generator)
    )
    found = rbm.log_partition(400, 300, data=v, generator=generator)
    assert abs(found.estimate - exact(rbm)) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_without_weights_it_is_exact(kind: str):
    rbm = machine(kind)
    nn.init.zeros_(rbm.weight)
    nn.init.zeros_(rbm.hidden_bias)
    assert abs(rbm.log_partition(1, 1).estimate - exact(rbm)) < 1e-9


def test_likelihoods_of_all_states_sum_to_one():
    rbm = machine("softmax")
    total = (-rbm.free_energy(one_of_each()) - exact(rbm)).detach().exp().sum()
    assert abs(float(total) - 1) < 1e-9


def test_one_softmax_unit_of_each_group_is_on_as_often_as_its_probability_says():
    rbm = machine("softmax")
    h = binary(HIDDEN)[[11]]
    drawn = rbm.sample_visible(h.expand(20_000, -1), torch.Generator().manual_seed(0))
    assert (drawn.unflatten(1, (GROUPS, CLASSES)).sum(-1) == 1).all()
    means = rbm.visible_means(h)[0]
    torch.testing.assert_close(means.view(GROUPS, CLASSES).sum(1), torch.ones(GROUPS, dtype=torch.float64))
    torch.testing.assert_close(drawn.mean(0), means, rtol=0, atol=0.02)


@pytest.mark.parametrize("persistent", [False, True])
def test_softmax_units_learn(persistent: bool):
    """Two groups that are always equal, and one of its own."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    first, other = torch.randint(CLASSES, (2, 400), generator=generator)
    rows = nn.functional.one_hot(torch.stack([first, first, other], 1), CLASSES).flatten(1).float()
    rbm = RBM(GROUPS * CLASSES, 12, "softmax", classes=CLASSES)
    rbm.fit(rows, 150, batch_size=20, learning_rate=0.05, persistent=persistent, generator=generator, progress=False)
    drawn = rbm.gibbs(rows[torch.randperm(400, generator=generator)], 50, generator)
    drawn = drawn.unflatten(1, (GROUPS, CLASSES)).argmax(-1)
    assert (drawn[:, 0] == drawn[:, 1]).float().mean() > 0.8
    assert drawn[:, 0].bincount(minlength=CLASSES).min() > 20


def test_a_network_takes_softmax_units_below():
    network = DeepBeliefNetwork([GROUPS * CLASSES, 6, 4], "softmax", classes=CLASSES)
    network.fit(one_of_each().float(), 1, progress=False)
    assert (network.sample(5, 3).unflatten(1, (GROUPS, CLASSES)).sum(-1) == 1).all()
    assert repr(network.machines[0]) == f"RBM(visible=12, hidden=6, kind='softmax', classes={CLASSES})"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RBM(12, 3, "softmax"), UsageError, "softmax units need classes="),
        (lambda: RBM(12, 3, "softmax", classes=5), UsageError, "12 visible units are no groups of 5 classes"),
        (lambda: RBM(12, 3, classes=4), UsageError, "classes is for softmax units"),
        (lambda: machine("softmax").log_partition(0), UsageError, "steps is 0"),
        (lambda: machine("softmax").fit(torch.zeros(3, 12)), InputError, "a group of 4 softmax units that is no"),
        (lambda: machine("bernoulli").log_partition(data=torch.ones(3, 12) * 2), InputError, "for binary visible"),
        (lambda: machine("softmax").pseudo_log_likelihood(one_of_each()), UsageError, "use `log_partition`"),
    ],
)
def test_wrong_calls_are_refused(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
