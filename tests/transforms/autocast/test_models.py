"""autocast on the kinds of models that people have: steps, generation, and the other passes beside it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.compat import modules_by_name
from fxopt.passes.pipeline import parse
from fxopt.runtime.graphs import WrappedRegion

transformers = pytest.importorskip("transformers")


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    return transformers.BertForSequenceClassification(config), {"input_ids": torch.randint(0, 100, (2, 12))}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=100, pad_token_id=0, eos_token_id=None, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(1, 100, (2, 12))}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config), {"pixel_values": torch.randn(4, 3, 32, 32)}


def gcn() -> tuple[nn.Module, dict[str, Tensor]]:
    geometric = pytest.importorskip("torch_geometric.nn")
    model = geometric.GCN(16, 32, num_layers=2, out_channels=4)
    return model, {"x": torch.randn(20, 16), "edge_index": torch.randint(0, 20, (2, 60))}


def result(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    output: Any = model(**inputs)
    return output if isinstance(output, Tensor) else output.logits


def optimized(model: nn.Module, inputs: Mapping[str, Tensor], passes: str = "autocast", **options: Any) -> nn.Module:
    return fxopt.optimize(model, passes, example_inputs=dict(inputs), measure=False, time_budget=60, **options)


def regions(model: nn.Module) -> list[str]:
    return [name for name, module in modules_by_name(model).items() if isinstance(module, WrappedRegion)]


@pytest.mark.parametrize("make", [bert, llama, resnet, gcn])
def test_it_applies_and_keeps_types_names_and_gradients(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    fast = optimized(model.eval(), inputs)
    statuses = [(each.status, each.reason) for each in fxopt.plan(fast).decisions]
    assert any(status == "applied" for status, _ in statuses) and all(s in ("applied", "refused") for s, _ in statuses)
    expected, found = result(model, inputs), result(fast, inputs)
    assert found.dtype is torch.float32 and 0 < (found - expected).abs().max() <= 0.05 * expected.abs().max()
    assert list(fast.state_dict()) == list(model.state_dict())
    expected.square().sum().backward()
    found.square().sum().backward()
    pairs = list(zip(model.parameters(), fast.parameters(), strict=True))
    assert all((old.grad is None) == (new.grad is None) for old, new in pairs)
    cosine = torch.nn.functional.cosine_similarity(
        *(torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, fast)), dim=0
    )
    assert cosine > 0.97
    assert torch.equal(result(fxopt.restore(fast), inputs), result(model, inputs))


def test_equal_layers_are_decided_once() -> None:
    model, inputs = bert()
    fast = optimized(model, inputs)
    layers = [each for each in fxopt.plan(fast).decisions if each.label.startswith("bert.encoder.layer.")]
    assert [(each.label[-1], each.status) for each in layers] == [("0", "applied"), ("1", "applied")]


def test_steps_of_a_generation_without_a_graph_run_in_float32_and_are_counted() -> None:
    torch.manual_seed(0)
    model, inputs = llama()
    fast = optimized(model.eval(), {**inputs, "use_cache": False})
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(inputs["input_ids"])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxopt.GuardWarning)
        found = fast.generate(**inputs, **settings)
    assert found.shape == model.generate(**inputs, **settings).shape
    assert fxopt.report(fast).to_json()["missed"]


@pytest.mark.parametrize("order", ["fold_batchnorm,autocast", "inference,autocast", "autocast,eliminate_dead_code"])
def test_it_composes_with_folding_and_clean_ups(order: str) -> None:
    torch.manual_seed(0)
    model, inputs = resnet()
    fast = optimized(model.eval(), inputs, order)
    assert regions(fast) and parse(order)
    expected, found = result(model, inputs), result(fast, inputs)
    assert 0 < (found - expected).abs().max() <= 0.05 * expected.abs().max()
    assert torch.equal(result(fxopt.restore(fast), inputs), expected)


class Ensemble(nn.Module):
    """Heads that are fused, and a body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.body(x))
        return torch.stack([head(x) for head in self.heads])


@pytest.mark.parametrize("order", ["fuse_ensembles,autocast", "autocast,fuse_ensembles"])
def test_it_composes_with_ensembles(order: str) -> None:
    torch.manual_seed(0)
    model, x = Ensemble(), torch.randn(5, 16)
    fast = fxopt.optimize(model, order, example_inputs=(x,), measure=False, time_budget=60)
    statuses = {each.pass_name: each.status for each in fxopt.plan(fast).decisions if each.status == "applied"}
    assert "autocast" in statuses and (fast(x) - model(x)).abs().max() <= 0.05 * model(x).abs().max()
    assert list(fast.state_dict()) == list(model.state_dict())
    fast.load_state_dict(model.state_dict())
