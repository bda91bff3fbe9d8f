"""tensor_parallel over two processes: gradients, steps and checkpoints against one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from across_ranks import apart, gap, gradients, said, whole
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fxopt


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
        split = sum(type(parameter.data).__name__ == "DTensor" for parameter in fast.parameters())
        loaded = copy.deepcopy(model)
        loaded.load_state_dict(fxopt.state_dict(fast))
        sites = [d.site["data"]["rows"] for d in fxopt.plan(fast).decisions if d.status == "applied"]
        differences = apart(gradients(fast), gradients(plain)), apart(loaded.state_dict(), plain.state_dict())
        fxopt.load_state_dict(fast, model.state_dict())
        differences += (apart(fxopt.state_dict(fast), model.state_dict()),)
        differences += gap(*norms), apart(moments, known)
        found[type(model).__name__] = sites, split, differences
    return found


def on_rank_other_weights() -> str:
    torch.manual_seed(distributed.get_rank())
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return said(lambda: fxopt.optimize(model, "tensor_parallel", example_inputs=torch.ones(2, 4)))


def test_real_models_have_the_gradients_of_one_process(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        rows = {name: sites for name, (sites, _, _) in each["real"].items()}
        assert rows["GPT2LMHeadModel"] == [["transformer.h.0.mlp.c_proj"]]
        assert len(rows["BertForSequenceClassification"]) == 4
        assert rows["LlamaForCausalLM"] == [["model.layers.0.self_attn.o_proj"], ["model.layers.0.mlp.down_proj"]]
        for _, split, (gradient, stepped, loaded, norm, moments) in each["real"].values():
            assert gradient < 1e-9 and stepped < 1e-9 and loaded == 0 and split > 3
            assert norm < 1e-9 and moments < 1e-9


def test_processes_with_other_weights_are_refused(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert "of rank 1 is not that of rank 0; seed all processes alike" in each["other_weights"]
