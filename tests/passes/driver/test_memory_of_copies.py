"""What was derived from the copies that a model is compared with goes with them."""

from __future__ import annotations

import gc

import torch
from torch import nn

import fxopt
from fxopt.compat import all_modules
from fxopt.operators import Cache, Unchanged
from fxopt.runtime.graphs import capture_of


def kept_by(model: nn.Module) -> list[int]:
    """Return of how many tensors each cache in a model's graphs holds something."""
    captures = [capture for module in all_modules(model) if (capture := capture_of(module)) is not None]
    targets = [node.target for each in captures for s in each.specializations for node in s.graph.nodes]
    values = [value for target in targets for value in (target, *getattr(target, "__dict__", {}).values())]
    held = [each for value in values for each in (value if isinstance(value, (tuple, list)) else (value,))]
    return [len(cache._kept) for cache in {id(each): each for each in held if isinstance(each, Cache)}.values()]


def test_caches_hold_one_result_each_after_optimize():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    x = torch.randn(2, 8, 12, 12)
    fast = fxopt.optimize(model.eval(), "fold_batchnorm,pack", example_inputs=x, measure=False)
    with torch.no_grad():
        fast(x)
    gc.collect()
    assert max(kept_by(fast)) == 1


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def test_packed_recurrent_layers_hold_one_result_each_after_optimize():
    x = torch.randn(2, 5, 32)
    fast = fxopt.optimize(Tagger().eval(), "pack", example_inputs=x, measure=False)
    with torch.no_grad():
        fast(x)
    gc.collect()
    assert max(kept_by(fast)) == 1


def test_memory_that_only_notes_hold_is_gone():
    tensor, other = torch.ones(3), torch.ones(3)
    first, second = Unchanged([tensor, other]), Unchanged([other, tensor])
    assert not first.first_is_gone
    del tensor
    assert first.first_is_gone
    assert not second.first_is_gone
    del other, first
    assert second.first_is_gone


def test_notes_of_no_tensor_are_never_gone():
    assert not Unchanged([]).first_is_gone
    assert not Unchanged([None]).first_is_gone
