"""attention on families of transformers with their eager attention."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.operators import canonical_name

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {**SIZES, "vocab_size": 64},
    "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64},
    "Llama": {**SIZES, "vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": 0},
    "ViT": {**SIZES, "image_size": 16, "patch_size": 8},
}


def built(family: str) -> tuple[nn.Module, dict[str, Any]]:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], attn_implementation="eager")
    model = getattr(transformers, f"{family}Model")(config).eval()
    ids = torch.arange(1, 17).reshape(2, 8)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    given = {"pixel_values": torch.randn(2, 3, 16, 16)} if family == "ViT" else {"input_ids": ids}
    return model, given if family == "ViT" else {**given, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(family: str):
    model, given = built(family)
    fast = fxopt.optimize(model, "attention", example_inputs=given, measure=False, time_budget=600)
    graphs = fxopt.graphs(fast).values()
    assert any(canonical_name(node) == "scaled_dot_product_attention" for graph in graphs for node in graph.nodes)
    with torch.no_grad(), warnings.catch_warnings():
        torch.testing.assert_close(fast(**given)[0], model(**given)[0], rtol=1e-4, atol=1e-5)
        found = fast(**given, output_attentions=True).attentions
        expected = model(**given, output_attentions=True).attentions
    assert len(found) == len(expected) == 1
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
