"""The passes for training together, on real models in two processes: a step, saved, loaded by the plain class."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from across_ranks import own_rows, shared_folder
from torch import Tensor, distributed, nn

import fxopt
from fxopt.errors import UnverifiedWarning

pytest.importorskip("transformers")

ROWS = 4
REGIONS = "sync_batchnorm,autocast{dtype=bfloat16},checkpoint{budget=0}"

Batch = dict[str, Tensor]


def bert() -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
    model = BertForSequenceClassification(BertConfig(intermediate_size=64, **sizes, **NO_DROPOUT))
    return model, {"input_ids": torch.randint(90, (ROWS, 12)), "labels": torch.randint(2, (ROWS,))}


def t5() -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=90, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), {
        "input_ids": torch.randint(90, (ROWS, 12)),
        "labels": torch.randint(90, (ROWS, 8)),
    }


def resnet() -> tuple[nn.Module, Batch]:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_labels=4, **sizes))
    return model, {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(4, (ROWS,))}


NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"bert": bert, "t5": t5, "resnet": resnet}
LAST = {"bert": "ddp", "t5": "fsdp", "resnet": "ddp"}


def made(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return float(loss)


def on_rank_composed() -> Any:
    warnings.simplefilter("ignore", UnverifiedWarning)
    return {name: composed(name, f"{REGIONS},{LAST[name]}") for name in MODELS}


def composed(name: str, pipeline: str) -> dict[str, Any]:
    """Take a step on half of the rows in each process, and on all of them with the plain model."""
    model, batch = made(name)
    mine = own_rows(batch)
    plain, narrow = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fast = fxopt.optimize(model, pipeline, example_inputs=mine, optimizer=optimizer, measure=False)
    stepped(fast, optimizer, mine)
    stepped(plain, torch.optim.SGD(plain.parameters(), 0.1), batch)
    with torch.autocast("cpu", torch.bfloat16):
        stepped(narrow, torch.optim.SGD(narrow.parameters(), 0.1), batch)
    state, expected, start = fxopt.state_dict(fast), plain.state_dict(), model.state_dict()
    moved = [key for key, tensor in start.items() if tensor.is_floating_point() and "running" not in key]

    def far(from_it: Mapping[str, Tensor]) -> float:
        return float(sum((from_it[key] - expected[key]).square().sum() for key in moved) ** 0.5)

    loads = made(name)[0].load_state_dict(state)
    path = shared_folder() / "model.fxopt"
    fxopt.save(fast, path, factory="test_composition:unused")
    distributed.barrier()
    loaded = fxopt.load(path, model=made(name)[0], example_inputs=mine)
    same = all(torch.equal(tensor, state[key]) for key, tensor in loaded.state_dict().items())
    applied = {d.pass_name for d in fxopt.plan(fast).decisions if d.status == "applied"}
    off, of_torch = far(state) / far(start), far(narrow.state_dict()) / far(start)
    return {
        "off": off, "of_torch": of_torch, "loads": loads == ([], []), "saved": same, "applied": sorted(applied)
    }  # fmt: skip


def unused() -> nn.Module:
    return nn.Identity()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_passes_compose_on_real_models(of_ranks: list[dict[str, Any]], name: str) -> None:
    for each in of_ranks:
        found = each["composed"][name]
        assert found["off"] < 0.05 + found["of_torch"], "as the plain model steps, within what bfloat16 does"
        assert found["loads"] and found["saved"]
        assert {"autocast", "checkpoint", LAST[name]} <= set(found["applied"])
        assert ("sync_batchnorm" in found["applied"]) == (name == "resnet")
