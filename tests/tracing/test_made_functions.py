"""Attention masks from functions of positions: made by one node, from a function that is made again."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxopt
from fxopt.tracing.made_functions import MadeFunction, made_function
from fxopt.tracing.program import capture_program

pytest.importorskip("transformers")
from transformers.masking_utils import create_bidirectional_mask

X = torch.randn(2, 6, 4)


def window(width, causal=False):
    def inside(batch, head, query, key):
        distance = query - key
        return (distance >= 0) & (distance < width) if causal else distance.abs() < width

    return inside


def by_tensor(limits):
    def inside(batch, head, query, key):
        return key < limits[query]

    return inside


def with_default(width):
    def inside(batch, head, query, key, more=2):
        return (query - key).abs() < width + more

    return inside


def _config(width=2):
    return SimpleNamespace(_attn_implementation="sdpa", width=width, sliding_window=None, is_causal=False)


class Masks(nn.Module):
    def __init__(self, kind="window"):
        super().__init__()
        self.kind = kind
        self.config = _config()
        self.register_buffer("limits", torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]))

    def forward(self, x, mask=None):
        if self.kind == "window":
            function = window(self.config.width, causal=True) if self.training else window(self.config.width)
        else:
            function = by_tensor(self.limits) if self.kind == "by_tensor" else with_default(self.config.width)
        made = create_bidirectional_mask(self.config, x, mask, and_mask_function=function)
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=made)


PADDING = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])


def test_masks_are_those_of_the_forward():
    model = Masks().eval()
    program = capture_program(copy.deepcopy(model), (X, PADDING))
    assert program.opaque == {}
    fast = program.model
    targets = [node.target for node in program.graphs[""].nodes]
    assert create_bidirectional_mask in targets
    for each in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        for training in (False, True):
            model.train(training)
            each.train(training)
            for x, padding in ((X, PADDING), (X[:1, :3], PADDING[:1, :3]), (X, None), (X[:, :5], PADDING[:, 1:])):
                torch.testing.assert_close(each(x, padding), model(x, padding))


def test_a_setting_that_is_changed_later_is_seen():
    model = Masks().eval()
    fast = fxopt.optimize(model, "inference", example_inputs=(X, PADDING), measure=False)
    for width in (1, 4):
        fast.config.width = model.config.width = width
        torch.testing.assert_close(fast(X, PADDING), model(X, PADDING))
    torch.testing.assert_close(fxopt.restore(fast)(X, PADDING), model(X, PADDING))


@pytest.mark.parametrize("kind", ["by_tensor", "with_default"])
def test_functions_of_more_than_plain_values_stay_opaque(kind: str):
    model = Masks(kind).eval()
    program = capture_program(copy.deepcopy(model), (X, PADDING))
    assert "mode is entered" in program.opaque[""].reason
    torch.testing.assert_close(program.model(X, PADDING), model(X, PADDING))


def test_what_is_made_again_is_the_same_function():
    positions = torch.arange(5)[:, None], torch.arange(5)[None, :]
    for width, causal in ((2, False), (3, True), (1, 1), (True, False)):
        made = made_function(window(width, causal))
        assert isinstance(made, MadeFunction)
        for each in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert torch.equal(each(0, 0, *positions), window(width, causal)(0, 0, *positions))
    assert made_function(window) is None
    assert made_function(by_tensor(torch.ones(2))) is None
    assert made_function(with_default(2)) is None
    with pytest.raises(ImportError, match="any more"):
        MadeFunction(__name__, "window.<locals>.gone", (1, 2))
