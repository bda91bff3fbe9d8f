"""Standalone archives of models from `transformers`: whole where they are captured whole, refused by name otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.errors import ArchiveError, GuardError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=99, **SMALL))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def ids(rows: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(0, 99, (rows, length))}


MODELS: dict[str, Any] = {
    "bert": (bert, ids(2, 7), [ids(1, 12), ids(3, 5)]),
    "gpt2": (gpt2, ids(2, 7), [ids(3, 12), ids(2, 5)]),
    "resnet": (resnet, {"pixel_values": torch.randn(2, 3, 32, 32)}, [{"pixel_values": torch.randn(4, 3, 48, 40)}]),
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_give_the_same_bits(name: str, tmp_path: Path):
    make, inputs, others = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    fast = fxopt.optimize(model, [], example_inputs=inputs)
    fxopt.save(fast, tmp_path / "m", kind="standalone")
    flat = fxopt.load(tmp_path / "m")
    for call in (inputs, *others):
        for training in (False, True):
            torch.manual_seed(1)
            found = flat.train(training)(**call)
            torch.manual_seed(1)
            expected = model.train(training)(**call)
            assert type(found) is dict
            torch.testing.assert_close(found["logits"], expected.logits, rtol=0, atol=0)
        flat.eval()
        model.eval()
    assert list(flat.state_dict()) == list(model.state_dict())
    with pytest.raises(GuardError, match="labels"):
        flat(**inputs, labels=torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same(name: str, tmp_path: Path):
    make, inputs, _ = MODELS[name]
    model = make().eval()
    fxopt.save(fxopt.optimize(model, [], example_inputs=inputs), tmp_path / "m", kind="standalone")
    flat = fxopt.load(tmp_path / "m")
    flat(**inputs)["logits"].square().sum().backward()
    model(**inputs).logits.square().sum().backward()
    for (key, mine), theirs in zip(flat.named_parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


def test_tied_embeddings_stay_tied(tmp_path: Path):
    fast = fxopt.optimize(gpt2().eval(), [], example_inputs=ids(2, 7))
    fxopt.save(fast, tmp_path / "m", kind="standalone")
    flat = fxopt.load(tmp_path / "m")
    assert flat.lm_head.weight is flat.transformer.wte.weight


def test_optimized_models_are_saved_too(tmp_path: Path):
    model = resnet().eval()
    call = MODELS["resnet"][1]
    fast = fxopt.optimize(model, "inference", example_inputs=call, measure=False)
    fxopt.save(fast, tmp_path / "m", kind="standalone")
    torch.testing.assert_close(fxopt.load(tmp_path / "m")(**call)["logits"], fast(**call).logits, rtol=0, atol=0)


def test_loads_without_transformers(tmp_path: Path):
    call = ids(2, 7)
    fast = fxopt.optimize(bert().eval(), [], example_inputs=call)
    fxopt.save(fast, tmp_path / "m", kind="standalone")
    torch.save((call, fast(**call).logits.detach()), tmp_path / "case.pt")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch, fxopt\n"
        "call, expected = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(fxopt.load(sys.argv[1])(**call)['logits'], expected, rtol=0, atol=0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m"), str(tmp_path / "case.pt")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_decides_by_the_mask_is_refused_by_name(tmp_path: Path):
    call = ids(2, 7)
    call["attention_mask"] = torch.ones_like(call["input_ids"])
    fast = fxopt.optimize(bert().eval(), [], example_inputs=call)
    with pytest.raises(ArchiveError, match=r"module 'bert' \(\w+\.py:\d+\): it decides by the data in a tensor"):
        fxopt.save(fast, tmp_path / "m", kind="standalone")
    assert not (tmp_path / "m").exists()


def test_caches_are_refused_by_name(tmp_path: Path):
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    fast = fxopt.optimize(transformers.GPT2LMHeadModel(config).eval(), [], example_inputs=ids(2, 7))
    with pytest.raises(ArchiveError, match="module '"):
        fxopt.save(fast, tmp_path / "m", kind="standalone")
