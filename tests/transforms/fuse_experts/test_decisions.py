"""fuse_experts and what a loop does that its example does not show: it is refused by name."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixtures import EXPERTS, WIDTH, Plain
from torch import Tensor, nn

import fxopt
from fxopt.transforms.fuse_experts import find


class Loop(nn.Module):
    """The loop as it is written most often; what is odd is up to who derives from it."""

    def __init__(self, expert: Callable[[], nn.Module] = Plain) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def rows(self, chosen: Tensor, number: int) -> tuple[Tensor, Tensor]:
        return torch.where(chosen == number)

    def stops(self, rows: Tensor) -> bool:
        return False

    def one(self, number: int, given: Tensor) -> Tensor:
        return self.experts[number](given)

    def left(self, y: Tensor, weights: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number in range(EXPERTS):
            rows, nth = self.rows(chosen, number)
            if rows.numel() == 0:
                continue
            if self.stops(rows):
                break
            y.index_add_(0, rows, weights[rows, nth, None] * self.one(number, x[rows]))
        return self.left(y, weights)


class Loss(Loop):
    """A loss of which the next call reads what the last one left."""

    aux_loss: Tensor | None = None

    def left(self, y: Tensor, weights: Tensor) -> Tensor:
        before = 0.0 if self.aux_loss is None else self.aux_loss.detach()
        self.aux_loss = weights.mean() + before
        return y


class Config(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(aux=None)

    def left(self, y: Tensor, weights: Tensor) -> Tensor:
        self.config.aux = weights.mean()
        return y


class Counting(Plain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Listing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x)


class Capacity(Loop):
    def rows(self, chosen: Tensor, number: int) -> tuple[Tensor, Tensor]:
        rows, nth = torch.where(chosen == number)
        return (rows[:40], nth[:40]) if rows.numel() > 40 else (rows, nth)


class Cut(Loop):
    def rows(self, chosen: Tensor, number: int) -> tuple[Tensor, Tensor]:
        rows, nth = torch.where(chosen == number)
        return rows[:40], nth[:40]


class Stopping(Loop):
    def stops(self, rows: Tensor) -> bool:
        return bool(rows.numel() >= 40)


class StoppingWhenFull(Loop):
    def stops(self, rows: Tensor) -> bool:
        return bool(rows.numel() >= 20)


class NoneWhenFull(Loop):
    def one(self, number: int, given: Tensor) -> Tensor:
        out = super().one(number, given)
        return out * 0 if len(given) > 20 else out


class Last(Loop):
    def rows(self, chosen: Tensor, number: int) -> tuple[Tensor, Tensor]:
        rows, nth = torch.where(chosen == number)
        return rows[-10:], nth[-10:]


class TwoCapacities(Loop):
    def rows(self, chosen: Tensor, number: int) -> tuple[Tensor, Tensor]:
        rows, nth = torch.where(chosen == number)
        limit = 10 if number else 12
        return rows[:limit], nth[:limit]


class PassingOn(Loop):
    """Tokens beyond the capacity stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).softmax(-1).max(-1)
        lists, y, left = [(chosen == number).nonzero()[:, 0] for number in range(EXPERTS)], torch.zeros_like(x), []
        for number, rows in enumerate(lists):
            if len(rows) > 6:
                left.append(rows[6:])
                lists[number] = rows[:6]
        for number, rows in enumerate(lists):
            y[rows, :] = self.one(number, x[rows, :])
        if left:
            y[torch.cat(left), :] = x[torch.cat(left), :]
        return y * best.unsqueeze(-1)


class ByToken(Loop):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        tokens = [
            sum((weights[t, j] * self.one(int(chosen[t, j]), x[t]) for j in range(2)), torch.zeros(WIDTH))
            for t in range(len(x))
        ]
        return torch.stack(tokens)


class OneHot(Loop):
    """Tokens go to experts, and come back, by products with one-hot tensors (GShard)."""

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).softmax(-1).max(-1)
        limit, mask = len(x) // 2, nn.functional.one_hot(chosen, EXPERTS)
        place = (mask.cumsum(0) * mask).sum(-1) - 1
        kept = nn.functional.one_hot(place.clamp(max=limit), limit + 1)[:, :limit]
        dispatch = (mask.unsqueeze(-1) * kept.unsqueeze(1)).to(x.dtype)
        given = torch.einsum("sec,sd->ecd", dispatch, x)
        out = torch.stack([self.one(number, given[number]) for number in range(EXPERTS)])
        return torch.einsum("sec,ecd->sd", dispatch * best[:, None, None], out)


class Clamped(Loop):
    def one(self, number: int, given: Tensor) -> Tensor:
        out = super().one(number, given)
        return out if torch.isfinite(out).all() else torch.nan_to_num(out)


class ByType(Loop):
    def one(self, number: int, given: Tensor) -> Tensor:
        out = super().one(number, given)
        return out.clamp(-0.01, 0.01) if out.dtype == torch.bfloat16 else out


class Rare(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.gate.bias.data[3] = -30.0

    def one(self, number: int, given: Tensor) -> Tensor:
        return super().one(number, given) * (2 if number == 3 else 1)


class EndingEarly(Loop):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for number in range(EXPERTS):
            rows, nth = torch.where(chosen == number)
            if rows.numel() == 0:
                break
            y.index_add_(0, rows, weights[rows, nth, None] * self.one(number, x[rows]))
        return y


class Averaging(Loop):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y, used = torch.zeros_like(x), 0
        for number in range(EXPERTS):
            rows, nth = torch.where(chosen == number)
            if rows.numel() > 0:
                y.index_add_(0, rows, weights[rows, nth, None] * self.one(number, x[rows]))
                used += 1
        return y / used


class Sorted(Loop):
    """Tokens sorted by expert, cut by counts, and joined, as in the code that DeepSeek gives with its models."""

    def counts(self, chosen: Tensor) -> Any:
        return torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort()
        rows, outputs, start = x[order // 2], list[Tensor](), 0
        for number, count in enumerate(self.counts(chosen)):
            if count:
                outputs.append(self.one(number, rows[start : start + count]))
                start += count
        joined = torch.cat(outputs)
        back = torch.empty_like(joined)
        back[order] = joined
        return (back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


class SortedInNumpy(Sorted):
    def counts(self, chosen: Tensor) -> Any:
        return torch.bincount(chosen.flatten(), minlength=EXPERTS).numpy()


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attribute": (Loss, "its attributes are set while the model runs"),
    "object": (Config, "it changes Config.config"),
    "counter": (lambda: Loop(Counting), "its attributes are set while the model runs"),
    "list": (lambda: Loop(Listing), "it changes Listing.seen"),
    "capacity": (Capacity, "a capacity that no call of as many tokens as the examples' fills"),
    "cut": (Cut, "a capacity that no call of as many tokens as the examples' fills"),
    "break": (Stopping, "a capacity that no call of as many tokens as the examples' fills"),
    "break when full": (StoppingWhenFull, "does more with the tokens beyond an expert's capacity"),
    "none when full": (NoneWhenFull, "does more with the tokens beyond an expert's capacity"),
    "last": (Last, "some of the tokens that an expert gets, and not the first"),
    "two capacities": (TwoCapacities, "several capacities"),
    "passed on": (PassingOn, "some of the tokens that an expert gets, and not the first"),
    "values": (Clamped, "decides by"),
    "type": (ByType, "decides by the type or shape"),
    "rare": (Rare, "do not all compute the same"),
    "ending": (EndingEarly, "its loop breaks, or takes another path, at an expert without tokens"),
    "averaging": (Averaging, "uses the number of experts with tokens"),
    "sorted": (Sorted, "sorted by expert, cut by counts, and joined"),
    "by token": (ByToken, "one by one"),
    "one-hot": (OneHot, "products with one-hot tensors"),
    "numpy": (SortedInNumpy, "turns a tensor into a numpy array"),
}


@pytest.mark.parametrize("case", ODD)
def test_what_other_tokens_would_show_is_refused(case: str) -> None:
    build, reason = ODD[case]
    torch.manual_seed(3)
    model = build().eval()
    x = torch.randn(24, WIDTH)
    fast = fxopt.optimize(model, "fuse_experts{lowering=padded}", example_inputs=(x,), measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.status == "refused" and reason in str(decision.reason), decision


def test_an_expert_that_no_example_reaches_is_read_all_the_same() -> None:
    torch.manual_seed(3)
    model = Loop().eval()
    model.gate.bias.data[3] = -30.0
    fast = fxopt.optimize(
        model, "fuse_experts{lowering=padded}", example_inputs=(torch.randn(24, WIDTH),), measure=False
    )
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"]
    for each in (model, fast):
        each.gate.bias.data[3] = 5.0
    x = torch.randn(9, WIDTH)
    torch.testing.assert_close(fast(x), model(x))


def test_experts_are_sealed_whole() -> None:
    torch.manual_seed(3)
    model = Loop(lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(), nn.Linear(8, WIDTH))).eval()
    x = torch.randn(24, WIDTH)
    fast = fxopt.optimize(model, "fuse_experts{lowering=padded}", example_inputs=(x,), measure=False)
    for path in ("experts", "experts.1", "experts.1.0", "experts.1.1"):
        with pytest.raises(fxopt.FusedMemberError):
            fast.get_submodule(path).register_forward_hook(lambda *_: None)
    with pytest.raises(fxopt.FusedMemberError):
        fast.experts[1][1].negative_slope = 5.0
    for path, name in (("", "experts"), ("experts", "1"), ("experts.1", "1")):
        with pytest.raises(fxopt.FusedMemberError, match="would not be called"):
            fast.get_submodule(path)._modules[name] = nn.Identity()
    with pytest.raises(fxopt.FusedMemberError, match="its class cannot be replaced"):
        fast.experts[1][1].__class__ = nn.Tanh
    restored = fxopt.restore(fast)
    assert all(type(module._modules) is dict for module in restored.modules())
    copied = copy.deepcopy(fast)
    with pytest.raises(fxopt.FusedMemberError, match="would not be called"):
        copied.experts._modules["1"] = nn.Identity()
    torch.testing.assert_close(copied(x), model(x))


def test_a_counter_that_nothing_reads_is_no_matter() -> None:
    class Idle(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            y, used, rows_used = torch.zeros_like(x), 0, 0
            for number in range(EXPERTS):
                rows, nth = torch.where(chosen == number)
                if rows.numel() == 0:
                    continue
                y.index_add_(0, rows, weights[rows, nth, None] * self.one(number, x[rows]))
                used, rows_used = used + 1, rows_used + rows.numel()
            return y / rows_used

    torch.manual_seed(3)
    model, x = Idle().eval(), torch.randn(24, WIDTH)
    fast = fxopt.optimize(model, "fuse_experts{lowering=padded}", example_inputs=(x,), measure=False)
    assert [d.status for d in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast(x[:3]), model(x[:3]))


def test_a_pruned_model_is_fused() -> None:
    model, x = Loop().eval(), torch.randn(24, WIDTH)
    pruned = fxopt.optimize(model, "prune{amount=0.5}", example_inputs=(x,), measure=False)
    fast = fxopt.optimize(pruned, "fuse_experts{lowering=padded}", example_inputs=(x,), measure=False)
    torch.testing.assert_close(fast(x), pruned(x))


class Positions(nn.Module):
    """Adds what vision transformers have for each place, or for each head, in a tensor of three dimensions."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions


@pytest.mark.parametrize("shape", [(1, 5, 8), (2, 1, 1)])
def test_positions_are_no_stack_of_experts_to_be_looked_at(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "unrolling", pytest.fail)
    program = fxopt.capture(nn.Sequential(Positions(*shape), nn.Linear(8, 8)).eval(), (torch.randn(2, 5, 8),))
    assert list(find.find_mixtures(program)) == []
