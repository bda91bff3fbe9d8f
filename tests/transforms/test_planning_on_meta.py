"""Plans of models that are larger than one process: made on the meta device, in one process of a group that is fake."""

from __future__ import annotations

import warnings
from collections.abc import Generator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fxopt
from fxopt.runtime.graphs import capture_of

_RANKS = 8


def llama(layers: int = 8) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8, **sizes)
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def mixtral() -> MixtralForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_local_experts": _RANKS}
    config = MixtralConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, **sizes)
    with torch.device("meta"):
        return MixtralForCausalLM(config).train()


def batch() -> dict[str, object]:
    return {"input_ids": torch.zeros(2, 6, dtype=torch.long), "use_cache": False}


@pytest.fixture
def ranks() -> Generator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    yield
    distributed.destroy_process_group()


def test_layers_that_differ_in_their_number_share_their_graphs():
    program = fxopt.capture(llama(), batch())
    assert not program.opaque
    layers = program.model.model.layers
    for name in ("", "self_attn", "mlp"):
        assert len({id(capture_of(layer.get_submodule(name))) for layer in layers}) == 1


def test_layers_whose_number_is_read_do_not_share():
    program = fxopt.capture(llama(3), {**batch(), "use_cache": True})
    assert len({id(capture_of(layer.self_attn)) for layer in program.model.model.layers}) == 3


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_planned(dtype: torch.dtype):
    text = f"fuse_experts{{lowering=loop}},parallel{{shard={_RANKS},experts=true}}"
    fast = fxopt.optimize(mixtral().to(dtype), text, example_inputs=batch())
    assert f"experts of 2 mixtures dealt to {_RANKS}" in str(fxopt.report(fast))
    experts = fast.model.layers[1].mlp.experts
    assert experts.down_proj.shape == (_RANKS, 32, 64)
    assert experts.down_proj.to_local().shape == (1, 32, 64)


def test_experts_that_decide_by_data_say_what_to_do():
    model = mixtral()
    model.set_experts_implementation("eager")
    with pytest.raises(fxopt.InputError, match="keep experts_implementation=grouped_mm, which decides by none"):
        fxopt.optimize(model, "eliminate_dead_code", example_inputs=batch())


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fsdp", "model.layers.0 and 7 more"),
        ("tensor_parallel", "rows of model.layers.7.mlp.down_proj"),
        ("pipeline", f"{_RANKS} stages"),
        ("parallel{data=2,shard=2,tensor=2}", "16 blocks and 1 vocabulary split over 2; 9 units in 2"),
        ("parallel{shard=2,tensor=2,pipeline=2}", " units in 2 shards; 2 stages"),
    ],
)
def test_a_plan_without_weights(text: str, said: str):
    fast = fxopt.optimize(llama(), text, example_inputs=batch())
    report = str(fxopt.report(fast))
    assert said in report
    assert "not compared: the model is on the meta device" in report


class _Members(nn.Module):
    """An ensemble and a vocabulary beside layers that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)))
        self.members = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        x = self.blocks(self.words(words))
        return self.head(torch.stack([member(x) for member in self.members]).mean(0))


@pytest.mark.usefixtures("ranks")
def test_what_stays_whole_with_stages_is_in_the_report():
    with torch.device("meta"):
        model = _Members()
    text = "fuse_ensembles{lowering=bmm},parallel{data=2,tensor=2,pipeline=2}"
    report = str(fxopt.report(fxopt.optimize(model, text, example_inputs=torch.zeros(4, 6, dtype=torch.long))))
    assert "4 blocks split over 2" in report
    assert "with stages, a vocabulary stays whole" in report
    assert "with stages, each process computes all members of an ensemble" in report


@pytest.mark.parametrize("text", ["checkpoint{budget=0.5}", "autocast"])
def test_rewrites_are_planned_without_weights(text: str):
    with warnings.catch_warnings(action="ignore"):
        fast = fxopt.optimize(llama(2), text, example_inputs=batch())
    assert any(decision.status == "applied" for decision in fxopt.plan(fast).decisions)


@pytest.mark.parametrize("text", ["qat", "prune"])
def test_what_needs_the_numbers_of_weights_says_so(text: str):
    with pytest.raises(fxopt.UsageError, match="is on the meta device"):
        fxopt.optimize(llama(1), text, example_inputs=batch())
