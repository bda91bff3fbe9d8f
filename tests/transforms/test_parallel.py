"""Four processes over meshes of two dimensions: like one process on the whole batch.

All processes run the functions `on_rank_...` of this file once; the tests read what they give.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from across_ranks import apart, gap, gradients, said, shared_folder, whole
from ranks import results_of
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fxopt
from fxopt.layers import MixtureOfExperts
from fxopt.transforms.pipeline import PipelineModule

MESHES = {"data=2,shard=2": 4, "shard=2,tensor=2": 2, "data=2,pipeline=2": 2, "tensor=2,pipeline=2": 1}
"""The mesh, and among how many processes the rows are divided."""


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as tf

    torch.manual_seed(0)
    config = tf.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False, vocab_size=32, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).double().train(), {"input_ids": torch.randint(0, 32, (8, 5))}


def rows_of(text: str, ids: Tensor) -> Tensor:
    """Return this process's rows: the dimensions are numbered from the outermost, which is the pipeline's."""
    count = MESHES[text]
    inner = 2 if "tensor=2" in text else 1
    return ids[distributed.get_rank() // inner % count :: count].contiguous()


def loss_of(output: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), ids.flatten())


def train(model: nn.Module, ids: Tensor) -> None:
    if isinstance(model, PipelineModule):
        model.step({"input_ids": ids}, ids, loss_of)
    else:
        loss_of(model(input_ids=ids), ids).backward()


def clipped(model: nn.Module) -> Tensor:
    clip = getattr(model, "clip_grad_norm_", None)
    return clip(0.1) if clip else whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def on_rank_meshes() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    plain, inputs = llama()
    ids = inputs["input_ids"]
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    start = copy.deepcopy(plain.state_dict())
    train(plain, ids)
    wanted = {name: p.grad.clone() for name, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    theirs.step()
    plain.eval()
    folder, saved = shared_folder(), ""
    for text in MESHES:
        options = f"{text},microbatches=2" if "pipeline" in text else text
        model, _ = llama()
        own = torch.optim.AdamW(model.parameters(), 0.01, foreach=True)
        fast = fxopt.optimize(model, f"parallel{{{options}}}", example_inputs=inputs, optimizer=own)
        train(fast, rows_of(text, ids))
        each = gradients(fast)
        errors = {"gradients": apart(each, {name: wanted[name] for name in each}), "norm": gap(clipped(fast), norm)}
        own.step()
        assert set(get_optimizer_state_dict(fast, own)["state"]) == set(dict(fast.named_parameters()))
        errors["state"] = apart(fxopt.state_dict(fast), plain.state_dict())
        fast.eval()
        with torch.no_grad():
            errors["evaluation"] = gap(fast(input_ids=ids).logits, plain(input_ids=ids).logits)
        written = f"{folder}/{len(found)}"
        checkpoint.save({"model": fxopt.state_dict(fast, gather=False)}, checkpoint_id=written)
        fxopt.load_state_dict(fast, start)
        errors["restored"] = apart(fxopt.state_dict(fast), start)
        if saved:  # by another mesh
            state = fxopt.state_dict(fast, gather=False)
            checkpoint.load({"model": state}, checkpoint_id=saved)
            fxopt.load_state_dict(fast, state)
            errors["loaded"] = apart(fxopt.state_dict(fast), plain.state_dict())
        saved = written
        found[text] = errors
    return found


EXPERTS = {"data=2,shard=2": 4, "shard=2,tensor=2": 2, "shard=2,pipeline=2": 2}
"""The mesh, and among how many processes the rows are divided."""


def on_rank_experts() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text, parts in EXPERTS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(each for _ in range(2) for each in (nn.Linear(8, 8), MixtureOfExperts(8, 6, 4, 2))))
        x = torch.randn(8, 3, 8, dtype=torch.double)
        plain = copy.deepcopy(model.double())
        own, theirs = (torch.optim.SGD(each.parameters(), 1.0, 0.9, foreach=True) for each in (model, plain))
        options = f"{text},experts=true" + (",microbatches=2" if "pipeline" in text else "")
        fast = fxopt.optimize(model, f"parallel{{{options}}}", example_inputs=x, optimizer=own)
        rows = x[distributed.get_rank() // (2 if "tensor" in text else 1) % parts :: parts]
        if isinstance(fast, PipelineModule):
            fast.step(rows, rows, lambda output, _: output.square().mean())
        else:
            fast(rows).square().mean().backward()
        plain(x).square().mean().backward()
        norms = clipped(fast), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        own.step(), theirs.step()
        stacks = [parameter for parameter in fast.parameters() if parameter.ndim == 3]
        sizes = {len(cast("Any", stack).to_local()) for stack in stacks}
        found[text] = gap(*norms), apart(fxopt.state_dict(fast), plain.state_dict()), sizes
    return found


def on_rank_refused() -> list[str]:
    (model, inputs), folder = llama(), shared_folder()
    texts = [
        said(lambda text=text: fxopt.optimize(model, f"parallel{{{text}}}", example_inputs=inputs))
        for text in ("data=2,tensor=3", "tensor=4")
    ]
    x = torch.randn(4, 8)
    one, other = (
        fxopt.optimize(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)), "parallel{shard=4}", example_inputs=x)
        for width in map(seeded, (8, 16))
    )
    checkpoint.save({"model": fxopt.state_dict(one, gather=False)}, checkpoint_id=folder)
    try:
        checkpoint.load({"model": fxopt.state_dict(other, gather=False)}, checkpoint_id=folder)
    except checkpoint.api.CheckpointException as error:
        texts.append(str(error))
    return texts


def seeded(width: int) -> int:
    """Return a width, for a model that all processes draw alike."""
    torch.manual_seed(0)
    return width


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(Path(__file__), 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("text", MESHES)
def test_a_mesh_trains_like_one_process_on_the_whole_batch(of_four: list[dict[str, Any]], text: str) -> None:
    for each in of_four:
        assert max(each["meshes"][text].values()) < 1e-9, each["meshes"][text]


@pytest.mark.parametrize("text", EXPERTS)
def test_experts_on_a_mesh_train_like_one_process(of_four: list[dict[str, Any]], text: str) -> None:
    for each in of_four:
        norm, state, sizes = each["experts"][text]
        assert max(norm, state) < 1e-9
        assert sizes == ({1} if "tensor" in text else {2})


def test_what_does_not_fit_is_refused(of_four: list[dict[str, Any]]) -> None:
    for each in of_four:
        product, heads, checkpoint_of_another = each["refused"]
        assert "data=2 x tensor=3 makes 6 processes, and there are 4" in product
        assert (
            "Size mismatch between saved torch.Size([8, 8]) and current: torch.Size([16, 8])" in checkpoint_of_another
        )
        assert "2 heads do not divide by 4 processes" in heads


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("shard=0", "shard=0; give a number of processes from 1"),
        (
            "pipeline=2,param_dtype=bfloat16",
            "param_dtype=torch.bfloat16 does not work with stages; list autocast before it",
        ),
        ("tensor=2,param_dtype=bfloat16", "param_dtype=torch.bfloat16 does not work without data or shard"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: str, reason: str) -> None:
    with pytest.raises(fxopt.UsageError, match=reason):
        fxopt.optimize(nn.Linear(2, 2), f"parallel{{{options}}}", example_inputs=torch.randn(2, 2))
