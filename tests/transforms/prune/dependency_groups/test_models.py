"""The groups of small models of known families, each cut by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fxopt
from fxopt.transforms.prune import Prune
from fxopt.transforms.prune.dependency_groups import Coupling, coupling

CheckCuts = Callable[..., Coupling]


def _small(**other: Any) -> dict[str, Any]:
    return {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, **other}


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config), torch.randn(2, 3, 32, 32)


def _convnext() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.ConvNextConfig(hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, num_labels=3)
    return transformers.ConvNextForImageClassification(config), torch.randn(2, 3, 32, 32)


def _vit() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.ViTConfig(**_small(image_size=16, patch_size=8, num_labels=3))
    return transformers.ViTForImageClassification(config), torch.randn(2, 3, 16, 16)


def _bert() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.BertConfig(**_small(vocab_size=20, num_labels=3))
    return transformers.BertForSequenceClassification(config), torch.arange(10).view(2, 5)


def _bert_eager() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.BertConfig(**_small(vocab_size=20, num_labels=3), attn_implementation="eager")
    return transformers.BertForSequenceClassification(config), torch.arange(10).view(2, 5)


def _llama() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.LlamaConfig(**_small(vocab_size=20, num_key_value_heads=2, use_cache=False))
    return transformers.LlamaForCausalLM(config), torch.arange(10).view(2, 5)


def _qwen2() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.Qwen2Config(
        **_small(vocab_size=20, num_key_value_heads=2, use_cache=False), attn_implementation="eager"
    )
    return transformers.Qwen2ForCausalLM(config), torch.arange(10).view(2, 5)


def _gpt2() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=4, vocab_size=20, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), torch.arange(10).view(2, 5)


def _neox() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.GPTNeoXConfig(**_small(vocab_size=20, use_cache=False))
    return transformers.GPTNeoXForCausalLM(config), torch.arange(10).view(2, 5)


def _t5() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.T5Config(d_model=16, d_ff=24, num_layers=1, num_heads=4, d_kv=4, vocab_size=20)
    return transformers.T5EncoderModel(config), torch.arange(10).view(2, 5)


def _mobilenet() -> tuple[nn.Module, torch.Tensor]:
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, num_labels=3)
    return transformers.MobileNetV2ForImageClassification(config), torch.randn(2, 3, 32, 32)


_ATTENTION = "encoder.layer.0.attention.self.query"
_BERT = {
    "bert.embeddings.word_embeddings": ("hidden", 16),
    f"bert.{_ATTENTION}": ("heads", 4),
    "bert.encoder.layer.0.intermediate.dense": ("hidden", 24),
    "bert.pooler.dense": ("hidden", 16),
}
_DECODER = {
    "model.embed_tokens": ("hidden", 16),
    "model.layers.0.self_attn.q_proj": ("heads", 2),
    "model.layers.0.mlp.gate_proj": ("hidden", 24),
}
_FAMILIES: dict[Callable[[], tuple[nn.Module, torch.Tensor]], tuple[dict[str, tuple[str, int]], set[str]]] = {
    _resnet: (
        {
            "resnet.embedder.embedder.convolution": ("channels", 4),
            "resnet.encoder.stages.0.layers.0.layer.0.convolution": ("channels", 4),
            "resnet.encoder.stages.1.layers.0.layer.0.convolution": ("channels", 8),
            "resnet.encoder.stages.1.layers.0.layer.1.convolution": ("channels", 8),
        },
        {"classifier.1"},
    ),
    _convnext: (
        {
            "convnext.embeddings.patch_embeddings": ("channels", 4),
            "convnext.encoder.stages.0.layers.0.pwconv1": ("hidden", 16),
            "convnext.encoder.stages.1.downsampling_layer.1": ("channels", 6),
            "convnext.encoder.stages.1.layers.0.pwconv1": ("hidden", 24),
        },
        {"classifier"},
    ),
    _vit: (
        {
            "vit.embeddings.patch_embeddings.projection": ("channels", 16),
            "vit.layers.0.attention.q_proj": ("heads", 4),
            "vit.layers.0.mlp.fc1": ("hidden", 24),
        },
        {"classifier"},
    ),
    _bert: (_BERT, {"classifier"}),
    _bert_eager: (_BERT, {"classifier"}),
    _llama: (_DECODER, {"lm_head"}),
    _qwen2: (_DECODER, {"lm_head"}),
    _gpt2: (
        {
            "transformer.wte": ("hidden", 16),
            "transformer.h.0.attn.c_attn": ("heads", 4),
            "transformer.h.0.mlp.c_fc": ("hidden", 64),
        },
        set(),
    ),
    _neox: (
        {
            "gpt_neox.embed_in": ("hidden", 16),
            "gpt_neox.layers.0.attention.query_key_value": ("heads", 4),
            "gpt_neox.layers.0.mlp.dense_h_to_4h": ("hidden", 24),
        },
        {"lm_head"},
    ),
    _t5: (
        {
            "encoder.block.0.layer.0.SelfAttention.q": ("heads", 4),
            "encoder.block.0.layer.1.DenseReluDense.wi": ("hidden", 24),
        },
        {"shared", "encoder.block.0.layer.0.SelfAttention.o", "encoder.block.0.layer.1.DenseReluDense.wo"},
    ),
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_family_is_cut_as_the_table_says(family: Any, check_cuts: CheckCuts) -> None:
    model, inputs = family()
    groups, refused = _FAMILIES[family]
    found = check_cuts(model.eval(), inputs)
    assert {group.name: (group.kind, group.size) for group in found.groups} == groups
    assert {each.layer for each in found.refused} == refused
    assert all(each.by_design for each in found.refused)


def test_heads_that_the_result_has_in_a_cache_stay_and_the_reason_says_what_to_give(analysed: CheckCuts) -> None:
    model, inputs = _llama()
    model.config.use_cache = True
    found = analysed(model.eval(), inputs)
    assert [group.kind for group in found.groups] == ["hidden", "hidden"]
    kept = [each for each in found.refused if not each.by_design]
    assert {each.layer.rpartition(".")[2] for each in kept} == {"q_proj", "k_proj", "v_proj"}
    assert all("give use_cache=False among the example inputs" in each.reason for each in kept)


def test_a_graph_that_does_not_fit_a_cache_is_left_for_the_own_forward() -> None:
    config = transformers.T5Config(d_model=16, d_ff=24, num_layers=1, num_heads=4, d_kv=4, vocab_size=20)
    ids = torch.arange(10).view(2, 5)
    call = fxopt.Inputs(input_ids=ids, decoder_input_ids=ids[:, :3])
    found = coupling(fxopt.capture(transformers.T5Model(config).eval(), call))
    assert "decoder.block.0.layer.2.DenseReluDense.wi" in {group.name for group in found.groups}


def test_mobilenet_has_a_group_for_each_width(analysed: CheckCuts) -> None:
    model, inputs = _mobilenet()
    found = analysed(model.eval(), inputs)
    depthwise = [name for name, module in model.named_modules() if getattr(module, "groups", 1) > 1]
    counted = [a.module for group in found.groups for a in group.attributes if a.name == "groups"]
    assert sorted(counted) == sorted(depthwise) and len(depthwise) == 17
    assert {each.layer for each in found.refused} == {"classifier"}


@pytest.mark.parametrize("training", [False, True])
def test_a_mask_with_a_head_each_goes_with_the_heads(training: bool) -> None:
    """The bias of T5's cross attention is zeros of a size that stands in the graph of each mode."""
    config = transformers.T5Config(d_model=16, d_ff=24, num_layers=1, num_heads=4, d_kv=4, vocab_size=20)
    model = transformers.T5Model(config).train(training)
    ids = torch.arange(10).view(2, 5)
    call = fxopt.Inputs(input_ids=ids, decoder_input_ids=ids[:, :3], use_cache=False)
    fast = fxopt.optimize(model, Prune(method="structured", scope="layer", target="flops"), example_inputs=call)
    assert {decision.status for decision in fxopt.plan(fast).decisions} == {"applied"}
    assert fast.decoder.block[0].layer[1].EncDecAttention.n_heads == 2
    assert fast.decoder.block[0].layer[1].EncDecAttention.q.out_features == 8


@pytest.mark.parametrize("family", [_resnet, _convnext, _vit, _bert, _llama, _gpt2])
def test_what_reads_a_unit_that_is_zero_matters_no_more(
    family: Any, analysed: CheckCuts, reading_gradients: Callable[..., list[torch.Tensor]]
) -> None:
    """Where only what makes a unit is zero, the result does not depend on the weights that read it."""
    model, inputs = family()
    for group in analysed(model.eval(), inputs).groups:
        gradients = reading_gradients(model, inputs, group)
        assert gradients and all(gradient.abs().max() < 1e-12 for gradient in gradients), group.name


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_stacked_experts_lose_inner_units_and_whole_experts(family: str) -> None:
    experts = {"num_local_experts": 4} if family == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 24}
    config = getattr(transformers, f"{family}Config")(
        **_small(vocab_size=20, num_key_value_heads=2, num_experts_per_tok=2, use_cache=False, **experts)
    )
    model, ids = getattr(transformers, f"{family}ForCausalLM")(config).eval(), torch.arange(10).view(2, 5)
    fast = fxopt.optimize(model, Prune(method="structured", scope="layer"), example_inputs=ids)
    decisions = {decision.label: decision for decision in fxopt.plan(fast).decisions}
    mixture = "model.layers.0.mlp"
    assert {decision.status for decision in decisions.values()} == {"applied"}
    assert decisions[f"{mixture}.gate"].detail == f"removes 2 of 4 experts of {mixture}.gate"
    assert decisions[f"{mixture}.experts"].detail == f"removes 12 of 24 hidden of {mixture}.experts"
    stacked = fast.get_submodule(mixture).experts
    assert stacked.gate_up_proj.shape == (2, 24, 8) and stacked.down_proj.shape == (2, 8, 12)
    fast.train()(ids).logits.sum().backward()


@pytest.mark.filterwarnings("ignore::fxopt.errors.StateWarning")
def test_a_model_with_one_head_left_loads_without_example_inputs(tmp_path: Path) -> None:
    config = transformers.BertConfig(**_small(vocab_size=20, num_labels=3))
    ids, kind = torch.arange(10).view(2, 5), transformers.BertForSequenceClassification
    pass_ = Prune(method="structured", scope="layer", amount=0.75)
    fast = fxopt.optimize(kind(config).eval(), pass_, example_inputs=ids)
    assert fast.get_submodule(f"bert.{_ATTENTION}").out_features == 4
    fxopt.save(fast, tmp_path / "bert.fxopt")
    loaded = fxopt.load(tmp_path / "bert.fxopt", model=kind(config).eval())
    assert torch.equal(loaded(ids).logits, fast(ids).logits)


class _Dropping(nn.Module):
    """Leaves a layer out by chance while it is trained, as Wav2Vec2 does (layerdrop)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not (self.training and torch.rand([]) < 0.5):
            x = x + self.layer(x).relu()
        return self.head(x)


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_that_is_left_out_by_chance_keeps_its_groups(training: bool) -> None:
    torch.manual_seed(0)
    program = fxopt.capture(_Dropping().train(training), torch.randn(5, 4))
    for seed in range(6):  # the draw that a graph was made for comes again, or not
        torch.manual_seed(seed)
        assert [group.size for group in coupling(program).groups] == [6]
