"""swap_kernels on families of transformers: what is found in each, in evaluation, training and bfloat16."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import fxopt

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0, "head_dim": 8}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}
DECODER = {"rms_norm", "add_rms_norm", "swiglu", "rotary_embedding"}
FAMILIES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama": ("Llama", LLAMA, DECODER),
    "gemma": ("Gemma", LLAMA, {"rms_norm", "geglu", "rotary_embedding"}),  # its norms compute their weights
    "olmo": ("Olmo", LLAMA, {"layer_norm", "add_layer_norm", "swiglu", "rotary_embedding"}),
    "glm": ("Glm", LLAMA, {"rms_norm", "add_rms_norm", "swiglu"}),  # positions of neighbouring features
    "t5": ("T5Encoder", T5, {"rms_norm"}),
    "gpt2": ("GPT2", GPT2, {"layer_norm", "add_layer_norm", "bias_act"}),
}


def built(family: str) -> nn.Module:
    name, sizes, _ = FAMILIES[family]
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**sizes)
    return getattr(transformers, f"{name}Model")(config).eval()


def swapped(model: nn.Module) -> tuple[nn.Module, Counter[tuple[str, str]]]:
    ids = torch.arange(1, 9).reshape(1, 8)
    fast = fxopt.optimize(model, "swap_kernels", example_inputs=(ids,), measure=False, time_budget=600)
    decisions = fxopt.plan(fast).decisions
    with torch.no_grad():
        expected, found = model(ids)[0], fast(ids)[0]
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= (1e-4 if found.dtype == torch.float32 else 0.05) * expected.abs().max()
    return fast, Counter((each.site["data"]["kernel"], each.status) for each in decisions if each.site)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(family: str):
    _, found = swapped(built(family))
    assert {kernel for kernel, status in found if status == "applied"} == FAMILIES[family][2]
    assert all(status == "applied" for _, status in found)


def test_in_bfloat16():
    _, found = swapped(built("t5").bfloat16())
    assert found["rms_norm", "applied"] >= 3
    assert all(status == "applied" for _, status in found)


def test_norms_that_would_keep_bfloat16_in_a_model_converted_to_float64_stay():
    fast, found = swapped(built("gemma").bfloat16())
    assert found["rms_norm", "undone"] >= 3
    reasons = {each.reason for each in fxopt.plan(fast).decisions if each.status == "undone"}
    assert reasons == {"output changed its dtype from float64 to bfloat16"}


def test_in_training_gradients_are_the_same():
    model, ids = built("llama").train(), torch.arange(1, 9).reshape(1, 8)
    fast, found = swapped(model)
    assert {kernel for kernel, _ in found} == DECODER
    for each in (model, fast):
        each(ids)[0].square().sum().backward()
    for (name, mine), (other, theirs) in zip(fast.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_a_model_that_returns_its_logits_keeps_its_loss():
    config = transformers.LlamaConfig(**LLAMA)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(1, 9).reshape(1, 8)
    given = {"input_ids": ids, "labels": ids}
    chosen = "swap_kernels{kernels=[linear_cross_entropy]}"
    fast = fxopt.optimize(model, chosen, example_inputs=given, measure=False)
    (decision,) = fxopt.plan(fast).decisions
    assert (decision.status, decision.reason) == (
        "refused",
        "linear_cross_entropy: 'lm_head' is read elsewhere too",
    )


class OnlyLoss(nn.Module):
    """A causal language model, and the loss that transformers computes, without its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.LlamaModel(transformers.LlamaConfig(**LLAMA))
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(self.lm_head(self.model(ids)[0]), labels, vocab_size=64)


def test_the_loss_of_transformers_is_found():
    model, ids = OnlyLoss().train(), torch.arange(1, 9).reshape(1, 8)
    chosen = "swap_kernels{kernels=[linear_cross_entropy]}"
    fast = fxopt.optimize(model, chosen, example_inputs=(ids, ids), measure=False)
    assert [each.status for each in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast(ids, ids), model(ids, ids))
