"""fuse_experts and what a loop does that its example does not show: it is refused by name."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch
from mixtures import EXPERTS, WIDTH, Plain
from torch import Tensor, nn

import fxopt


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
    aux_loss: Tensor | None = None

    def left(self, y: Tensor, weights: Tensor) -> Tensor:
        self.aux_loss = weights.mean()
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


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attribute": (Loss, "its attributes are set while the model runs"),
    "object": (Config, "it changes Config.config"),
    "counter": (lambda: Loop(Counting), "its attributes are set while the model runs"),
    "list": (lambda: Loop(Listing), "it changes Listing.seen"),
    "capacity": (Capacity, "decides by how many tokens an expert gets"),
    "cut": (Cut, "a capacity"),
    "break": (Stopping, "decides by how many tokens an expert gets"),
    "values": (Clamped, "decides by"),
    "type": (ByType, "decides by the type or shape"),
    "rare": (Rare, "do not all compute the same"),
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
