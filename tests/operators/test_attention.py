"""Attention by torch's operator: the same but for NaN, which few keys do not hide."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt.operators import scaled_dot_product_attention

KEYS = (1, 5, 15, 16, 40)


def given(keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(keys)
    return [torch.randn(2, 3, keys, 4, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", KEYS)
def test_results_and_gradients_are_those_of_the_operator(keys: int, is_causal: bool):
    x = given(keys)
    found = scaled_dot_product_attention(*x, is_causal=is_causal, scale=0.3)
    expected = F.scaled_dot_product_attention(*x, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(each, x, upstream) for each in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", KEYS)
def test_a_query_that_holds_nan_gives_nan(keys: int, is_causal: bool):
    query, key, value = (each.detach().float() for each in given(keys))
    query[1, 2, keys // 2, 0] = torch.nan
    found = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    rows = found.isnan().any(-1)
    assert found[1, 2, keys // 2].isnan().all()
    assert rows.sum() == 1


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("keys", [1, 5, 8, 15])
def test_what_a_later_key_holds_stays_in_its_own_row(keys: int, number: float) -> None:
    q, k, v = (torch.randn(1, 2, keys, 4) for _ in range(3))
    k[..., -1, :] = number
    scores = (q @ k.transpose(-2, -1) * 0.5).masked_fill(torch.ones(keys, keys).triu(1).bool(), -torch.inf)
    found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    torch.testing.assert_close(found, scores.softmax(-1) @ v, equal_nan=True)


def test_programs_of_any_length_are_exported_and_compiled():
    model, x = Attends(), torch.randn(1, 2, 40, 4)
    program = torch.export.export(model, (x,), dynamic_shapes=({2: torch.export.Dim("length")},)).module()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(model, (x,))
    for length in (40, 5):
        x = torch.randn(1, 2, length, 4)
        for other in (program, compiled, scripted):
            torch.testing.assert_close(other(x), model(x))


@pytest.mark.parametrize("is_masked", [False, True])
def test_second_gradients_are_those_of_attention_that_is_written_out(is_masked: bool) -> None:
    x = torch.randn(1, 2, 20, 8, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 20, 8, dtype=torch.float64)
    mask = torch.randn(20, 20, dtype=torch.float64) if is_masked else None

    def second(attend: Callable[..., Tensor]) -> Tensor:
        # One tensor is two arguments, another wants no gradient.
        (first,) = torch.autograd.grad(attend(x, key, x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    def written(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * 8**-0.5
        return (scores if mask is None else scores + mask).softmax(-1) @ value

    own = second(lambda query, key, value: scaled_dot_product_attention(query, key, value, mask))
    torch.testing.assert_close(own, second(written))


def test_attention_in_training_keeps_no_tensors_that_hooks_cannot_see() -> None:
    """A hook of each call would keep what checkpointing gives up."""
    query, key, value = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    products = query * 2, key * 2, value * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None):
        found = scaled_dot_product_attention(*products)
    gone = [weakref.ref(each) for each in products]
    del products
    gc.collect()
    assert found.requires_grad and not any(each() is not None for each in gone)
