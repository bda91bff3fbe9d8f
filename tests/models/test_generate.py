"""`generate` of an optimized language model gives the tokens that the model itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.tracing.recording import misses_in

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=37)
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL, state_size=8))


def _generated(model: Any, prompt: torch.Tensor, sampled: bool) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(prompt, do_sample=sampled, max_new_tokens=10, min_new_tokens=10)


def _captured(model: nn.Module, calls: list[fxopt.Inputs]) -> nn.Module:
    return fxopt.capture(model, calls).model


def _optimized(model: nn.Module, calls: list[fxopt.Inputs]) -> nn.Module:
    return fxopt.optimize(model, "inference", example_inputs=calls, measure=False)


@pytest.mark.parametrize("make", [gpt2, llama, t5, mamba])
def test_generated_tokens_are_the_same(make: Callable[[], nn.Module]):
    """Most calls inside fit no graph: the original forwards run."""
    model: Any = make().eval()
    prompt = torch.randint(3, 99, (2, 7))
    call = {"input_ids": prompt}
    if make is t5:
        call["decoder_input_ids"] = torch.randint(3, 99, (2, 5))
    fast: Any = fxopt.optimize(model, "inference", example_inputs=call, measure=False)
    for sampled in (False, True):
        assert torch.equal(_generated(fast, prompt, sampled), _generated(model, prompt, sampled))


@pytest.mark.parametrize(
    ("make", "run"), [(gpt2, _captured), (llama, _captured), (t5, _captured), (mamba, _captured), (llama, _optimized)]
)
def test_a_recorded_run_generates_from_graphs(make: Callable[[], nn.Module], run: Callable[..., Any]):
    model: Any = make().eval()
    # A Mamba counts the steps of its prompt in a loop.
    first, second = torch.randint(3, 99, (2, 7)), torch.randint(3, 99, (3, 7 if make is mamba else 5))
    with fxopt.recording(model) as calls:
        _generated(model, first, sampled=False)
    assert 2 <= len(calls) <= 4  # a prompt, and steps: not one for each token
    assert [call.module for call in calls if call.module] == (["encoder"] if make is t5 else [])
    fast = run(model, calls)
    for prompt, sampled in ((first, False), (second, False), (second, True)):
        assert torch.equal(_generated(fast, prompt, sampled), _generated(model, prompt, sampled))
    assert misses_in(fast.modules()) == []


@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_language_models_are_captured_whole_with_their_caches(make: Callable[[], nn.Module]):
    model: Any = make().eval()
    call = {"input_ids": torch.randint(3, 99, (2, 7))}
    if make is t5:
        call["decoder_input_ids"] = torch.randint(3, 99, (2, 5))
    program = fxopt.capture(model, call)
    assert program.opaque == {}
    expected, given = model(**call).past_key_values, program.model(**call).past_key_values
    assert type(given) is type(expected)
    assert given.get_seq_length() == expected.get_seq_length() > 0


def test_a_chunk_after_a_cache_gives_the_same_and_the_cache_grows_once():
    """The graph of a prefill is checked after the cache has grown: it is put back before the own forward runs."""
    model: Any = llama().eval()
    ids = torch.randint(3, 99, (2, 12))
    fast: Any = fxopt.capture(model, {"input_ids": ids[:, :7]}).model
    caches, logits = [], []
    for each in (model, fast):
        cache = each(input_ids=ids[:, :7]).past_key_values
        logits.append(each(input_ids=ids[:, 7:], past_key_values=cache).logits)
        caches.append(cache)
    torch.testing.assert_close(*logits)
    assert [cache.get_seq_length() for cache in caches] == [12, 12]


def _caches(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "grows": transformers.DynamicCache(),
        "knows its layers": transformers.DynamicCache(config=config),
        "is as long as it will be": transformers.StaticCache(config=config, max_cache_len=16),
    }


def _contents(cache: Any) -> list[Any]:
    return [(type(layer), layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("kind", ["grows", "knows its layers", "is as long as it will be"])
def test_chunks_and_steps_leave_every_cache_as_the_model_does(make: Callable[[], nn.Module], kind: str):
    """Of these calls the graphs, which were made without a cache, fit few; several are found out after a change."""
    model: Any = make().eval()
    ids = torch.randint(3, 99, (2, 14))
    fast: Any = fxopt.capture(model, {"input_ids": ids[:, :5]}).model
    given, expected = _caches(fast)[kind], _caches(model)[kind]
    with torch.no_grad():
        for start, end in ((0, 5), (5, 9), (9, 10), (10, 11), (11, 14)):
            logits = fast(input_ids=ids[:, start:end], past_key_values=given).logits
            assert torch.equal(logits, model(input_ids=ids[:, start:end], past_key_values=expected).logits)
            for mine, theirs in zip(_contents(given), _contents(expected), strict=True):
                assert mine[0] is theirs[0]
                assert all(map(torch.equal, mine[1:], theirs[1:]))
