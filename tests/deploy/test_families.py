"""Families of `transformers`: optimized, saved, and loaded without example inputs, they give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.shares import share
from torch import Tensor, nn

import fxopt
from fxopt.runtime.values import tensors_in

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {"vocab_size": 99, **WIDTHS}
DECODER = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SPEECH = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "suppress_tokens": None}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("ForSequenceClassification", TEXT),
    "GPT2": ("LMHeadModel", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Llama": ("ForCausalLM", DECODER),
    "Qwen3": ("ForCausalLM", {**DECODER, "head_dim": 8}),
    "Phi3": ("ForCausalLM", DECODER),
    "Gemma2": ("ForCausalLM", {**DECODER, "head_dim": 8}),
    "T5": (
        "ForConditionalGeneration",
        {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
    ),
    "Bart": ("ForConditionalGeneration", BOTH),
    "Whisper": ("ForConditionalGeneration", {**BOTH, **SPEECH, "begin_suppress_tokens": None}),
    "Swin": (
        "ForImageClassification",
        {"image_size": 32, "window_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]},
    ),
    "ViT": ("ForImageClassification", {**WIDTHS, "image_size": 32, "patch_size": 8}),
    "ConvNext": ("ForImageClassification", {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 32]}),
    "ResNet": ("ForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    "MobileViT": (
        "ForImageClassification",
        {"image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]},
    ),
    "Mamba": ("ForCausalLM", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "Mixtral": ("ForCausalLM", {**DECODER, "num_local_experts": 4}),
    "Qwen3Moe": ("ForCausalLM", {**DECODER, **EXPERTS, "head_dim": 8, "num_experts": 4}),
    "Olmoe": ("ForCausalLM", {**DECODER, "num_experts": 4, "num_experts_per_tok": 2}),
    "DeepseekV3": (
        "ForCausalLM",
        {**DECODER, **EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1},
    ),
}
GENERATING = [
    name for name, (kind, _) in FAMILIES.items() if kind.startswith(("LMHead", "ForCausal", "ForConditional"))
]


def made(name: str) -> Any:
    """Return a small model of a family, in evaluation mode, always the same one."""
    torch.manual_seed(0)
    kind, settings = FAMILIES[name]
    return getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**settings)).eval()


def prompt(model: Any) -> dict[str, Tensor]:
    """Return an input of the model's kind, and what it needs beside."""
    torch.manual_seed(1)
    given = {
        "input_ids": lambda: torch.randint(3, 99, (2, 12)),
        "pixel_values": lambda: torch.randn(2, 3, 32, 32),
        "input_features": lambda: torch.randn(2, 8, 32),
    }
    main = {model.main_input_name: given[model.main_input_name]()}
    return main | ({"decoder_input_ids": torch.randint(3, 99, (2, 5))} if model.config.is_encoder_decoder else {})


def loaded(fast: nn.Module, name: str, folder: Path) -> nn.Module:
    fxopt.save(fast, folder / "model.fxopt")
    return fxopt.load(folder / "model.fxopt", model=made(name))


def applied(fast: nn.Module) -> int:
    return sum(decision.status == "applied" for decision in fxopt.plan(fast).decisions)


@pytest.mark.parametrize("name", share(4, FAMILIES))
def test_a_pruned_and_optimized_model_loads_without_inputs(name: str, tmp_path: Path) -> None:
    model = made(name)
    inputs = prompt(model) | ({"use_cache": False} if name in GENERATING else {})
    fast = fxopt.optimize(
        model, "prune{method=structured,amount=0.5},inference", example_inputs=inputs, measure=False, verify=False
    )
    again = loaded(fast, name, tmp_path)
    assert applied(again) == applied(fast) > 0
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        expected, given = fast(**inputs), again(**inputs)
    assert all(map(torch.equal, tensors_in(expected), tensors_in(given)))


@pytest.mark.parametrize("name", share(4, GENERATING))
def test_calls_with_caches_are_drawn_again(name: str, tmp_path: Path) -> None:
    model = made(name)
    given = prompt(model)[model.main_input_name]
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    with fxopt.recording(model) as calls:
        model.generate(given, **settings)
    fast: Any = fxopt.optimize(model, "inference", example_inputs=calls, measure=False, verify=False)
    again: Any = loaded(fast, name, tmp_path)
    assert applied(again) == applied(fast) > 0
    assert torch.equal(again.generate(given, **settings), fast.generate(given, **settings))
    assert [miss.module for miss in fxopt.report(again).missed] == [miss.module for miss in fxopt.report(fast).missed]
