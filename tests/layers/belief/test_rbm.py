"""A restricted Boltzmann machine beside the sums over all its states."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.layers import RBM
from fxopt.layers.belief.units import KINDS

VISIBLE, HIDDEN = 4, 3


def states(units: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=units)), dtype=torch.float64)


def machine(kind: str = "bernoulli", scale: float = 1.0) -> RBM:
    rbm = RBM(VISIBLE, HIDDEN, kind, dtype=torch.float64)
    for parameter in rbm.parameters():
        nn.init.normal_(parameter, std=scale)
    return rbm


def energies(rbm: RBM, v: Tensor, h: Tensor) -> Tensor:
    """E(v, h) for each row of v and each of h, [rows of v, rows of h], as it is written in the literature."""
    alone = -(v @ rbm.visible_bias) if rbm.kind == "bernoulli" else ((v - rbm.visible_bias) ** 2).sum(1) / 2
    return alone[:, None] - h @ rbm.hidden_bias - v @ rbm.weight.t() @ h.t()


@torch.no_grad()
def log_probabilities(rbm: RBM) -> Tensor:
    """Log p(v) of all binary v, exactly."""
    return torch.log_softmax(-rbm.free_energy(states(rbm.visible)), 0)


def total_variation(drawn: Tensor, log_probability: Tensor) -> float:
    places = 2 ** torch.arange(drawn.shape[1] - 1, -1, -1)
    shares = torch.bincount((drawn.long() * places).sum(1), minlength=len(log_probability)) / len(drawn)
    return float((shares - log_probability.exp()).abs().sum() / 2)


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_the_free_energy_is_that_of_all_hidden_states(kind: str):
    rbm = machine(kind)
    v = torch.randn(7, VISIBLE, dtype=torch.float64) if kind == "gaussian" else states(VISIBLE)
    expected = -torch.logsumexp(-energies(rbm, v, states(HIDDEN)), 1)
    torch.testing.assert_close(rbm.free_energy(v), expected)
    assert rbm.free_energy(v[None]).shape == (1, len(v))


def test_the_conditionals_are_those_of_the_joint_distribution():
    rbm = machine()
    joint = torch.exp(-energies(rbm, states(VISIBLE), states(HIDDEN)))
    expected = joint @ states(HIDDEN) / joint.sum(1, keepdim=True)
    torch.testing.assert_close(rbm.hidden_probabilities(states(VISIBLE)), expected)
    torch.testing.assert_close(rbm(states(VISIBLE)), expected)
    expected = joint.t() @ states(VISIBLE) / joint.t().sum(1, keepdim=True)
    torch.testing.assert_close(rbm.visible_means(states(HIDDEN)), expected)
    torch.testing.assert_close(rbm.reconstruct(states(VISIBLE)), rbm.visible_means(rbm(states(VISIBLE))))


def test_gaussian_visible_units_have_the_mean_and_the_variance_of_the_energy():
    rbm = machine("gaussian")
    h = states(HIDDEN)[5]
    drawn = rbm.sample_visible(h.expand(40_000, -1))
    torch.testing.assert_close(rbm.visible_means(h), rbm.visible_bias + h @ rbm.weight)
    torch.testing.assert_close(drawn.mean(0), rbm.visible_means(h), atol=0.03, rtol=0)
    torch.testing.assert_close(drawn.var(0), torch.ones(VISIBLE).double(), atol=0.04, rtol=0)


def test_pseudo_likelihood_is_the_sum_over_units_given_the_others():
    rbm, v = machine(), states(VISIBLE)
    flipped = (v[:, None] - torch.eye(VISIBLE)).abs()
    expected = -torch.log1p(torch.exp(rbm.free_energy(v)[:, None] - rbm.free_energy(flipped))).sum(1)
    torch.testing.assert_close(rbm.pseudo_log_likelihood(v), expected)
    estimate = rbm.pseudo_log_likelihood(v, flips=4000, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(estimate, expected, rtol=0.15, atol=0.0)


def test_draws_have_their_probabilities():
    logits = torch.tensor([-30.0, -2.0, 0.0, 1.0, 30.0]).expand(40_000, -1)
    units, generator = KINDS["bernoulli"], torch.Generator().manual_seed(0)
    from_noise = logits.clone()
    units.draw_(from_noise, units.noise_(torch.empty(40_000, 5), generator))
    for sample in (units.sample(logits, generator), from_noise):
        assert set(sample.unique().tolist()) == {0.0, 1.0}
        torch.testing.assert_close(sample.mean(0), torch.sigmoid(logits[0]), atol=0.01, rtol=0)


def test_a_long_gibbs_chain_draws_from_the_model():
    rbm = machine()
    start = torch.zeros(20_000, VISIBLE, dtype=torch.float64)
    drawn = rbm.gibbs(start, 50, torch.Generator().manual_seed(0))
    assert total_variation(drawn, log_probabilities(rbm)) < 0.02
    assert total_variation(start, log_probabilities(rbm)) > 0.2


def test_the_contrastive_loss_has_the_gradient_of_the_log_likelihood():
    """Where the samples are those of the model: its states, each as often as its probability says."""
    rbm, data = machine(scale=0.5), states(VISIBLE)[[0, 3, 3, 9, 15]]
    counts = (log_probabilities(rbm).exp() * 100_000).round().long()
    rbm.contrastive_loss(data, states(VISIBLE).repeat_interleave(counts, 0)).backward()
    found = [parameter.grad for parameter in rbm.parameters()]
    likelihood = (-rbm.free_energy(data) - torch.logsumexp(-rbm.free_energy(states(VISIBLE)), 0)).mean()
    expected = torch.autograd.grad(-likelihood, list(rbm.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_any_optimizer_can_drive_it():
    rbm, data = machine(scale=0.1), states(VISIBLE)[[3, 12]].repeat(20, 1)
    optimizer = torch.optim.Adam(rbm.parameters(), 0.05)
    places = torch.tensor([3, 12])
    before = log_probabilities(rbm)[places].mean()
    for _ in range(60):
        optimizer.zero_grad()
        rbm.contrastive_loss(data, rbm.gibbs(data, 1)).backward()
        optimizer.step()
    assert log_probabilities(rbm)[places].mean() > before + 0.5


def test_draws_have_no_gradient_and_probabilities_have():
    rbm = machine()
    v = states(VISIBLE)
    assert rbm(v).requires_grad and rbm.free_energy(v).requires_grad and rbm.reconstruct(v).requires_grad
    assert not rbm.sample_hidden(v).requires_grad and not rbm.gibbs_step(v).requires_grad
    assert not rbm.pseudo_log_likelihood(v).requires_grad


def test_zeros_and_ones_of_any_type_are_visible_units():
    rbm, v = machine(), states(VISIBLE)
    for other in (v.bool(), v.long(), v.to(torch.uint8)):
        torch.testing.assert_close(rbm(other), rbm(v))
        torch.testing.assert_close(rbm.free_energy(other), rbm.free_energy(v))
        torch.testing.assert_close(rbm.pseudo_log_likelihood(other), rbm.pseudo_log_likelihood(v))


def test_state_copies_types_and_new_weights():
    rbm = machine("gaussian")
    assert list(rbm.state_dict()) == ["weight", "visible_bias", "hidden_bias"]
    other = RBM(VISIBLE, HIDDEN, "gaussian", dtype=torch.float64)
    other.load_state_dict(rbm.state_dict())
    v = torch.randn(5, VISIBLE, dtype=torch.float64)
    assert torch.equal(other(v), rbm(v)) and torch.equal(copy.deepcopy(rbm)(v), rbm(v))
    assert RBM(2, 3, device="meta", dtype=torch.bfloat16).weight.is_meta
    assert copy.deepcopy(rbm).float()(v.float()).dtype == torch.float32
    assert repr(rbm) == f"RBM(visible={VISIBLE}, hidden={HIDDEN}, kind='gaussian')"
    rbm.reset_parameters()
    assert float(rbm.weight.detach().abs().max()) < 0.1 and not rbm.hidden_bias.any() and not rbm.visible_bias.any()


@pytest.mark.parametrize("training", [True, False])
def test_a_model_with_machines_is_captured_whole(training: bool):
    model = nn.Sequential(RBM(6, 5, "gaussian"), RBM(5, 4), nn.Linear(4, 2)).train(training)
    program = fxopt.capture(model, (torch.randn(3, 6),))
    assert program.coverage().share == 1.0
    for rows in (1, 3, 8):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(program.model(x), model(x), rtol=0, atol=0)
    assert not program.coverage().missed
    assert isinstance(program.model[0], RBM)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RBM(0, 3), "visible is 0; give a whole number, at least 1"),
        (lambda: RBM(4, 2.0), "hidden is of type float; give a whole number, at least 1"),
        (lambda: RBM(4, 3, "gausian"), "unknown kind 'gausian' of visible units; did you mean 'gaussian'?"),
        (lambda: machine()(torch.zeros(2, 5)), r"4 visible units are needed, the tensor's shape is \[2, 5\]"),
        (lambda: machine()([1.0]), "of type list"),
        (lambda: machine().visible_means(torch.zeros(2, 4)), "3 hidden units are needed"),
        (lambda: machine().gibbs(states(4), 0), "steps is 0"),
        (lambda: machine().pseudo_log_likelihood(states(4), flips=0), "flips is 0"),
        (lambda: machine("gaussian").pseudo_log_likelihood(states(4)), "for binary visible units"),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(call, message: str):
    with pytest.raises(fxopt.UsageError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("v", "message"),
    [
        (2 * states(VISIBLE), "values between 0 and 2 for binary visible units; scale them"),
        (states(VISIBLE).where(states(VISIBLE) < 1, float("nan")), "NaN or infinite"),
        (states(VISIBLE)[:0], r"no rows: its shape is \[0, 4\]"),
    ],
)
def test_the_loss_refuses_what_visible_units_do_not_take(v: Tensor, message: str):
    with pytest.raises(fxopt.InputError, match=f"the batch has .*{message}"):
        machine().contrastive_loss(v, states(VISIBLE))
    with pytest.raises(fxopt.InputError, match="the batch of samples has"):
        machine().contrastive_loss(states(VISIBLE), v)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, "autocast"])
def test_draws_in_narrow_dtypes_are_as_rare_as_their_probabilities(narrow: Any):
    rbm = RBM(1, 1, dtype=torch.float32 if narrow == "autocast" else narrow)
    for parameter, value in zip(rbm.parameters(), (0.0, -8.0, -8.0), strict=True):
        torch.nn.init.constant_(parameter, value)
    units, generator = torch.zeros(200_000, 1, dtype=rbm.weight.dtype), torch.Generator().manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow == "autocast"):
        for draw in (rbm.sample_visible, rbm.sample_hidden):
            assert 30 < draw(units, generator).float().sum() < 110  # 67 are expected


def test_units_of_another_dtype_are_refused():
    rbm = RBM(VISIBLE, HIDDEN)
    for call in (rbm, rbm.free_energy, rbm.sample_hidden, rbm.pseudo_log_likelihood):
        with pytest.raises(fxopt.UsageError, match=r"in torch.float32 was given torch.float64; give torch.float32"):
            call(torch.ones(2, VISIBLE, dtype=torch.float64))
    with pytest.raises(fxopt.UsageError, match=r"give torch.float32"):
        rbm.visible_means(torch.ones(2, HIDDEN, dtype=torch.float64))
