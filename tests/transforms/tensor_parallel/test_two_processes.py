"""tensor_parallel over two processes: gradients, steps and checkpoints against one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from across_ranks import apart, gap, gradients, said, whole
from support.fused_layers import SPELLINGS, Language
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fxopt
from fxopt.runtime.record import state_map_of


def models() -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    import transformers as tf

    torch.manual_seed(0)
    ids, shared = torch.randint(0, 64, (2, 7)), {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    bert = tf.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=16, **shared,
    )  # fmt: skip
    gpt2 = tf.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, **shared,
    )  # fmt: skip
    llama = tf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False, **shared,
    )  # fmt: skip
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    yield tf.BertForSequenceClassification(bert), {"input_ids": ids, "attention_mask": mask}
    yield tf.GPT2LMHeadModel(gpt2), {"input_ids": ids}
    yield tf.LlamaForCausalLM(llama), {"input_ids": ids}


def by_old_names(fast: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors of an optimized model by the names of the original."""
    state_map = state_map_of(fast)
    assert state_map is not None
    old = state_map.backward(state)
    return {name: old[name] for name in state_map.names if name in old}


def on_rank_real() -> Any:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for (model, inputs), flags in zip(models(), ({"foreach": True}, {"fused": True}, {}), strict=True):
        model = model.double()
        plain = copy.deepcopy(model)
        own, theirs = (torch.optim.AdamW(each.parameters(), 0.01, **flags) for each in (model, plain))
        fast = fxopt.optimize(model, "tensor_parallel", example_inputs=inputs, optimizer=own)
        norms = list[Tensor]()
        for each, optimizer in ((fast, own), (plain, theirs)):
            each(**inputs).logits.square().mean().backward()
            norms.append(whole(nn.utils.clip_grad_norm_(each.parameters(), 0.01)))
            optimizer.step()
        moments, known = (
            {name: whole(state["exp_avg"]) for name, state in get_optimizer_state_dict(of, by)["state"].items()}
            for of, by in ((fast, own), (plain, theirs))
        )
        moments = by_old_names(fast, moments)
        split = sum(type(parameter.data).__name__ == "DTensor" for parameter in fast.parameters())
        loaded = copy.deepcopy(model)
        loaded.load_state_dict(fxopt.state_dict(fast))
        sites = [d.site["data"]["rows"] for d in fxopt.plan(fast).decisions if d.status == "applied"]
        differences = (
            apart(by_old_names(fast, gradients(fast)), gradients(plain)),
            apart(loaded.state_dict(), plain.state_dict()),
        )
        fxopt.load_state_dict(fast, model.state_dict())
        differences += (apart(fxopt.state_dict(fast), model.state_dict()),)
        differences += gap(*norms), apart(moments, known)
        found[type(model).__name__] = sites, split, differences
    return found


def on_rank_fused() -> dict[str, tuple[float, ...]]:
    warnings.simplefilter("ignore")
    found: dict[str, tuple[float, ...]] = {}
    for spelling, (make, _, _) in SPELLINGS.items():
        torch.manual_seed(1)
        model, x = make().double(), torch.randn(2, 5, 16, dtype=torch.float64)
        fast = fxopt.optimize(model, "tensor_parallel", example_inputs=x)
        for each in (fast, model):
            each(x).square().sum().backward()
        errors = [apart(by_old_names(fast, gradients(fast)), gradients(model)), gap(fast(x[:1]), model(x[:1]))]
        errors.append(apart(fxopt.state_dict(fast), model.state_dict()))
        other = make().double()
        fxopt.load_state_dict(fast, other.state_dict())
        found[spelling] = (*errors, gap(fast(x), other(x)))
    return found


def on_rank_vocabulary() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for tied in (True, False):
        torch.manual_seed(2)
        model, ids = Language(tied=tied).double(), torch.randint(0, 65, (2, 2, 5))
        ids[1, 0, :2] = -1
        ids[0, 0, 0] = 64  # the padding row
        calls = [(ids[0], ids[1]), (ids[0],)][: 1 + tied]  # untied: calls without targets run the original forward
        fast = fxopt.optimize(model, "tensor_parallel", example_inputs=calls)
        losses = [each(*calls[0]) for each in (fast, model)]
        for loss in losses:
            loss.backward()
        errors = [
            gap(*losses),
            apart(by_old_names(fast, gradients(fast)), gradients(model)),
            gap(fast(ids[0]), model(ids[0])),
        ]
        for each in (fast, model):
            each.zero_grad()
            each(ids[0]).square().sum().backward()
        errors += [
            apart(by_old_names(fast, gradients(fast)), gradients(model)),
            apart(fxopt.state_dict(fast), model.state_dict()),
        ]
        parts = fast.words.weight.to_local().shape[0], fast.head.weight.to_local().shape[0]
        is_one = fast.words.weight is fast.head.weight
        wrong = [said(lambda fast=fast, given=given: fast(given)) for given in (torch.tensor([[65]]), ids[0, :0])]
        found[str(tied)] = errors, parts, is_one, wrong
    return found


def language(**options: Any) -> nn.Module:
    """Return a GPT-2, whose code writes numbers of outputs and keeps keys and values in a cache."""
    import transformers as tf

    torch.manual_seed(4)
    config = tf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=64, bos_token_id=1, eos_token_id=2, **options
    )
    model = tf.GPT2LMHeadModel(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def on_rank_cache() -> dict[str, Any]:
    """Calls that no graph fits, since they have a cache: one given to `generate`, and one that goes on by hand."""
    warnings.simplefilter("ignore")
    found, ids = dict[str, Any](), torch.randint(3, 64, (2, 7))
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    for passes in ("tensor_parallel", "parallel{tensor=2}"):
        model = language()
        inputs = {"input_ids": ids, "use_cache": False}
        fast = fxopt.optimize(model, passes, example_inputs=inputs, measure=False)
        with torch.no_grad():
            written, wanted = (each.generate(ids, **asked) for each in (fast, model))
            errors = [gap(*logits) for logits in zip(written.logits, wanted.logits, strict=True)]
            states = [each(ids[:, :5], use_cache=True) for each in (fast, model)]
            after = [
                each(ids[:, 5:], past_key_values=state.past_key_values).logits
                for each, state in zip((fast, model), states, strict=True)
            ]
            errors += [gap(states[0].logits, states[1].logits), gap(*after)]
        for each in (fast, model):
            each(ids, use_cache=True).logits.square().mean().backward()
        errors.append(apart(by_old_names(fast, gradients(fast)), gradients(model)))
        found[passes] = errors, torch.equal(written.sequences, wanted.sequences), len(sections(fast))
    return found


def sections(fast: nn.Module) -> list[str]:
    """Return the layers of several parts, of which each process has a share."""
    data = (d.site["data"] for d in fxopt.plan(fast).decisions if d.status == "applied")
    blocks = (block for each in data for block in each.get("blocks", [each]))
    return [name for block in blocks for name in block.get("sections", ())]


def on_rank_other_rows() -> list[str]:
    """Batches of other sizes and of other values, an empty one, and then the same rows again."""
    torch.manual_seed(5)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(6, 4)
    rank, found = distributed.get_rank(), list[str]()
    for passes in ("tensor_parallel", "parallel{tensor=2}"):
        fast = fxopt.optimize(model, passes, example_inputs=x)
        for rows in (x[rank:], x * (1 + rank), x[: 6 * rank], x):
            found.append(said(lambda fast=fast, rows=rows: fast(rows).sum().backward()))
    return found


class InPlace(nn.Module):
    """Writes into what its layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu_(self.up(x)))
        y += x
        return y


def on_rank_in_place() -> list[tuple[int, float]]:
    torch.manual_seed(6)
    models, x = (InPlace(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))), torch.randn(6, 4)
    found = list[tuple[int, float]]()
    for model in models:
        fast = fxopt.optimize(model.train(), "tensor_parallel", example_inputs=x)
        for each in (fast, model):
            each(x).square().sum().backward()
        sites = [d for d in fxopt.plan(fast).decisions if d.status == "applied"]
        found.append((len(sites), apart(gradients(fast), gradients(model))))
    return found


def on_rank_other_weights() -> str:
    torch.manual_seed(distributed.get_rank())
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return said(lambda: fxopt.optimize(model, "tensor_parallel", example_inputs=torch.ones(2, 4)))


def on_rank_embeddings() -> list[str]:
    found = list[str]()
    for options in ({"sparse": True}, {"max_norm": 0.5}):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Embedding(40, 4, **options), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        ids = torch.zeros(2, 3, dtype=torch.long)
        found.append(said(lambda model=model, ids=ids: fxopt.optimize(model, "tensor_parallel", example_inputs=ids)))
    return found


def test_real_models_have_the_gradients_of_one_process(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        rows = {name: sites for name, (sites, _, _) in each["real"].items()}  # of a vocabulary there are none
        block = "transformer.h.0"
        assert rows["GPT2LMHeadModel"] == [[f"{block}.attn.c_proj"], [f"{block}.mlp.c_proj"], []]
        assert len(rows["BertForSequenceClassification"]) == 4
        block = "model.layers.0"
        assert rows["LlamaForCausalLM"] == [[f"{block}.self_attn.o_proj"], [f"{block}.mlp.down_proj"], []]
        for _, split, (gradient, stepped, loaded, norm, moments) in each["real"].values():
            assert gradient < 1e-9 and stepped < 1e-9 and loaded == 0 and split > 3
            assert norm < 1e-9 and moments < 1e-9


def test_layers_of_several_parts_have_the_gradients_of_one_process(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert {spelling: max(errors) for spelling, errors in each["fused"].items() if max(errors) > 1e-12} == {}


def test_a_vocabulary_has_the_loss_and_the_gradients_of_one_process(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        for tied, (errors, parts, is_one, (out_of_range, empty)) in each["vocabulary"].items():
            assert max(errors) < 1e-12, errors
            assert parts == ((33, 33), (32, 32))[rank]
            assert str(is_one) == tied
            assert out_of_range == "IndexError: index out of range: the vocabulary has 65 words"
            assert "InputError: a layer that is split over processes gets [0, 5, 16], without rows" in empty


def test_calls_with_a_cache_have_the_logits_of_one_process(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        for errors, is_equal, fused in each["cache"].values():
            assert max(errors) < 1e-12 and is_equal
            assert fused == 2


def test_layers_whose_outputs_are_written_to_are_split(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert all(sites == 1 and error < 1e-5 for sites, error in each["in_place"])


def test_processes_with_other_rows_are_refused(of_ranks: list[dict[str, Any]]) -> None:
    refused = (
        "UsageError: rank 1 was given other rows than rank 0, and both compute parts of the same layers; give them"
    )
    for each in of_ranks:
        for *wrong, right in (each["other_rows"][:4], each["other_rows"][4:]):
            assert all(text.startswith(refused) for text in wrong)
            assert right == "nothing was raised"


def test_processes_with_other_weights_are_refused(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert "of rank 1 is not that of rank 0; seed all processes alike" in each["other_weights"]


def test_embeddings_that_no_mesh_takes_are_refused(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        for said_of, option in zip(each["embeddings"], ("sparse=True", "max_norm=0.5"), strict=True):
            assert f"an embedding of 40 rows has {option}, which does not go with parameters on a mesh" in said_of
            assert said_of.startswith("UsageError")
