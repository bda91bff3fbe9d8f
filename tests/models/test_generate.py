"""`generate` of an optimized language model gives the tokens that the model itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.runtime.graphs import misses_in
from fxopt.tracing.recording import calls_by_kind, copy_inputs

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


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beam": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("make", [gpt2, llama, t5, mamba])
def test_plain_identifiers_are_enough_to_generate_from_graphs(make: Callable[[], nn.Module]):
    """A prompt and a step are recorded: they serve whatever has a cache that grows by a token."""
    model: Any = make().eval()
    ids = torch.randint(3, 99, (1, 7))
    call = {"input_ids": ids}
    if make is t5:
        call["decoder_input_ids"] = torch.randint(3, 99, (1, 5))
    settings, state = vars(model.generation_config).copy(), torch.get_rng_state()
    fast: Any = fxopt.optimize(model, example_inputs=call, measure=False)
    assert vars(fast.generation_config) == vars(model.generation_config) == settings
    assert torch.equal(torch.get_rng_state(), state)
    for way in ("greedy", "sampled", "beam"):
        assert torch.equal(_ways(fast, ids, way), _ways(model, ids, way)), way
    torch.testing.assert_close(fast(**call).logits, model(**call).logits)
    assert misses_in(fast.modules()) == []
    assert fxopt.report(fast).notes == ()
    for way in ("static cache", "prompt lookup") if make is llama else ():
        assert torch.equal(_ways(fast, ids, way), _ways(model, ids, way)), way


@pytest.mark.parametrize("make", [gpt2, llama, t5, mamba])
def test_the_calls_of_generate_are_a_prompt_and_a_step(make: Callable[[], nn.Module]):
    model: Any = make().eval()
    for way in ("greedy", "static cache") if make is llama else ("greedy",):
        with fxopt.recording(model) as calls:
            _ways(model, torch.randint(3, 99, (1, 7)), way)
        kinds = calls_by_kind([call for call in calls if not call.module])
        assert list(kinds) == ["prompt", "step"] and kinds["prompt"] == [c for c in calls if not c.module][:1]
    assert list(calls_by_kind(kinds["prompt"])) == [""]


def test_a_step_does_not_begin_in_the_graph_of_the_prompt():
    """Both graphs of an attention check their lengths on the way only, after the first projection."""
    model: Any = gpt2().eval()
    with fxopt.recording(model) as calls:
        _generated(model, torch.randint(3, 99, (1, 7)), sampled=False)
    fast = fxopt.capture(model, calls).model
    prompt, step = calls
    seen: list[object] = []
    for each in fast.transformer.h:
        each.attn.c_attn.register_forward_hook(lambda *_: seen.append(1))
    for call in (step, prompt):
        seen.clear()
        copy_inputs(call).run(fast)
        assert len(seen) == 2  # one for each layer


@pytest.mark.parametrize(("make", "way"), [(gpt2, "static cache"), (llama, "prompt lookup")])
def test_how_to_generate_is_said_by_inputs(make: Callable[[], nn.Module], way: str):
    model: Any = make().eval()
    ids = torch.randint(3, 99, (1, 7))
    calls = fxopt.Inputs.generating(ids, max_new_tokens=9, min_new_tokens=9, **WAYS[way])
    fast: Any = fxopt.optimize(model, example_inputs=calls, measure=False)
    assert torch.equal(_ways(fast, ids, way), _ways(model, ids, way))
    assert misses_in(fast.modules()) == []


def _ways(model: Any, ids: torch.Tensor, way: str) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(ids, max_new_tokens=9, min_new_tokens=9, **WAYS[way])


def test_a_cache_of_another_kind_is_told_of_in_plain_words():
    model: Any = gpt2().eval()
    ids = torch.randint(3, 99, (1, 7))
    fast: Any = fxopt.optimize(model, example_inputs=ids, measure=False)
    with pytest.warns(fxopt.GuardWarning) as warned:
        _ways(fast, ids, "static cache")
    said = [str(each.message) for each in warned if isinstance(each.message, fxopt.GuardWarning)]
    assert len(said) == 1 and "__qualname__" not in said[0]
    assert "called with a cache that no example had" in said[0] and "Inputs.generating(ids, ...)" in said[0]


def test_what_is_not_recorded_is_said():
    model: Any = gpt2().eval()
    ids = torch.randint(3, 99, (1, 7))
    embedded = {"inputs_embeds": torch.randn(1, 7, 32)}
    assert fxopt.report(fxopt.optimize(model, example_inputs=embedded, measure=False)).notes == ()
    model.generation_config.num_beams = 0
    (note,) = fxopt.report(fxopt.optimize(model, example_inputs=ids, measure=False)).notes
    assert "the steps of generate have no graphs: generate raised" in note
    with pytest.raises(fxopt.InputError, match="generate raised"):
        fxopt.optimize(model, example_inputs=fxopt.Inputs.generating(ids))
    with pytest.raises(fxopt.UsageError, match="Linear has none"):
        fxopt.optimize(nn.Linear(2, 2), example_inputs=fxopt.Inputs.generating(ids))


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
