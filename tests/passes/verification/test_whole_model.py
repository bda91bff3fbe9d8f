"""The whole model is compared under draws that are the same in every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxopt.passes.verification import Original
from fxopt.tracing.values import Inputs

SEEN: list[Tensor] = []
"""What the model computed; what it holds itself is put back."""


class Dropping(nn.Module):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        dropped = torch.dropout(x.sin(), self.chance, train=True)
        SEEN.append(dropped)
        return dropped


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_dropout_keeps_and_scales_all(chance: float) -> None:
    model, x = Dropping(chance), torch.linspace(0.1, 1.0, 5)
    assert Original(model, [Inputs(x)]).repeats()
    torch.testing.assert_close(SEEN[-1], x.sin() / (1 - chance))


class Sized(nn.Module):
    """Note the sizes that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        return self.linear(x)


@pytest.mark.parametrize(("is_usual", "expected"), [(True, [(1, 32, 8), (2, 9, 8)]), (False, [(2, 9, 8)])])
def test_another_mode_is_compared_on_a_smaller_call(is_usual: bool, expected: list[tuple[int, ...]]) -> None:
    SEEN.clear()
    Original(Sized(), [Inputs(torch.randn(1, 32, 8))], is_usual=is_usual)
    assert [tuple(x.shape) for x in SEEN] == expected


def test_a_model_that_takes_one_size_is_compared_on_it_in_every_mode() -> None:
    class OneSize(Sized):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(1, 32, 8))

    SEEN.clear()
    Original(OneSize(), [Inputs(torch.randn(1, 32, 8))], is_usual=False)
    assert [tuple(x.shape) for x in SEEN] == [(1, 32, 8)]
