"""Calls are derived from the example: other sizes, signs and magnitudes, identifiers, masks; no gradients; twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.passes.verification import Data, Verdict, reference, smaller, verify
from fxopt.passes.verification.inputs import Asked
from fxopt.passes.verification.inputs.sizes import resized
from fxopt.tracing.examples import Inputs

Function = Callable[..., Any]


class Model(nn.Module):
    """Compute a function of a table, a weight and the arguments."""

    def __init__(self, function: Function, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.table = nn.Parameter(torch.randn(9, 4).to(dtype))
        self.weight = nn.Parameter(torch.randn(4, 4).to(dtype))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def judged(before: Function, after: Function, *args: Tensor, dtype: torch.dtype = torch.float32) -> Verdict:
    one, other = Model(before, dtype), Model(after, dtype)
    return verify(reference(one, [Inputs(*args)]), other)


def rows(number: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(3)).to(dtype)


class Once(torch.autograd.Function):
    """tanh whose slope is a constant to the second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 1 - torch.tanh(x.detach()).square()
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.slope


WRONG: dict[str, tuple[Function, Function]] = {
    "burned in": (lambda m, x: x @ m.weight, lambda m, x: (x @ m.weight)[:4].reshape(4, -1)),
    "one row": (lambda m, x: (x @ m.weight).sum(-1), lambda m, x: (x @ m.weight).sum(-1).squeeze()),
    "large": (lambda m, x: F.relu6(x @ m.weight * 0.1), lambda m, x: F.relu(x @ m.weight * 0.1)),
    "overflow": (lambda m, x: F.softplus(x), lambda m, x: x.exp().log1p()),
    "negative": (lambda m, x: x.abs() @ m.weight, lambda m, x: x.square().sqrt().where(x < 0, x) @ m.weight * x.sign()),
    "zero": (lambda m, x: F.normalize(x), lambda m, x: x / x.norm(dim=-1, keepdim=True)),
    "no_grad": (lambda m, x: x.tanh(), lambda m, x: x.tanh() if torch.is_grad_enabled() else x),
    "inference mode": (lambda m, x: x.tanh(), lambda m, x: x if torch.is_inference_mode_enabled() else x.tanh()),
    "second derivative": (lambda m, x: x.tanh(), lambda m, x: Once.apply(x)),
    "expanded": (lambda m, x: x.mean(0).repeat(len(x), 1), lambda m, x: x.mean(0).expand(len(x), -1)),
    "strides": (lambda m, x: x.tanh(), lambda m, x: x.as_strided(x.shape, (x.shape[1], 1)).tanh()),
    "data of an argument": (lambda m, x: x * 2, lambda m, x: (x * 2, x.data.zero_())[0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_one_example_does_not_show_is_found(name: str) -> None:
    before, after = WRONG[name]
    x = rows().abs() + 0.1 if name == "negative" else 3 * rows()
    assert judged(before, before, x).ok
    assert judged(before, after, x).reason


def test_identifiers_reach_the_whole_table() -> None:
    ids = torch.tensor([[1, 2], [3, 1]])
    verdict = judged(lambda m, i: F.embedding(i, m.table), lambda m, i: F.embedding(i.clamp_max(3), m.table), ids)
    assert Data.ROWS.value in verdict.reason
    verdict = judged(lambda m, i: F.embedding(i, m.table, 0), lambda m, i: F.embedding(i, m.table), ids)
    assert "gradient of table" in verdict.reason


def test_numbers_that_are_sorted_into_groups_keep_their_values() -> None:
    seen: set[int] = set()

    def grouped(m: Any, x: Tensor, group: Tensor) -> Tensor:
        seen.update(group.tolist())
        return x[group.sort()[1]] @ m.weight

    assert judged(grouped, grouped, rows(), torch.tensor([2, 0, 1, 2])).ok
    assert seen == {0, 1, 2}


def test_a_mask_of_nothing_but_true_is_changed() -> None:
    def before(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x.masked_fill(~mask, -1e9), -1)

    verdict = judged(before, lambda m, x, mask: torch.softmax(x, -1), rows(), torch.ones(4, 4, dtype=torch.bool))
    assert not verdict.ok


def test_float64_through_a_narrower_type_is_found() -> None:
    def narrow(m: Any, x: Tensor) -> Tensor:
        return (x.float() @ m.weight.float()).to(x.dtype)

    x = rows(dtype=torch.float64)
    assert judged(lambda m, x: x @ m.weight, lambda m, x: (m.weight.T @ x.T).T, x, dtype=torch.float64).ok
    assert "in its own types" in judged(lambda m, x: x @ m.weight, narrow, x, dtype=torch.float64).reason


def test_an_error_that_goes_one_way_is_found_in_bfloat16() -> None:
    def larger(m: Any, x: Tensor) -> Tensor:
        return x.tanh() * (1.05 if x.dtype is torch.bfloat16 else 1.0)

    x = rows(64, torch.bfloat16)
    verdict = judged(lambda m, x: x.tanh(), larger, x, dtype=torch.bfloat16)
    assert "on average" in verdict.reason
    assert judged(lambda m, x: x.tanh(), lambda m, x: 2 * (2 * x).sigmoid() - 1, x, dtype=torch.bfloat16).ok


@pytest.mark.parametrize("kinds", [(Data.ROWS, Data.SECOND, Data.ZEROS)])
def test_calls_that_the_original_does_not_take_are_left_out(kinds: tuple[Data, ...]) -> None:
    taken = reference(Model(lambda m, x: (m.weight @ x).tanh()), [Inputs(rows())])
    assert {sample.data for sample in taken.samples} >= {Data.RECORDED, Data.NOISY}
    free = reference(Model(lambda m, x: (x @ m.weight).tanh()), [Inputs(rows())])
    assert {sample.data for sample in free.samples} >= set(kinds)
    fixed = reference(Model(lambda m, x: (x.view(4, 4) @ m.weight).log()), [Inputs(rows().abs())])
    assert not {sample.data for sample in fixed.samples} & {Data.ONE_ROW, Data.SECOND}


def test_random_state_is_left_alone() -> None:
    one, other = (Model(lambda m, x: F.dropout(x, 0.5)) for _ in range(2))
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert verify(reference(one, [Inputs(rows())]), other).ok
    assert torch.equal(torch.get_rng_state(), before)


def test_derived_calls_are_small_where_the_module_takes_them() -> None:
    samples = reference(nn.Conv2d(2, 3, 3), [Inputs(torch.randn(16, 2, 40, 40))]).samples
    sizes = {sample.data: sample.arguments[0][0].shape for sample in samples}
    assert sizes[Data.RECORDED] == (16, 2, 40, 40)
    assert sizes[Data.NOISY] == (8, 2, 11, 11)
    assert all(size[2] < 40 for data, size in sizes.items() if data is not Data.RECORDED)


def test_a_module_of_one_size_has_noise_on_the_whole_call() -> None:
    model = nn.Sequential(nn.Flatten(1), nn.Linear(2 * 40, 3))
    samples = reference(model, [Inputs(torch.randn(4, 2, 40))]).samples
    assert {sample.arguments[0][0].shape[1:] for sample in samples} == {(2, 40)}


def test_results_of_a_run_stay_what_they_were_when_a_later_one_writes() -> None:
    model = nn.BatchNorm1d(4)
    taken = reference(model, [Inputs(torch.randn(6, 4)), Inputs(torch.randn(6, 4))], training=True)
    assert verify(taken, model).ok


def test_what_errs_only_above_its_examples_rows_is_found() -> None:
    def wrong(m: Any, x: Tensor) -> Tensor:
        return x @ m.weight if x.numel() // 4 <= 64 else torch.cat([x[:64] @ m.weight, x[64:]])

    assert "without gradients, call" in judged(lambda m, x: x @ m.weight, wrong, rows(20)).reason
    assert judged(lambda m, x: x @ m.weight, lambda m, x: (m.weight.T @ x.T).T, rows(20)).ok


def test_many_rows_are_more_than_the_example_has_of_rows_and_numbers() -> None:
    class Seen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(x.shape)
            return x.tanh()

    for shape in ((16, 40, 30), (2, 8), (1, 500, 64)):
        sizes = list[torch.Size]()
        reference(Seen(), [Inputs(torch.randn(shape))])
        assert any(size[0] >= 2 * shape[0] and size.numel() >= 2 * torch.Size(shape).numel() for size in sizes)


def test_integers_stay_within_the_values_of_the_example() -> None:
    def loop(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
        return sum(torch.where((chosen == number).unsqueeze(-1), x * m.table[number], 0.0) for number in range(4))

    chosen = torch.tensor([1, 3, 2, 1])
    assert judged(loop, lambda m, x, chosen: x * m.table[:4][chosen], rows(), chosen).ok
    assert not judged(loop, lambda m, x, chosen: x * m.table[torch.tensor([1, 3, 2, 1])], rows(), chosen).ok


def test_a_call_on_which_the_original_raises_is_not_held_against_a_rewrite() -> None:
    def checked(m: Any, x: Tensor) -> Tensor:
        if len(x) > 4 or bool((x.abs() > 50).any()):
            raise ValueError("not that many, and not that large")
        return x @ m.weight

    def narrow(m: Any, x: Tensor) -> Tensor:
        if len(x) > 4 or bool((x.abs() > 50).any()):
            raise RuntimeError("no block is large enough")
        return (m.weight.T @ x.T).T

    assert judged(checked, narrow, rows()).ok


def test_a_mask_of_integers_is_changed() -> None:
    def before(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x.masked_fill(mask == 0, -1e9), -1)

    mask = torch.ones(4, 4, dtype=torch.int64)
    assert not judged(before, lambda m, x, mask: torch.softmax(x, -1), rows(), mask).ok


def test_a_gradient_that_errs_only_above_its_examples_rows_is_found() -> None:
    class Slope(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * (1.1 if len(gradient) > 8 else 1.0)

    verdict = judged(lambda m, x: (x @ m.weight).tanh(), lambda m, x: Slope.apply(x @ m.weight).tanh(), rows(8))
    assert "gradient" in verdict.reason and Data.LARGER.value in verdict.reason


@pytest.mark.parametrize("shape", [(4, 8), (8, 40)])
def test_what_errs_only_above_its_examples_length_is_found(shape: tuple[int, int]) -> None:
    def wrong(m: Any, ids: Tensor) -> Tensor:
        return F.embedding(ids, m.table) * (1.1 if ids.shape[1] > shape[1] else 1.0)

    ids = torch.arange(shape[0] * shape[1]).view(shape) % 9
    assert not judged(lambda m, ids: F.embedding(ids, m.table), wrong, ids).ok


def test_longer_calls_in_own_types_are_made_of_large_examples() -> None:
    def wrong(m: Any, x: Tensor) -> Tensor:
        return x @ m.weight * (1.1 if x.dim() > 2 and x.shape[1] > 1200 else 1.0)

    assert "without gradients, call" in judged(lambda m, x: x @ m.weight, wrong, torch.randn(8, 1200, 4)).reason


ORDINARY = {
    "nan_to_num": lambda x: x.nan_to_num(),
    "where": lambda x: torch.where(x.isnan(), 0.0, x),
    "infinity": lambda x: x.clamp(-1e30, 1e30),
    "spread": lambda x: x + 0 * x.sum(0),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_not_finite_stays_so_and_in_its_rows(name: str) -> None:
    make: Function = ORDINARY[name]
    verdict = judged(lambda m, x: x @ m.weight, lambda m, x: make(x) @ m.weight, rows())
    assert "not finite" in verdict.reason


@pytest.mark.parametrize("hiding", range(3))
def test_what_is_not_finite_stays_so_in_every_argument(hiding: int) -> None:
    def hides(m: Any, *args: Tensor) -> Tensor:
        return sum((x.nan_to_num() if n == hiding else x for n, x in enumerate(args)), start=torch.zeros(4))

    verdict = judged(lambda m, *args: sum(args, start=torch.zeros(4)), hides, rows(), rows(), rows())
    assert "hides what is not finite" in verdict.reason


def test_an_original_that_stops_at_nan_is_compared_on_all_other_calls() -> None:
    def checked(m: Any, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ValueError("NaN")
        return x @ m.weight

    taken = reference(Model(checked), [Inputs(rows())])
    asked = {call.asked for call, _ in taken.served}
    assert Asked.FINITE in asked and Asked.NOT_FINITE not in asked
    assert judged(checked, lambda m, x: x.nan_to_num() @ m.weight, rows()).ok


def test_a_smaller_call_of_a_graph_has_edges_among_its_first_nodes() -> None:
    x, edges, attributes, kinds = (
        torch.randn(200, 4),
        torch.randint(200, (2, 900)),
        torch.randn(900, 3),
        torch.arange(200) % 7,
    )
    (few, among, of_edges, of_nodes), _ = next(iter(smaller(((x, edges, attributes, kinds), {}))))
    assert [tuple(each.shape) for each in (few, among, of_edges, of_nodes)] == [(64, 4), (2, 288), (288, 3), (64,)]
    assert torch.equal(few, x[:64]) and torch.equal(among, edges[:, :288] % 64)


def test_no_edge_of_a_derived_call_joins_two_graphs() -> None:
    batch = torch.arange(20).repeat_interleave(10)
    edges = torch.randint(10, (2, 900)) + torch.arange(900) % 20 * 10
    graphs = (torch.randn(200, 4), edges, torch.randn(900, 3), batch), {}
    few = next(iter(smaller(graphs)))
    for (x, among, of_edges, graph), _ in (few, resized(few, {0: {60: 61}}), resized(graphs, {0: {200: 201}})):
        assert len(x) == len(graph) and among.shape[1] == len(of_edges) > 0
        assert torch.equal(graph[among[0]], graph[among[1]]) and bool((graph[1:] >= graph[:-1]).all())


def test_a_smaller_call_of_a_batch_of_graphs_has_whole_ones() -> None:
    batch = torch.arange(8).repeat_interleave(torch.tensor([20, 30, 25, 40, 10, 20, 30, 25]))
    edges = torch.combinations(torch.arange(200)).t()
    edges = edges[:, batch[edges[0]] == batch[edges[1]]]
    (x, among, graph), _ = next(iter(smaller(((torch.randn(200, 4), edges.flip(1), batch), {}))))
    assert graph.bincount().tolist() == [20, 30] and len(x) == 50
    assert sorted(among.t().tolist()) == sorted(edges[:, (edges < 50).all(0)].t().tolist())


def test_pairs_of_numbers_that_name_no_rows_are_no_edges() -> None:
    (few, pairs), _ = next(iter(smaller(((torch.randn(200, 4), torch.full((2, 900), 200)), {}))))
    assert len(few) == 8 and pairs.shape == (2, 900)


def test_of_images_there_is_a_smaller_call_that_can_be_halved_often() -> None:
    sizes = [image.shape[2:] for (image,), _ in smaller(((torch.randn(1, 3, 256, 224),), {}))]
    assert sizes == [(65, 57), (64, 32), (256, 224)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("masked", [lambda mask: mask == 0, lambda mask: mask < 0.5, lambda mask: ~mask.bool()])
def test_masks_of_numbers_are_changed(dtype: torch.dtype, masked: Function) -> None:
    def before(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x.masked_fill(masked(mask), -1e9), -1)

    assert not judged(before, lambda m, x, mask: torch.softmax(x, -1), rows(), torch.ones(4, 4, dtype=dtype)).ok
    assert judged(before, before, rows(), torch.ones(4, 4, dtype=dtype)).ok


def test_a_mask_of_one_place_is_turned():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, flag):
            return torch.where(flag, self.linear(x), x)

    x, model = torch.randn(3, 4), Gated()
    fast = fxopt.optimize(model, "eliminate_dead_code", example_inputs=(x, torch.tensor(True)), measure=False)
    for flag in (torch.tensor(True), torch.tensor(False)):
        assert torch.equal(fast(x, flag), model(x, flag))
