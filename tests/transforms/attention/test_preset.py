"""The preset `inference` with attention that is written out: tokens, exports, compiled code and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxopt

pytestmark = pytest.mark.filterwarnings("ignore:module .* used its original forward")

TOKENS = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))
OPERATOR = "scaled_dot_product_attention"


def gpt2(kind: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, attn_implementation=kind)
    return transformers.GPT2LMHeadModel(config).eval()


def llama(kind: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, attn_implementation=kind)).eval()


def optimized(model: nn.Module) -> Any:
    inputs = {"input_ids": TOKENS, "use_cache": False}
    return fxopt.optimize(model, "inference", example_inputs=inputs, measure=False, time_budget=1e6)


def found(model: nn.Module) -> list[str]:
    return [each.status for each in fxopt.plan(model).decisions if each.pass_name == "attention"]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_generate_and_checkpoints(make: Any) -> None:
    model, fast = make(), optimized(make())
    assert found(fast) and set(found(fast)) == {"applied"}
    assert any(OPERATOR in str(graph) for graph in fxopt.graphs(fast).values())
    settings = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 2}
    assert torch.equal(model.generate(TOKENS, **settings), fast.generate(TOKENS, **settings))
    given, kept = model.state_dict(), fast.state_dict()
    assert list(given) == list(kept) and all(torch.equal(given[name], kept[name]) for name in given)
    weights = fast(TOKENS, output_attentions=True, use_cache=False).attentions
    expected = model(TOKENS, output_attentions=True, use_cache=False).attentions
    torch.testing.assert_close(weights, expected)


def test_models_that_call_the_operator_are_not_reported() -> None:
    assert found(optimized(gpt2("sdpa"))) == []


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return torch.softmax(q @ k.transpose(-2, -1) * 0.35, -1) @ v


ROWS = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))


def attends(device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Attends().eval().to(device)
    fast = fxopt.optimize(model, "inference", example_inputs=ROWS.to(device), measure=False)
    assert found(fast) == ["applied"]
    return model, fast


def test_exported_and_compiled() -> None:
    model, fast = attends()
    with torch.no_grad():
        expected = model(ROWS)
        torch.testing.assert_close(fast(ROWS), expected)
        torch.testing.assert_close(torch.export.export(fast, (ROWS,)).module()(ROWS), expected)
        torch.testing.assert_close(torch.compile(fast, backend="aot_eager")(ROWS), expected)


def test_on_the_meta_device() -> None:
    _, fast = attends("meta")
    assert fast(ROWS.to("meta")).shape == (2, 4, 6, 8)
