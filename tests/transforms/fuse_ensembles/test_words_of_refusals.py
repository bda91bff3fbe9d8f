"""Refusals name modules of the user's model, and nothing of how graphs are written."""

from __future__ import annotations

import pytest
import torch

import fxopt


def test_projections_of_an_attention_with_a_cache_are_refused_in_plain_words() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Qwen3Config(vocab_size=16, num_hidden_layers=1, head_dim=8, **sizes)
    model = transformers.Qwen3ForCausalLM(config).eval()
    ids = torch.arange(6).reshape(2, 3)
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs={"input_ids": ids}, measure=False)
    refused = [each for each in fxopt.plan(fast).decisions if each.status == "refused"]
    assert [each.label for each in refused] == ["model.layers.0.self_attn.k_proj, v_proj"]
    assert "changes an object, such as a cache" in refused[0].reason
    assert not any(word in refused[0].reason for word in ("keep", "getitem", "members"))
    applied = next(each for each in fxopt.plan(fast).decisions if each.status == "applied")
    assert applied.label == "model.layers.0.mlp.gate_proj, up_proj"
