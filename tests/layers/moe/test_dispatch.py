"""Every way of applying experts gives what each token by itself gives, with its gradients, for any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxopt.layers.moe import (
    LOWERINGS,
    Projection,
    Task,
    choose_lowering,
    loop_over_experts,
    mixture,
    possible_lowerings,
)

WIDTH, HIDDEN = 16, 24
each_lowering = pytest.mark.parametrize("lowering", LOWERINGS)


def gated(rows: Tensor, linears: Any) -> Tensor:
    gate, up, down = linears
    return down(F.silu(gate(rows)) * up(rows))


def stacked(experts: int, dtype: torch.dtype, *, bias: bool = True, transposed: bool = False) -> list[Projection]:
    def one(inside: int, outside: int) -> Projection:
        shape = (inside, outside) if transposed else (outside, inside)
        weight = (torch.randn(experts, *shape) / inside**0.5).to(dtype).requires_grad_()
        return Projection(
            weight, torch.randn(experts, outside).to(dtype).requires_grad_() if bias else None, transposed
        )

    return [one(WIDTH, HIDDEN), one(WIDTH, HIDDEN), one(HIDDEN, WIDTH)]


def chosen(tokens: int, experts: int, k: int) -> Tensor:
    rows = [torch.randperm(experts)[:k] for _ in range(tokens)]
    return torch.stack(rows) if rows else torch.zeros(0, k, dtype=torch.long)


def by_hand(x: Tensor, indices: Tensor, weights: Tensor, projections: list[Projection]) -> Tensor:
    """Go through the tokens one by one."""
    rows = []
    for token, own, counts in zip(x, indices.tolist(), weights, strict=True):
        row = torch.zeros_like(token)
        for expert, count in zip(own, counts, strict=True):
            linears = [
                lambda r, p=p, e=expert: (
                    (r @ p.weight[e] if p.transposed else r @ p.weight[e].t()) + (0 if p.bias is None else p.bias[e])
                )
                for p in projections
            ]
            row = row + gated(token, linears) * count
        rows.append(row)
    return torch.stack(rows)


def gradients(output: Tensor, x: Tensor, weights: Tensor, projections: list[Projection]) -> list[Tensor]:
    torch.manual_seed(1)
    tensors = [x, weights, *(t for p in projections for t in p[:2] if t is not None)]
    found = torch.autograd.grad(output, tensors, torch.randn_like(output), allow_unused=True)
    assert all(each is not None for each in found)
    return [output, *found]


@each_lowering
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 2), (2, 4, 1), (7, 4, 4), (5, 12, 3), (40, 3, 2)])
def test_a_lowering_gives_what_each_token_by_itself_gives(lowering, transposed, bias, tokens, experts, k):
    torch.manual_seed(0)
    dtype = torch.float32 if lowering == "grouped" else torch.float64
    projections = stacked(experts, dtype, bias=bias, transposed=transposed)
    x, weights = torch.randn(tokens, WIDTH, dtype=dtype), torch.rand(tokens, k, dtype=dtype)
    x.requires_grad_(), weights.requires_grad_()
    indices = chosen(tokens, experts, k)
    output = mixture(x, indices, weights, projections, gated, lowering)
    expected = by_hand(x, indices, weights, projections)
    pairs = zip(gradients(output, x, weights, projections), gradients(expected, x, weights, projections), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 if lowering == "grouped" else 1e-12)


@each_lowering
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 2), (2, 4, 2), (9, 6, 2), (8, 12, 3), (5, 4, 4)])
def test_without_gradients_it_is_the_same(lowering, bias, transposed, tokens, experts, k):
    projections = stacked(experts, torch.float32, bias=bias, transposed=transposed)
    x, weights, indices = torch.randn(tokens, WIDTH), torch.rand(tokens, k), chosen(tokens, experts, k)
    with torch.no_grad():
        output = mixture(x, indices, weights, projections, gated, lowering)
    torch.testing.assert_close(output, by_hand(x, indices, weights, projections).detach())


@each_lowering
def test_an_expert_without_tokens_has_a_gradient_of_zero(lowering):
    projections = stacked(8, torch.float32)
    x, indices = torch.randn(6, WIDTH), torch.tensor([[1, 2]] * 6)
    output = mixture(x, indices, torch.rand(6, 2), projections, gated, lowering)
    output.sum().backward()
    for projection in projections:
        for tensor in projection[:2]:
            assert not tensor.grad[[0, 3, 4, 5, 6, 7]].any()
            assert tensor.grad[1].any()
            assert tensor.grad[2].any()


@each_lowering
@pytest.mark.parametrize("indices", [[[1, 2]] * 6, [[0, 1], [1, 3], [3, 0], [0, 1], [0, 2]]])
def test_a_function_without_a_slope_at_zero_has_the_gradients_of_the_loop(lowering, indices):
    """No row is made up: zeros would give 0 * inf."""

    def rooted(rows: Tensor, linears: Any) -> Tensor:
        return linears[2](linears[0](rows).abs().sqrt())

    torch.manual_seed(0)
    projections = stacked(4, torch.float32, bias=False)
    x, indices = torch.randn(len(indices), WIDTH), torch.tensor(indices)
    weights, found = torch.rand(indices.shape), []
    for each in (lowering, "loop"):
        output = mixture(x, indices, weights, projections, rooted, each)
        found.append(torch.autograd.grad(output.sum(), [projections[0].weight, projections[2].weight]))
    torch.testing.assert_close(*found)


@each_lowering
def test_a_token_that_is_nan_spoils_no_gradient_but_those_of_its_experts(lowering):
    projections = stacked(4, torch.float32)
    x, indices = torch.randn(6, WIDTH), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3], [2, 0], [3, 1]])
    x[2] = float("nan")
    mixture(x, indices, torch.rand(6, 2), projections, gated, lowering).sum().backward()
    assert [grad.isnan().any().item() for grad in projections[0].weight.grad] == [True, True, False, False]


@each_lowering
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", range(4))
def test_a_token_that_is_not_finite_spoils_no_gradient_of_an_idle_expert(lowering, spoiled, token):
    projections = stacked(5, torch.float32)
    x, indices = torch.randn(4, WIDTH), torch.tensor([[1, 3], [3, 1], [1, 3], [3, 1]])
    x[token] = spoiled
    mixture(x, indices, torch.rand(4, 2), projections, gated, lowering).sum().backward()
    for projection in projections:
        for tensor in projection[:2]:
            assert not tensor.grad[[0, 2, 4]].any()


def every_expert(tokens: int, experts: int) -> Tensor:
    return chosen(tokens, experts, experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_many_tokens_that_chose_every_expert_are_not_sorted(dtype, training):
    projections = stacked(4, dtype)
    many, few = (Task(torch.randn(n, WIDTH, dtype=dtype), every_expert(n, 4), projections, gated) for n in (256, 8))
    some = Task(many.x, chosen(256, 4, 2), projections, gated)
    with torch.set_grad_enabled(training):
        assert [choose_lowering(task) == "dense" for task in (many, few, some)] == [True, False, False]
    assert "dense" in possible_lowerings(few)
    assert "dense" not in possible_lowerings(some)


def test_weights_in_16_bits_are_added_up_in_32():
    weights = torch.full((40, 8), 1 / 3, dtype=torch.bfloat16)
    x = torch.ones(40, WIDTH, dtype=torch.bfloat16)
    same = [Projection(torch.eye(WIDTH, dtype=torch.bfloat16).expand(8, -1, -1).contiguous())]
    exact = (8 * weights[0, 0].float()).bfloat16().item()
    for lowering in LOWERINGS:
        output = mixture(x, every_expert(40, 8), weights, same, lambda rows, linears: linears[0](rows), lowering)
        assert output.eq(exact).all(), lowering


@each_lowering
def test_all_tokens_may_choose_the_same_expert(lowering):
    projections = stacked(6, torch.float32)
    x, indices, weights = torch.randn(9, WIDTH), torch.full((9, 1), 5), torch.rand(9, 1)
    expected = by_hand(x, indices, weights, projections)
    torch.testing.assert_close(mixture(x, indices, weights, projections, gated, lowering), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_tokens_give_no_rows_and_gradients_of_zero(dtype):
    projections = stacked(4, dtype)
    x = torch.randn(0, WIDTH, dtype=dtype, requires_grad=True)
    output = mixture(x, chosen(0, 4, 2), torch.rand(0, 2, dtype=dtype), projections, gated)
    assert output.shape == (0, WIDTH)
    output.sum().backward()
    assert not any(tensor.grad.any() for p in projections for tensor in p[:2])


@each_lowering
@pytest.mark.parametrize("tokens", [1, 24])
def test_autocast_computes_in_16_bits_and_trains_the_originals(lowering, tokens):
    projections = stacked(4, torch.float32)
    x, indices, weights = torch.randn(tokens, WIDTH), chosen(tokens, 4, 2), torch.rand(tokens, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output = mixture(x, indices, weights, projections, gated, lowering)
    assert output.dtype == torch.bfloat16
    expected = by_hand(x, indices, weights, projections)
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05 * expected.detach().abs().max().item())
    output.sum().backward()
    assert all(p.weight.grad.dtype == torch.float32 for p in projections)


def test_a_nan_stays_with_its_token():
    projections = stacked(4, torch.float32)
    x, indices, weights = torch.randn(12, WIDTH), chosen(12, 4, 2), torch.rand(12, 2)
    x[3] = float("nan")
    for lowering in LOWERINGS:
        output = mixture(x, indices, weights, projections, gated, lowering)
        assert output.isnan().any(1).tolist() == [token == 3 for token in range(12)]


def test_separate_weights_are_for_the_loop():
    together = stacked(4, torch.float32)
    apart = [Projection([*p.weight], [*p.bias]) for p in together]
    x, indices, weights = torch.randn(12, WIDTH), chosen(12, 4, 2), torch.rand(12, 2)
    task = Task(x, indices, apart, gated)
    assert possible_lowerings(task) == ["loop"]
    assert choose_lowering(task) == "loop"
    torch.testing.assert_close(
        mixture(x, indices, weights, apart, gated), mixture(x, indices, weights, together, gated)
    )


def test_a_lowering_that_is_not_possible_is_not_taken():
    projections = stacked(4, torch.float64)
    x, indices, weights = torch.randn(12, WIDTH).double(), chosen(12, 4, 2), torch.rand(12, 2).double()
    assert "grouped" not in possible_lowerings(Task(x, indices, projections, gated))
    output = mixture(x, indices, weights, projections, gated, "grouped")
    torch.testing.assert_close(output, by_hand(x, indices, weights, projections))


def test_the_loop_calls_no_expert_without_tokens():
    called = []

    def expert(number: int, rows: Tensor) -> Tensor:
        called.append((number, len(rows)))
        return rows * number

    x = torch.ones(3, 2)
    outputs = loop_over_experts(x, torch.tensor([[4, 1], [1, 2], [4, 2]]), 6, expert)
    assert called == [(1, 2), (2, 2), (4, 2)]
    assert outputs[..., 0].tolist() == [[4, 1], [1, 2], [4, 2]]


@pytest.mark.parametrize(
    ("dtype", "width", "may"),
    [(torch.float32, 16, True), (torch.bfloat16, 16, True), (torch.float64, 16, False), (torch.float32, 18, False)],
)
def test_grouped_products_are_taken_only_where_torch_has_them(dtype, width, may):
    projections = [Projection(torch.randn(4, width, width, dtype=dtype))]
    task = Task(
        torch.randn(12, width, dtype=dtype), chosen(12, 4, 2), projections, lambda rows, linears: linears[0](rows)
    )
    assert ("grouped" in possible_lowerings(task)) is may
    assert choose_lowering(task) in possible_lowerings(task)


def test_one_busy_expert_is_not_padded_for():
    projections = stacked(32, torch.float64)
    x = torch.randn(64, WIDTH, dtype=torch.float64)
    assert choose_lowering(Task(x, torch.arange(64).remainder(32)[:, None], projections, gated)) == "padded"
    assert choose_lowering(Task(x, torch.zeros(64, 1, dtype=torch.long), projections, gated)) == "loop"


@pytest.mark.parametrize("training", [False, True])
def test_big_experts_that_are_mostly_idle_are_not_padded_for(training):
    def lowering(tokens: int, width: int) -> str:
        weight = torch.zeros(8, width, width, dtype=torch.bfloat16).requires_grad_(training)
        x = torch.zeros(tokens, width, dtype=torch.bfloat16)
        indices = torch.arange(tokens * 2).remainder(8).view(tokens, 2)
        return choose_lowering(Task(x, indices, [Projection(weight)], lambda rows, linears: linears[0](rows)))

    assert lowering(8, 512) == ("padded" if training else "grouped")
    assert lowering(40, 512) == "padded"
    assert lowering(40, 64) == "padded"


def test_tracing_takes_the_lowering_whose_shapes_need_no_data():
    projections = stacked(8, torch.float32)
    x, indices, weights = torch.randn(12, WIDTH), chosen(12, 8, 2), torch.rand(12, 2)
    traced = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x, indices, weights: mixture(x, indices, weights, projections, gated)
    )(x, indices, weights)
    other = chosen(12, 8, 2)
    torch.testing.assert_close(traced(x, other, weights), mixture(x, other, weights, projections, gated))
