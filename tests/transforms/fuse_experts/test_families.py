"""fuse_experts on the mixtures of transformers: loops over modules and stacked parameters, and their other forms."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from support.shares import share
from torch import nn

import fxopt

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
TOP: dict[str, Any] = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 32}
T5: dict[str, Any] = {"num_experts": 4, "vocab_size": 64, "d_model": 32, "dropout_rate": 0.0, "num_heads": 4}
NLLB: dict[str, Any] = {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "dropout": 0.0,
    "activation_dropout": 0.0, "max_position_embeddings": 64, "expert_capacity": 16,
}  # fmt: skip
DBRX: dict[str, Any] = {
    "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 64,
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", "ForCausalLM", {**SIZES, **TOP, "num_local_experts": 4}),
    "gpt_oss": ("GptOss", "ForCausalLM", {**SIZES, **TOP, "num_local_experts": 4, "head_dim": 8}),
    "olmoe": ("Olmoe", "ForCausalLM", {**SIZES, **TOP, "num_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe", "ForCausalLM",
        {**SIZES, **TOP, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", {**SIZES, **TOP, "num_experts": 4, "moe_intermediate_size": 32}),
    "deepseek_v3": (
        "DeepseekV3", "ForCausalLM",
        {**SIZES, **TOP, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
    ),
    "jetmoe": ("JetMoe", "ForCausalLM", {**SIZES, **TOP, "num_local_experts": 4, "kv_channels": 8}),
    "dbrx": ("Dbrx", "ForCausalLM", DBRX),
    "switch_transformers": (
        "SwitchTransformers", "ForConditionalGeneration",
        {**T5, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_sparse_encoder_layers": 1,
         "num_sparse_decoder_layers": 1},
    ),
    "nllb_moe": ("NllbMoe", "ForConditionalGeneration", {"d_model": 32, "num_experts": 4, "vocab_size": 64, **NLLB}),
}  # fmt: skip
STACKED = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
FORMS = [
    *((family, "eager") for family in FAMILIES),
    *share(4, ((family, form) for family in STACKED for form in ("batched_mm", "grouped_mm"))),
]


def model_of(family: str, implementation: str) -> nn.Module:
    name, head, settings = FAMILIES[family]
    place = f"transformers.models.{family}"
    config = getattr(importlib.import_module(f"{place}.configuration_{family}"), f"{name}Config")(**settings)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    model = getattr(importlib.import_module(f"{place}.modeling_{family}"), f"{name}{head}")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize("family", STACKED)
def test_what_is_grouped_already_stays(family: str) -> None:
    call = fxopt.Inputs(input_ids=torch.randint(3, 64, (2, 12)), use_cache=False)
    fast = fxopt.optimize(model_of(family, "grouped_mm"), "fuse_experts", example_inputs=call, measure=False)
    assert {d.reason for d in fxopt.plan(fast).decisions} == {
        "its experts are multiplied together already (grouped_mm)"
    }


@pytest.mark.parametrize(("family", "implementation"), FORMS)
def test_families(family: str, implementation: str) -> None:
    model, ids = model_of(family, implementation), torch.randint(3, 64, (2, 12))
    both = family in ("switch_transformers", "nllb_moe")
    call = fxopt.Inputs(input_ids=ids, **({"decoder_input_ids": ids} if both else {"use_cache": False}))
    fast = fxopt.optimize(model, "fuse_experts{lowering=padded}", example_inputs=call, measure=False)
    decisions = fxopt.plan(fast).decisions
    assert [d.status for d in decisions] == ["applied"] * (1 + both), [d.reason for d in decisions]
    assert list(fast.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(fast(*call.args, **call.kwargs).logits, model(*call.args, **call.kwargs).logits)
