"""Which experts tokens go to, what these count, and the losses of routers."""

from __future__ import annotations

import pytest
import torch

from fxopt.errors import UsageError
from fxopt.layers import load_balancing_loss, router_z_loss
from fxopt.layers.moe import Router


def test_softmax_before_and_after_the_choice():
    x, router = torch.randn(5, 8), Router(8, 6, 2, normalize=False)
    logits, indices, weights = router(x)
    probabilities = logits.softmax(-1)
    torch.testing.assert_close(logits, x @ router.weight.t())
    torch.testing.assert_close(weights, probabilities.gather(1, indices))
    assert torch.equal(indices, probabilities.topk(2).indices)
    router.normalize = True
    torch.testing.assert_close(router(x)[2], weights / weights.sum(1, keepdim=True))


def test_sigmoid_scores_each_expert_by_itself():
    x, router = torch.randn(5, 8), Router(8, 6, 3, "sigmoid", normalize=False)
    logits, indices, weights = router(x)
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, indices))
    router.normalize = True
    output = router.output(*router(x))
    torch.testing.assert_close(output.weights, weights / weights.sum(1, keepdim=True))
    torch.testing.assert_close(output.probabilities.sum(1), torch.ones(5))


def test_sigmoids_that_underflow_are_normalized_all_the_same():
    router = Router(2, 6, 3, "sigmoid")
    router.weight.data.copy_(torch.stack([torch.linspace(-160, -92.8, 6), torch.linspace(-7, 8, 6)], 1))
    logits, indices, weights = routed = router(torch.eye(2))
    exact = logits.double().sigmoid().gather(1, indices)
    torch.testing.assert_close(weights.double(), exact / exact.sum(1, keepdim=True), rtol=1e-5, atol=1e-30)
    output = router.output(*routed)
    assert all(value.isfinite().all() for value in output)
    output.load_balancing_loss.backward()
    assert router.weight.grad.isfinite().all()


def test_noise_is_drawn_in_training_only_and_its_scale_learns():
    x, router = torch.randn(5, 8), Router(8, 6, 2, "noisy_topk")
    torch.nn.init.normal_(router.noise_weight)
    clean = x @ router.weight.t()
    torch.testing.assert_close(router.eval()(x)[0], clean)
    router.train()
    torch.manual_seed(0)
    noisy = router(x)[0]
    torch.manual_seed(0)
    scale = torch.nn.functional.softplus(x @ router.noise_weight.t())
    torch.testing.assert_close(noisy, clean + torch.randn(5, 6) * scale)
    router(x)[2][:, 0].sum().backward()
    assert router.noise_weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_computes_in_float32_at_least(dtype):
    router = Router(8, 6, 2, dtype=dtype)
    logits, _, weights = router(torch.randn(5, 8, dtype=dtype))
    assert logits.dtype == weights.dtype == torch.promote_types(dtype, torch.float32)


def test_a_full_expert_counts_nothing_for_what_comes_later():
    """All first choices come before all second ones; earlier tokens before later ones."""
    router = Router(3, 3, 2, normalize=False, capacity_factor=0.75)  # 4 tokens, 8 choices, 3 experts: 2 for each
    router.weight.data.copy_(torch.eye(3))
    x = torch.tensor([[3.0, 2.0, 1.0], [2.0, 3.0, 1.0], [3.0, 2.0, 1.0], [3.0, 1.0, 2.0]])
    _, indices, weights = router(x)
    assert indices.tolist() == [[0, 1], [1, 0], [0, 1], [0, 2]]
    assert (weights > 0).tolist() == [[True, True], [True, False], [True, False], [False, True]]
    router.capacity_factor = None
    kept = weights > 0
    torch.testing.assert_close(weights[kept], router(x)[2][kept])


def test_balance_is_one_where_experts_are_used_alike_and_their_number_where_one_is():
    alike, one = torch.full((6, 3), 1 / 3), torch.tensor([[1.0, 0.0, 0.0]] * 6)
    indices = torch.tensor([[0, 1], [1, 2], [2, 0]] * 2)
    torch.testing.assert_close(load_balancing_loss(alike, indices, 3), torch.tensor(1.0))
    torch.testing.assert_close(load_balancing_loss(one, torch.zeros(6, 1, dtype=torch.long), 3), torch.tensor(3.0))


def test_balance_is_equation_4_of_switch():
    torch.manual_seed(0)
    probabilities = torch.randn(20, 5).softmax(-1).requires_grad_()
    indices = probabilities.argmax(-1, keepdim=True)
    f = [(indices == e).float().mean() for e in range(5)]
    expected = 5 * sum(f[e] * probabilities[:, e].mean() for e in range(5))
    loss = load_balancing_loss(probabilities, indices, 5)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, probabilities)[0], torch.stack(f).expand(20, 5) * 5 / 20)


def test_z_loss_is_equation_5_of_st_moe():
    logits = torch.randn(7, 4)
    expected = sum(torch.log(row.exp().sum()) ** 2 for row in logits) / 7
    torch.testing.assert_close(router_z_loss(logits), expected)
    assert router_z_loss(torch.randn(0, 4)) == 0


def test_more_experts_than_there_are_is_one_clear_line():
    router = Router(8, 4, 2)
    router.top_k = 5
    with pytest.raises(UsageError, match="top_k=5 of 4 experts; give at most so many"):
        router(torch.randn(3, 8))
