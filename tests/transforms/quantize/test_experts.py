"""Experts whose weights are stacked stay in floats, by name; what is around them does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.layers import MixtureOfExperts

SCHEMES = ("int8_dynamic", "int8_weight", "int4_weight{group_size=32}", "float8")


def own() -> tuple[nn.Module, Any, str]:
    return nn.Sequential(nn.Linear(32, 32), MixtureOfExperts(32, 64, 4, 2)), torch.randn(4, 32), "1"


def of_transformers() -> tuple[nn.Module, Any, str]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=4, vocab_size=96)
    call = fxopt.Inputs(input_ids=torch.randint(0, 96, (2, 5)), use_cache=False)
    return transformers.MixtralForCausalLM(config), call, "model.layers.0.mlp.experts"


@pytest.mark.parametrize("make", [own, of_transformers])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stacked_experts_are_refused_by_name_and_the_rest_is_quantized(
    make: Callable[[], tuple[nn.Module, Any, str]], scheme: str
):
    torch.manual_seed(0)
    model, call, place = make()
    name, _, option = scheme.partition("{")
    options = ",".join([f"scheme={name},aim=size,budget=0.9", *([option.rstrip("}")] if option else [])])
    fast = fxopt.optimize(model.eval(), f"quantize{{{options}}}", example_inputs=call)
    decided = {d.label: d for d in fxopt.plan(fast).decisions}
    assert decided[place].status == "refused"
    assert "stacked (gate_up_proj and down_proj)" in decided[place].reason
    assert any(d.status == "applied" for d in decided.values())
    before, after = model.get_submodule(place), fast.get_submodule(place)
    for one, other in zip(before.parameters(recurse=False), after.parameters(recurse=False), strict=True):
        assert torch.equal(one, other)
