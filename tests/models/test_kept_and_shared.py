"""Models of transformers that call a table twice, or keep a tensor between calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.shares import share
from torch import nn

import fxopt

transformers = pytest.importorskip("transformers")


def test_layoutlm_looks_up_its_positions_twice() -> None:
    config = transformers.LayoutLMConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_2d_position_embeddings=100,
    )  # fmt: skip
    model = transformers.LayoutLMModel(config).eval()
    box = torch.randint(0, 49, (2, 7, 4))
    box[..., 2:] += box[..., :2]
    call = {"input_ids": torch.randint(0, 50, (2, 7)), "bbox": box}
    expected = model(**call).last_hidden_state
    for options in ({}, {"verify": False}):
        fast = fxopt.optimize(model, "fuse_ensembles{lowering=vmap}", example_inputs=call, measure=False, **options)
        assert any("x_position" in d.key and d.status == "applied" for d in fxopt.plan(fast).decisions)
        torch.testing.assert_close(fast(**call).last_hidden_state, expected)


@pytest.mark.parametrize("use_cache", share(2, [True, False]))
def test_recurrent_gemma_trains_for_several_steps(use_cache: bool) -> None:
    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=3, vocab_size=50, hidden_size=32, intermediate_size=48, num_attention_heads=2, lru_width=32,
        attention_window_size=8, block_types=["recurrent", "recurrent", "attention"],
    )  # fmt: skip
    model = transformers.RecurrentGemmaForCausalLM(config).train()
    call = {"input_ids": torch.randint(0, 50, (2, 7)), "use_cache": use_cache}
    program = fxopt.capture(model, call)
    assert len(program.graphs) > 20
    fast = fxopt.optimize(model, "training", example_inputs=call, measure=False)
    expected = losses(copy.deepcopy(model), call)
    assert losses(program.model, call) == pytest.approx(expected, rel=1e-4)
    assert losses(fast, call) == pytest.approx(expected, rel=1e-4)


def losses(model: nn.Module, call: dict[str, Any]) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        torch.manual_seed(0)
        loss = model(**call).logits.square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
