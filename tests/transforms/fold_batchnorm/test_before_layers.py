"""Batch norms before a layer: they fold into it where that is exact, unless a layer before them takes them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from norms import folded, reasons, shaken
from torch import Tensor, nn

import fxopt
from fxopt.testing import assert_equivalent

ROWS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(0))


def called(model: nn.Module) -> list[str]:
    return [str(node.target) for node in fxopt.graphs(model)[""].nodes if node.op == "call_module"]


def mlp() -> nn.Module:
    """A tabular network: its input is normed, then each layer's result."""
    torch.manual_seed(0)
    layers = nn.BatchNorm1d(5), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3)
    return shaken(nn.Sequential(*layers))


def test_norms_go_into_the_layer_before_them_or_else_behind_them() -> None:
    model = mlp()
    fast = folded(model, ROWS)
    assert called(fast) == ["3"]
    assert [str(n.target) for n in fxopt.graphs(fast)[""].nodes].count("<built-in function linear>") == 2
    assert_equivalent(model, fast, (ROWS,))
    assert list(fast.state_dict()) == list(model.state_dict())


FIRST = {
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False),
    "reflected": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "one pixel": lambda: nn.Conv2d(4, 6, 1, padding="same"),
    "valid": lambda: nn.Conv2d(4, 6, 3, padding="valid", stride=2, dilation=2),
}


@pytest.mark.parametrize("case", FIRST)
def test_convolutions(case: str) -> None:
    model = shaken(nn.Sequential(nn.BatchNorm2d(4), FIRST[case]()))
    fast = folded(model, IMAGES)
    assert called(fast) == []
    assert_equivalent(model, fast, (IMAGES,))


REFUSED = {
    "padding": (lambda: nn.Conv2d(4, 6, 3, padding=1), "pads with zeros"),
    "same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), "pads with zeros"),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), "transposed convolution"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_convolutions_that_see_more_than_the_norm_refuse(case: str) -> None:
    layer, reason = REFUSED[case]
    model = shaken(nn.Sequential(nn.BatchNorm2d(4), layer()))
    assert [reason in each for each in reasons(folded(model, IMAGES))] == [True]


def test_a_linear_over_another_dimension_than_the_norms_refuses() -> None:
    model = shaken(nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(4), nn.Linear(49, 2)))
    assert ["49 channels and the batch norm 4" in each for each in reasons(folded(model, IMAGES))] == [True]


def test_linears_between_norms_of_another_dimension_refuse() -> None:
    model = shaken(nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(4), nn.Linear(49, 4), nn.BatchNorm1d(4)))
    assert reasons(folded(model, IMAGES)) == [
        "the linear has 49 channels and the batch norm 4",
        "the linear gives 3 dimensions, so the batch norm acts on another one",
    ]


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.layer(normed) + normed


class Written(ReadTwice):
    """What is normed is written to before the layer is called."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        normed = self.norm(x)
        x += 1
        return self.layer(normed) + x


def test_a_norm_whose_result_is_read_elsewhere_stays() -> None:
    assert called(folded(shaken(ReadTwice()), ROWS)) == ["norm", "layer"]


def test_a_write_behind_the_norm_is_not_seen() -> None:
    model = shaken(Written())
    fast = folded(model, ROWS)
    assert called(fast) == []
    with torch.no_grad():
        torch.testing.assert_close(fast(ROWS), model(ROWS))


def test_activations_between_keep_the_norm() -> None:
    model = shaken(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1)))
    assert called(folded(model, IMAGES)) == ["0", "1", "2"]


def test_another_number_of_dimensions_fails() -> None:
    model = shaken(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5)))
    with pytest.raises(fxopt.GuardError, match="2 dimensions"):
        folded(model, ROWS)(torch.randn(2, 5, 5))


def test_training_new_statistics_and_the_way_back(tmp_path: Path) -> None:
    model, fast = mlp(), folded(mlp(), ROWS)
    for each in (model, fast):
        each.train()
        each(ROWS)
        each.eval()
    assert_equivalent(model, fast, (ROWS,))
    assert_equivalent(model, pickle.loads(pickle.dumps(fast)), (ROWS,))
    assert_equivalent(model, fxopt.restore(fast), (ROWS,))
    repeated = fxopt.optimize(mlp(), plan=fxopt.plan(fast), example_inputs=ROWS)
    assert called(repeated) == called(fast) == called(folded(fast, ROWS))
    assert_equivalent(mlp(), repeated, (ROWS,))


def test_what_is_folded_is_packed() -> None:
    model = mlp()
    fast = fxopt.optimize(model, "fold_batchnorm,pack", example_inputs=ROWS, measure=False)
    assert "packed_linear" in str(fxopt.graphs(fast)[""])
    with torch.no_grad():
        torch.testing.assert_close(fast(ROWS), model(ROWS))
