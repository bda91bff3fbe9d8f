"""fuse_experts and other forms of mixtures than the loop with one addition for each expert."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import EXPERTS, HIDDEN, WIDTH, Mixture, Plain
from torch import Tensor, nn

import fxopt


class Loss(Mixture):
    """The load-balancing loss is left on the module."""

    def forward(self, x: Tensor) -> Tensor:
        probabilities = F.softmax(self.gate(x), -1)
        weights, chosen = probabilities.topk(self.k, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            y.index_add_(0, rows, weights[rows, nth, None] * expert(x[rows]))
        share = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        self.aux_loss = EXPERTS * (share * probabilities.mean(0)).sum()
        return y


class LossInBuffer(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("aux_loss", torch.zeros(()), persistent=False)


class Capacity(Mixture):
    """Experts that are full leave out later tokens; masks of each, as in makeMoE."""

    def limit(self, tokens: int) -> int:
        return math.ceil(tokens * self.k / EXPERTS * 0.75)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        best, chosen = logits.topk(self.k, -1)
        scores = torch.full_like(logits, float("-inf")).scatter(-1, chosen, best).softmax(-1)
        y, limit = torch.zeros_like(x), self.limit(x.shape[0])
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero((chosen == number).any(-1)).squeeze(-1)
            kept = rows[:limit] if rows.numel() > limit else rows
            if kept.numel() > 0:
                y.index_add_(0, kept, expert(x[kept]) * scores[kept, number].unsqueeze(1))
        return y


class CapacityOfInt(Capacity):
    def limit(self, tokens: int) -> int:
        return int(tokens * self.k / EXPERTS * 0.75)


class CapacityByChoice(Capacity):
    """First choices come before all second ones."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        y, limit = torch.zeros_like(x), self.limit(x.shape[0])
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            nth, rows = torch.where(mask[number])
            nth, rows = nth[:limit], rows[:limit]
            y.index_add_(0, rows, expert(x[rows]) * weights[rows, nth, None])
        return y


class ExpertChoice(Mixture):
    """Each expert takes the tokens that it scores highest (Zhou et al. 2022)."""

    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = F.softmax(self.gate(x), -1).t().topk(math.ceil(x.shape[0] * self.k / EXPERTS), -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y.index_add_(0, tokens[number], expert(x[tokens[number]]) * weights[number].unsqueeze(-1))
        return y


class ExpertChoiceOfFew(Mixture):
    """Of few tokens no expert takes any: the result still carries gradients."""

    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = F.softmax(self.gate(x), -1).t().topk(len(x) // 6, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y.index_add_(0, tokens[number], expert(x[tokens[number]]) * weights[number].unsqueeze(-1))
        return y


class ExpertChoiceByColumn(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = F.softmax(self.gate(x), -1).topk(max(1, x.shape[0] // 2), 0)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y[tokens[:, number]] += expert(x[tokens[:, number]]) * weights[:, number, None]
        return y


class Unbound(nn.Module):
    """Stacked parameters, cut once."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *s) / 4) for s in ((HIDDEN, WIDTH), (WIDTH, HIDDEN)))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.softmax(self.gate(x), -1).topk(2, -1)
        y = torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.up.unbind(0), torch.unbind(self.down), strict=True)):
            rows, nth = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            y.index_add_(0, rows, F.linear(F.silu(F.linear(x[rows], up)), down) * weights[rows, nth, None])
        return y


class ListsOfRows(Mixture):
    """The rows of each expert in a list, results assigned, weights behind (Switch Transformers)."""

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = F.softmax(self.gate(x), -1).max(-1)
        rows = [torch.eq(chosen, number).nonzero(as_tuple=True)[0] for number in range(EXPERTS)]
        outputs = [expert(x[rows[number], :]) for number, expert in enumerate(self.experts)]
        y = x.new_zeros(x.shape)
        for number in range(EXPERTS):
            y[rows[number], :] = outputs[number]
        return y * best.view(-1, 1)


class ListsInPython(Mixture):
    """Lists of tokens that Python makes."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        lists: list[list[tuple[int, int]]] = [[] for _ in range(EXPERTS)]
        for token, own in enumerate(chosen.tolist()):
            for nth, number in enumerate(own):
                lists[number].append((token, nth))
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if lists[number]:
                rows, nth = torch.tensor([t for t, _ in lists[number]]), torch.tensor([j for _, j in lists[number]])
                y[rows] += weights[rows, nth, None] * expert(x[rows])
        return y


class Dispatcher:
    """Tokens sorted by expert and split by counts, results joined and added at once (Shazeer et al. 2017)."""

    def __init__(self, gates: Tensor) -> None:
        order, places = torch.nonzero(gates).sort(0)
        self.gates, self.experts = gates, order[:, 1:]
        self.rows = torch.nonzero(gates)[places[:, 1], 0]
        self.sizes = (gates > 0).sum(0).tolist()

    def dispatch(self, x: Tensor) -> Any:
        return torch.split(x[self.rows].squeeze(1), self.sizes, dim=0)

    def combine(self, outputs: list[Tensor]) -> Tensor:
        joined = torch.cat(outputs, 0).mul(torch.gather(self.gates[self.rows.flatten()], 1, self.experts))
        zeros = torch.zeros(self.gates.size(0), outputs[-1].size(1), device=joined.device)
        return zeros.index_add(0, self.rows, joined.float())


class Dispatched(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        best, chosen = logits.topk(self.k, -1)
        dispatcher = Dispatcher(torch.zeros_like(logits).scatter(1, chosen, best.softmax(-1)))
        given = dispatcher.dispatch(x)
        return dispatcher.combine([self.experts[number](given[number]) for number in range(EXPERTS)])


class Switch(Mixture):
    """One expert for each token; results take the place of what `start` gives, and full experts leave tokens out."""

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def limit(self, tokens: int) -> int | None:
        return max(1, tokens // EXPERTS)

    def finish(self, x: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
        member = F.one_hot(chosen, EXPERTS)
        place = (member.cumsum(0) * member).sum(-1, keepdim=True)
        return torch.where(place > max(1, len(x) // EXPERTS), x, y)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        y, limit = self.start(x), self.limit(len(x))
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0][:limit]
            y[rows] = weights[rows, None] * expert(x[rows])
        return self.finish(x, y, chosen)


class PassingOn(Switch):
    """Tokens that are left out pass on, as they were there before."""

    def start(self, x: Tensor) -> Tensor:
        return x.clone()

    def finish(self, x: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
        return y


class Replacing(PassingOn):
    """No token is left out, so that nothing of the inputs is left."""

    def limit(self, tokens: int) -> int | None:
        return None


class Copying(Switch):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            y.index_copy_(0, rows, weights[rows, None] * expert(x[rows]))
        return y


FORMS: tuple[type[nn.Module], ...] = (
    Loss, LossInBuffer, Capacity, CapacityOfInt, CapacityByChoice, ExpertChoice, ExpertChoiceOfFew,
    ExpertChoiceByColumn, Unbound, ListsOfRows, ListsInPython, Dispatched, Switch, Replacing, Copying,
)  # fmt: skip


def fused(model: nn.Module, x: Tensor, lowering: str = "padded") -> nn.Module:
    fast = fxopt.optimize(model, f"fuse_experts{{lowering={lowering}}}", example_inputs=(x,), measure=False)
    assert [(d.status, d.reason) for d in fxopt.plan(fast).decisions] == [("applied", "")]
    return fast


def build(form: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return form()


@pytest.mark.filterwarnings("ignore:module '.*' used its original forward")
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients(form: type[nn.Module]) -> None:
    model, x = build(form).train(), torch.randn(24, WIDTH)
    fast = fused(model, x)
    for tokens in (24, 24, 17, 5):
        x = torch.randn(tokens, WIDTH)
        torch.testing.assert_close(fast(x), model(x))
    x = torch.randn(24, WIDTH)
    for each in (model, fast):
        each.zero_grad()
        (each(x).square().sum() + (each.aux_loss if isinstance(model, Loss) else 0)).backward()
    torch.testing.assert_close(fast.gate.weight.grad, model.gate.weight.grad)
    if isinstance(model, Mixture):
        torch.testing.assert_close(fast.experts[2].w1.weight.grad, model.experts[2].w1.weight.grad)
    if isinstance(model, Loss):
        torch.testing.assert_close(fast.aux_loss, model.aux_loss)


@pytest.mark.parametrize("form", [Capacity, CapacityByChoice, ExpertChoice])
@pytest.mark.parametrize("lowering", ["loop", "grouped", "gathered"])
def test_each_lowering(form: type[nn.Module], lowering: str) -> None:
    model, x = build(form).eval(), torch.randn(24, WIDTH)
    fast, x = fused(model, x, lowering), torch.randn(13, WIDTH)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("form", [Capacity, CapacityByChoice, ExpertChoice])
def test_exported(form: type[nn.Module]) -> None:
    model, x = build(form).eval(), torch.randn(24, WIDTH)
    fast = fused(model, x)
    exported = torch.export.export(copy.deepcopy(fast), (x,)).module()
    x = torch.randn(24, WIDTH)
    torch.testing.assert_close(exported(x), model(x))


def test_a_token_that_is_left_out_may_be_infinite() -> None:
    model, x = build(Capacity).eval(), torch.randn(24, WIDTH)
    fast = fused(model, x)
    x[-1] = float("inf")
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)
    assert fast(x)[:-1].isfinite().all()


def test_the_number_of_tokens_stays_free() -> None:
    model = build(Capacity).eval()
    fast, x = fused(model, torch.randn(24, WIDTH)), torch.randn(40, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(x), model(x))


def test_a_capacity_of_int_holds_for_one_number_of_tokens() -> None:
    model = build(CapacityOfInt).eval()
    fast, x = fused(model, torch.randn(24, WIDTH)), torch.randn(40, WIDTH)
    with pytest.warns(fxopt.GuardWarning, match="original forward"):
        torch.testing.assert_close(fast(x), model(x))


def test_experts_of_dropout_and_a_loss_are_held_in_evaluation() -> None:
    class Dropping(Loss):
        def __init__(self) -> None:
            super().__init__(lambda: Plain(0.5))  # type: ignore[arg-type]

    model, x = build(Dropping).eval(), torch.randn(24, WIDTH)
    torch.testing.assert_close(fused(model, x)(x), model(x))


class CutByCounts(Mixture):
    """Tokens sorted by expert, of which a loop takes one piece after another."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x)
        order, y, start = chosen.view(-1).argsort(), torch.zeros_like(x), 0
        for number, count in enumerate(chosen.view(-1).bincount(minlength=EXPERTS).tolist()):
            own = order[start : start + count]
            start += count
            if count:
                y.index_add_(0, own // self.k, self.experts[number](x[own // self.k]) * weights.view(-1)[own, None])
        return y


def test_pieces_of_sorted_tokens_are_refused_with_what_to_write() -> None:
    model, x = build(CutByCounts).eval(), torch.randn(24, WIDTH)
    fast = fxopt.optimize(model, "fuse_experts", example_inputs=(x,), measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "refused" and "torch.split" in decision.reason


class Everyone(Mixture):
    """All tokens go to all experts."""

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return sum(shares[:, number, None] * expert(x) for number, expert in enumerate(self.experts))


class Stacked(Everyone):
    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("be,bed->bd", self.gate(x).softmax(-1), found)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (PassingOn, "take the place of rows of a tensor that is not zeros"),
        (Everyone, "every token goes to every expert; fuse_ensembles computes that"),
        (Stacked, "every token goes to every expert; fuse_ensembles computes that"),
    ],
)
def test_forms_that_are_refused_with_what_to_write(form: type[nn.Module], reason: str) -> None:
    model, x = build(form).eval(), torch.randn(24, WIDTH)
    fast = fxopt.optimize(model, "fuse_experts", example_inputs=(x,), measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "refused" and reason in decision.reason
