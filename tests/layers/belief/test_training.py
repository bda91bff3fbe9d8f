"""Training by contrastive divergence, beside autograd, the exact likelihood, and `torch.optim.SGD`."""

from __future__ import annotations

import copy
import io
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fxopt
from fxopt.layers import RBM
from fxopt.layers.belief.training import ContrastiveDivergence, Options
from fxopt.layers.belief.units import KINDS
from fxopt.layers.distributed import Replica


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def states(units: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=units)), dtype=torch.float64)


def exact_loss(rbm: RBM, data: Tensor) -> Tensor:
    """The mean negative log-likelihood, by the sum over all visible states."""
    normalizer = torch.logsumexp(-rbm.free_energy(states(rbm.visible)), 0)
    return (rbm.free_energy(data) + normalizer).mean()


def patterns() -> Tensor:
    """Stripes of 2 x 3 images, and noise."""
    rows = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1]])
    return (rows.repeat(25, 1).double() - (torch.rand(100, 6, generator=seeded()) < 0.03).double()).abs()


def options(**changed: Any) -> Options:
    plain = {"learning_rate": 0.1, "k": 1, "persistent": False, "momentum": 0.0, "weight_decay": 0.0}
    return Options(**{**plain, "sparsity_target": None, "sparsity_cost": 0.1, **changed})


def by_autograd(rbm: RBM, block: Tensor, chosen: Options, generator: torch.Generator) -> None:
    """What the steps of a block do, by the gradient of the loss and `torch.optim.SGD`, from the same noise."""
    units, (steps, rows, _) = KINDS[rbm.kind], block.shape
    noise = units.noise_(torch.empty(steps, chosen.k, rows, rbm.visible + 1).double(), generator)[..., :-1]
    uniform = torch.empty(steps, chosen.k, rows, rbm.hidden + 1).double().uniform_(generator=generator)[..., :-1]
    groups = [{"params": [rbm.weight], "weight_decay": chosen.weight_decay}]
    groups += [{"params": [rbm.visible_bias, rbm.hidden_bias]}]
    optimizer = torch.optim.SGD(groups, chosen.learning_rate, chosen.momentum)
    chains = torch.zeros(rows, rbm.hidden).double()
    for v, of_visible, of_hidden in zip(block, noise, uniform, strict=True):
        samples = v
        for drawn, hidden in zip(of_visible, of_hidden, strict=True):
            if not chosen.persistent:
                chains = (hidden < rbm(samples)).double()
            drive = chains @ rbm.weight + rbm.visible_bias
            samples = ((drawn < drive).double() if rbm.kind == "bernoulli" else drive + drawn).detach()
            if chosen.persistent:
                chains = (hidden < rbm(samples)).double()
        optimizer.zero_grad()
        rbm.contrastive_loss(v, samples).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
@pytest.mark.parametrize(
    "chosen",
    [
        options(),
        options(k=3),
        options(persistent=True),
        options(persistent=True, k=2),
        options(momentum=0.8),
        options(persistent=True, momentum=0.5, weight_decay=0.1),
    ],
    ids=lambda chosen: f"k{chosen.k}-{chosen.persistent}-{chosen.momentum}-{chosen.weight_decay}",
)
def test_steps_are_those_of_autograd_and_sgd(kind: str, chosen: Options):
    rbm = RBM(5, 4, kind, dtype=torch.float64)
    for parameter in rbm.parameters():
        nn.init.normal_(parameter, std=0.5)
    expected = copy.deepcopy(rbm)
    block = (torch.rand(7, 6, 5, generator=seeded()) < 0.4).double()
    by_autograd(expected, block, chosen, seeded(1))
    parameters = (rbm.weight, rbm.visible_bias, rbm.hidden_bias)
    trainer = ContrastiveDivergence(parameters, KINDS[kind], chosen, seeded(1))
    trainer.train(block)
    trainer.write(1)
    for one, other in zip(rbm.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_step_from_samples_of_the_model_follows_the_log_likelihood(persistent: bool):
    """With many chains that ran long; their number is not that of the second batch."""
    rbm = RBM(6, 3, dtype=torch.float64)
    nn.init.normal_(rbm.weight, std=0.5)
    data, before = patterns().repeat(200, 1), copy.deepcopy(rbm)
    expected = torch.autograd.grad(exact_loss(rbm, data), list(rbm.parameters()))
    rbm.fit(data, 1, batch_size=len(data), learning_rate=1e-3, k=20, persistent=persistent, generator=seeded())
    for new, old, gradient in zip(rbm.parameters(), before.parameters(), expected, strict=True):
        torch.testing.assert_close((old - new) / 1e-3, gradient, atol=0.02, rtol=0)


def test_chains_may_be_more_than_the_rows_of_a_batch():
    rbm = RBM(6, 3, dtype=torch.float64)
    data = patterns().repeat(200, 1)
    gradient = torch.autograd.grad(exact_loss(rbm, data[:500]), list(rbm.parameters()))
    parameters = (rbm.weight, rbm.visible_bias, rbm.hidden_bias)
    trainer = ContrastiveDivergence(
        parameters, KINDS["bernoulli"], options(persistent=True, learning_rate=1e-3), seeded()
    )
    trainer.train(data[None])
    trainer.write(1)
    before = copy.deepcopy(rbm)
    trainer.train(data[None, :500])
    trainer.write(1)
    for new, old, expected in zip(rbm.parameters(), before.parameters(), gradient, strict=True):
        torch.testing.assert_close((old - new) / 1e-3, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"k": 3},
        {"persistent": True},
        {"momentum": 0.5, "weight_decay": 1e-3},
        {"persistent": True, "sparsity_target": 0.4, "sparsity_cost": 0.01},
    ],
    ids=str,
)
def test_fit_lowers_the_exact_negative_log_likelihood(chosen: dict[str, Any]):
    rbm, data = RBM(6, 8, dtype=torch.float64), patterns()
    before = exact_loss(rbm, data)
    assert rbm.fit(data, 120, batch_size=10, learning_rate=0.1, generator=seeded(), **chosen) is rbm
    # 6 bits of noise are 4.16; four equal patterns with their noise about 2.2.
    assert before > 4.1
    assert exact_loss(rbm, data) < 3.0


def test_fit_of_gaussian_units_finds_two_clusters():
    centers = torch.tensor([[2.0, 2.0, -2.0], [-2.0, -2.0, 2.0]])
    data = centers.repeat(100, 1) + torch.randn(200, 3, generator=seeded())
    rbm = RBM(3, 4, "gaussian")
    before = rbm.free_energy(data).mean() - rbm.free_energy(torch.zeros(1, 3)).mean()
    rbm.fit(data, 60, learning_rate=0.01, generator=seeded())
    after = rbm.free_energy(data).mean() - rbm.free_energy(torch.zeros(1, 3)).mean()
    assert after < before - 2
    assert (rbm.reconstruct(centers) - centers).abs().max() < 0.7


def test_sparsity_pulls_the_activity_to_its_target():
    data = patterns()
    activity = {}
    for target in (None, 0.1):
        rbm = RBM(6, 8, dtype=torch.float64)
        rbm.fit(data, 60, learning_rate=0.1, sparsity_target=target, sparsity_cost=1.0, generator=seeded())
        activity[target] = float(rbm(data).detach().mean())
    assert abs(activity[0.1] - 0.1) < 0.1 < abs(activity[None] - 0.1)


def test_decay_makes_weights_smaller_and_leaves_biases_alone():
    weights = {}
    for decay in (0.0, 0.5):
        torch.manual_seed(0)
        rbm = RBM(6, 8, dtype=torch.float64).fit(patterns(), 40, weight_decay=decay, generator=seeded())
        weights[decay] = float(rbm.weight.detach().norm())
    assert weights[0.5] < weights[0.0] / 2


def test_the_same_generator_gives_the_same_weights_and_nothing_else_is_drawn():
    torch.manual_seed(0)
    first = RBM(6, 4)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    before = torch.get_rng_state()
    first.fit(patterns(), 3, generator=seeded(5))
    assert torch.equal(torch.get_rng_state(), before)
    second.fit(patterns(), 3, generator=seeded(5))
    third.fit(patterns(), 3, generator=seeded(6))
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, third.weight)


def test_integers_booleans_and_other_floats_are_converted():
    first = RBM(6, 4)
    second = copy.deepcopy(first)
    first.fit(patterns().float(), 2, generator=seeded())
    for data in (patterns().bool(), patterns().long(), patterns()):
        rbm = copy.deepcopy(second).fit(data, 2, generator=seeded())
        assert torch.equal(rbm.weight, first.weight)


def test_trained_parameters_are_ordinary_and_changed_in_place():
    rbm = RBM(6, 4, dtype=torch.float64)
    weight, version = rbm.weight, rbm.weight._version
    rbm.fit(patterns(), 1)
    assert rbm.weight is weight and weight._version > version and weight.grad is None
    rbm.contrastive_loss(patterns(), rbm.gibbs(patterns(), 1)).backward()
    assert weight.grad is not None and weight.grad.abs().max() > 0


class Stream(IterableDataset[Tensor]):
    """Rows whose number nobody knows."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(patterns())


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(patterns(), torch.zeros(100)), batch_size=16),  # tuples; the last batch is smaller
        DataLoader(Stream(), batch_size=16),
        list(patterns().split(30)),
    ],
    ids=["pairs", "stream", "list"],
)
def test_fit_takes_loaders(loader: Any, persistent: bool):
    rbm = RBM(6, 8, dtype=torch.float64)
    rbm.fit(loader, 100, learning_rate=0.2, persistent=persistent, generator=seeded())
    assert exact_loss(rbm, patterns()) < 3.5


def test_fewer_rows_than_a_batch_are_one_batch():
    assert RBM(6, 4).fit(patterns()[:3], 2, persistent=True).weight.isfinite().all()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_bar_and_pipes_do_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    RBM(6, 4).fit(patterns(), 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    RBM(6, 4).fit(patterns(), 2, progress=False)
    assert sys.stderr.getvalue() == ""
    RBM(6, 4).fit(patterns(), 2)
    assert "RBM 6-4" in sys.stderr.getvalue()


def test_a_diverging_training_keeps_the_last_whole_epoch():
    rbm = RBM(3, 4, "gaussian")
    before = copy.deepcopy(rbm.state_dict())
    with pytest.raises(
        fxopt.UsageError, match=r"diverges in epoch 1: weights are not finite; lower learning_rate, .* 1e"
    ):
        rbm.fit(torch.randn(500, 3, generator=seeded()), 2, learning_rate=1e12, generator=seeded())
    assert all(torch.equal(tensor, before[name]) for name, tensor in rbm.state_dict().items())


@pytest.mark.parametrize(
    ("data", "chosen", "error", "message"),
    [
        (patterns() * 16, {}, fxopt.InputError, "the data has values between 0 and 16 for binary visible units; scale"),
        (-patterns(), {}, fxopt.InputError, "values between -1 and -?0 for binary"),
        (patterns() / 0, {}, fxopt.InputError, "NaN or infinite"),
        (patterns()[:0], {}, fxopt.InputError, "no rows"),
        (patterns()[:, :5], {}, fxopt.UsageError, "6 visible units are needed"),
        (patterns()[None], {}, fxopt.UsageError, r"the data must be a matrix \[rows, 6\]"),
        (3, {}, fxopt.UsageError, "data is of type int; give a tensor"),
        (iter([]), {}, fxopt.InputError, "the loader gives no batches"),
        ([patterns(), patterns() * 2], {}, fxopt.InputError, "a batch has values between 0 and 2"),
        (["text"], {}, fxopt.UsageError, "of type str"),
        ([patterns()], {"batch_size": 3}, fxopt.UsageError, "batch_size is for a tensor"),
        (patterns(), {"batch_size": 0}, fxopt.UsageError, "batch_size is 0"),
        (patterns(), {"k": 0}, fxopt.UsageError, "k is 0; give a whole number, at least 1"),
        (patterns(), {"epochs": 0}, fxopt.UsageError, "epochs is 0"),
        (patterns(), {"learning_rate": -1}, fxopt.UsageError, "learning_rate is -1; give a number, at least 0"),
        (patterns(), {"learning_rate": float("nan")}, fxopt.UsageError, "learning_rate is nan"),
        (patterns(), {"momentum": 1.0}, fxopt.UsageError, "momentum is 1.0; give a number, at least 0, below 1"),
        (patterns(), {"weight_decay": "much"}, fxopt.UsageError, "weight_decay is 'much'"),
        (patterns(), {"sparsity_target": 1.5}, fxopt.UsageError, "sparsity_target is 1.5; give a probability"),
        (patterns(), {"persistent": 3}, fxopt.UsageError, "persistent is of type int"),
    ],
)
def test_wrong_data_and_options_are_refused(data: Any, chosen: dict[str, Any], error: type, message: str):
    rbm = RBM(6, 4, dtype=torch.float64)
    before = rbm.weight.detach().clone()
    with pytest.raises(error, match=message) as raised:
        rbm.fit(data, **chosen)
    assert "\n" not in str(raised.value)
    assert torch.equal(rbm.weight, before)


def test_frozen_parameters_stay_and_the_others_learn():
    for name in ("weight", "visible_bias", "hidden_bias"):
        for options in ({}, {"momentum": 0.5, "weight_decay": 0.1}):
            rbm = RBM(6, 4)
            getattr(rbm, name).requires_grad_(False)
            before = copy.deepcopy(rbm.state_dict())
            rbm.fit(patterns(), 2, generator=seeded(), **options)
            assert {key: torch.equal(value, before[key]) for key, value in rbm.state_dict().items()} == {
                key: key == name for key in before
            }
    with pytest.raises(fxopt.UsageError, match="are frozen; call requires_grad_"):
        rbm.requires_grad_(False).fit(patterns())


def test_parameters_that_are_computed_are_not_fitted_in_silence():
    pruned = RBM(6, 4)
    prune.random_unstructured(pruned, "weight", 0.5)
    for rbm in (torch.nn.utils.parametrizations.weight_norm(RBM(6, 4)), pruned):
        with pytest.raises(fxopt.UsageError, match=r"weight is computed from other parameters .* contrastive_loss"):
            rbm.fit(patterns())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_trained_with_draws_of_float32(dtype):
    """A unit that is hardly ever on is not drawn more often, and small steps are not lost."""
    data, found = patterns().to(dtype), []
    for each in (dtype, torch.float32):
        rbm = RBM(6, 4, dtype=each)
        torch.nn.init.constant_(rbm.weight, 0.125)
        found.append(rbm.fit(data, 3, learning_rate=1e-3, persistent=True, generator=seeded()))
    for one, other in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.equal(one, other.to(dtype))


def test_a_generator_of_batches_is_over_after_one_epoch():
    with pytest.raises(fxopt.InputError, match="runs once only"):
        RBM(6, 4).fit((batch for batch in patterns().split(10)), 2)


def test_what_ddp_replicated_is_not_trained_by_each_process_alone() -> None:
    rbm = RBM(6, 4)
    replica = Replica(rbm.named_parameters())
    with pytest.raises(fxopt.UsageError, match="weight is one of a replica of ddp"):
        rbm.fit(torch.ones(8, 6), epochs=1, progress=False)
    assert replica.syncs
