"""Random numbers from a counter: which, how they are spread, and what they depend on."""

from __future__ import annotations

import numpy as np
import torch

from fxopt.cuda_ops import bernoulli_sigmoid
from fxopt.cuda_ops.philox import uniform


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Return a block of Philox 4x64-10, as the paper defines it."""
    words, mask = [counter, 0, 0, 0], 2**64 - 1
    for turn in range(10):
        first, second = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        keys = [(key[0] + turn * 0x9E3779B97F4A7C15) & mask, (key[1] + turn * 0xBB67AE8584CAA73B) & mask]
        words = [second >> 64 ^ words[1] ^ keys[0], second & mask, first >> 64 ^ words[3] ^ keys[1], first & mask]
    return words


def test_numbers_are_those_of_the_paper():
    for key in ((5, 9), (2**63 - 1, 1 << 40)):
        halves = [half for block in (1, 2) for word in philox(block, key) for half in (word & (2**32 - 1), word >> 32)]
        assert uniform((16,), torch.tensor(key)).tolist() == [((half >> 8) ^ 2**23) * 2.0**-24 for half in halves]


def test_numbers_are_the_upper_bits_of_halves_of_words():
    words = np.random.Philox(key=np.array([5, 9], np.uint64)).random_raw(3)
    halves = np.array([half for word in words for half in (word & (2**32 - 1), word >> 32)], np.int64)
    expected = (((halves >> 8) ^ 2**23) * 2.0**-24).tolist()
    for _ in range(2):
        assert uniform((2, 3), torch.tensor([5, 9])).flatten().tolist() == expected


def test_numbers_are_uniform_and_below_one():
    drawn = uniform((100_001,), torch.tensor([5, 0]))
    assert drawn.shape == (100_001,)
    assert 0 <= drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    deciles = torch.histc(drawn, 10, 0, 1)
    assert (deciles - 10_000).abs().max() < 5 * 95  # five standard deviations of a decile's count


def test_samples_have_their_probabilities():
    x = torch.linspace(-3, 3, 7).repeat(20_000, 1)
    probability, sample = bernoulli_sigmoid(x, seed=1)
    torch.testing.assert_close(probability, x.sigmoid())
    assert set(sample.unique().tolist()) == {0.0, 1.0}
    assert (sample.mean(0) - probability[0]).abs().max() < 5 * 0.5 / 20_000**0.5


def test_seed_and_offset_decide():
    x = torch.zeros(1000)
    first = bernoulli_sigmoid(x, seed=-1, offset=2)[1]
    assert torch.equal(first, bernoulli_sigmoid(x, seed=torch.tensor([-1, 2]))[1])
    for seed, offset in ((-1, 3), (2, -1), (0, 2)):
        assert (first != bernoulli_sigmoid(x, seed=seed, offset=offset)[1]).float().mean() > 0.4


def test_an_element_is_drawn_by_its_place_alone():
    assert torch.equal(uniform((7, 13), torch.tensor([1, 1])).flatten(), uniform((1000,), torch.tensor([1, 1]))[:91])


def test_without_a_seed_torch_decides():
    x = torch.zeros(1000)
    torch.manual_seed(4)
    first, second = bernoulli_sigmoid(x)[1], bernoulli_sigmoid(x)[1]
    torch.manual_seed(4)
    assert torch.equal(first, bernoulli_sigmoid(x)[1])
    assert not torch.equal(first, second)


def test_every_dtype_draws_alike():
    x = torch.linspace(-4, 4, 4096)
    samples = [bernoulli_sigmoid(x.to(dtype), seed=3)[1].double() for dtype in (torch.float32, torch.float64)]
    assert (samples[0] != samples[1]).sum() <= 1


def test_no_gradient_flows_through_the_sample():
    x = torch.zeros(4, requires_grad=True)
    probability, sample = bernoulli_sigmoid(x, seed=0)
    assert (probability.requires_grad, sample.requires_grad) == (True, False)
