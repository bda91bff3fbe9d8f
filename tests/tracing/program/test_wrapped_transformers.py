"""Language models from `transformers`: rotary embeddings open contexts, layers checkpoint themselves in training."""

from __future__ import annotations

import pytest
import torch

import fxopt
from fxopt.compat import all_modules
from fxopt.runtime.graphs import ContextRegion, capture_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
IDS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
MORE = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(1))


def make(name, attention="eager", **settings):
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = attention
    torch.manual_seed(0)
    heads = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel"}
    return getattr(transformers, name + heads.get(name, "ForCausalLM"))(config)


def gradients(model, ids):
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPTNeoX"])
def test_rotary_embeddings_are_captured(name, attention):
    model = make(name, attention, **SMALL).eval()
    fast = fxopt.optimize(model, passes="inference", example_inputs={"input_ids": IDS}, measure=False)
    graphs = [place for place in fxopt.graphs(fast) if place.endswith("rotary_emb.no_grad_0")]
    assert len(graphs) == 1
    assert "opaque" not in str(fxopt.capture(model, {"input_ids": IDS}).coverage())
    for ids in (IDS, MORE):
        torch.testing.assert_close(fast(input_ids=ids).logits, model(input_ids=ids).logits)
    embedding = fast.get_submodule(graphs[0].removesuffix(".no_grad_0"))
    assert not capture_of(embedding).misses
    assert list(fxopt.state_dict(fast)) == list(model.state_dict())
    assert not any(isinstance(module, ContextRegion) for module in all_modules(fxopt.restore(fast)))


@pytest.mark.parametrize(("name", "settings"), [("GPT2", GPT2), ("Bert", SMALL)])
def test_checkpointed_layers(name, settings):
    model = make(name, **{key: value for key, value in settings.items() if name == "GPT2" or key != "use_cache"})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    captured = fxopt.capture(model, {"input_ids": IDS, "labels": IDS}).model
    regions = [m for m in all_modules(captured) if isinstance(m, ContextRegion) and m.context.kind == "checkpoint"]
    assert len(regions) == 2
    for ids in (IDS, MORE):
        for given, expected in zip(gradients(captured, ids), gradients(model, ids), strict=True):
            assert torch.equal(given, expected)
    model.eval(), captured.eval()
    for arguments in ({"input_ids": IDS, "labels": IDS}, {"input_ids": IDS}):
        given, expected = (each(**arguments).logits for each in (captured, model))
        assert torch.equal(given, expected)
        capture_of(captured).misses.clear()
    assert not any(capture.misses for m in captured.modules() if (capture := capture_of(m)))


def test_checkpointing_switched_on_later_is_run():
    model = make("GPT2", **GPT2).train()
    captured = fxopt.capture(model, {"input_ids": IDS, "labels": IDS}).model
    for each in (model, captured):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for given, expected in zip(gradients(captured, IDS), gradients(model, IDS), strict=True):
        assert torch.equal(given, expected)
    calls = []
    captured.transformer.h[0].attn.c_attn.register_forward_hook(lambda *_: calls.append(1))
    gradients(captured, IDS)
    assert len(calls) == 2


def test_a_mask_that_decides_is_asked_again():
    model = make("Bert", "sdpa", **{k: v for k, v in SMALL.items() if "key_value" not in k}).eval()
    mask = torch.ones_like(IDS)
    program = fxopt.capture(model, {"input_ids": IDS, "attention_mask": mask})
    assert not program.opaque, program.coverage().text
    padded = mask.clone()
    padded[0, -2:] = 0
    with torch.no_grad():
        for given in (mask, padded, mask):
            call = {"input_ids": IDS, "attention_mask": given}
            assert torch.equal(program.model(**call).logits, model(**call).logits)


def test_recurrent_states_are_left_behind():
    settings = {k: v for k, v in SMALL.items() if k not in ("use_cache", "max_position_embeddings")}
    settings["num_hidden_layers"] = 3  # the third is one of attention
    model = make("RecurrentGemma", **settings, lru_width=32, attention_window_size=8, use_cache=True).eval()
    program = fxopt.capture(model, {"input_ids": IDS})
    assert not program.opaque, program.coverage().text
    with torch.no_grad():
        for given in (IDS, MORE, IDS):
            assert torch.equal(program.model(input_ids=given).logits, model(input_ids=given).logits)
            blocks = [[m for m in each.modules() if hasattr(m, "conv1d_state")] for each in (model, program.model)]
            assert blocks[0]
            for mine, theirs in zip(*blocks, strict=True):
                assert torch.equal(mine.conv1d_state, theirs.conv1d_state)
                assert torch.equal(mine.rg_lru.recurrent_states, theirs.rg_lru.recurrent_states)
