"""Split layers and a split vocabulary: torch's styles and `loss_parallel` by hand, and the pass `tensor_parallel`."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel
from transformers.pytorch_utils import Conv1D

from .collectives import given_to_all, summed_over_all
from .models import Made
from .steps import by_pass, training_step
from .way import Step, Way

WORDS, WIDTH = 8000, 256


class WithLoss(nn.Module):
    """A model with a head, and the mean loss over all words."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.model(input_ids=ids).last_hidden_state[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _made(model: nn.Module) -> Made:
    whole, ids = WithLoss(model).train(), torch.randint(0, WORDS, (8, 64))
    return whole, lambda model: model(ids), {"ids": ids}


def llama() -> Made:
    """Return a Llama of 7 million parameters, and 8 rows of 64 words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    return _made(LlamaModel(config))


def gpt2() -> Made:
    """Return a GPT-2 of 8 million parameters, whose queries, keys and values are one layer, and 8 rows of 64 words."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=WIDTH, n_layer=6, n_head=4, vocab_size=WORDS, n_positions=128, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _made(GPT2Model(config))


def llama_by_hand() -> Step:
    """Write the plan of each layer, and open `loss_parallel` around a step."""
    model, loss, _ = llama()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for number in range(4):
        layer = f"model.layers.{number}"
        plan |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{layer}.self_attn.o_proj": RowwiseParallel(), f"{layer}.mlp.down_proj": RowwiseParallel()}
    parallelize_module(model, mesh, plan)

    step = training_step(model, loss)

    def with_loss() -> None:
        with loss_parallel():
            step()

    return with_loss


def _columns(layer: Conv1D, parts: int) -> Conv1D:
    """Return the share of each part of a layer's outputs."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    made = Conv1D(layer.nf // size, layer.nx)
    for own, whole in ((made.weight, layer.weight), (made.bias, layer.bias)):
        shares = [part.chunk(size, -1)[rank] for part in whole.detach().chunk(parts, -1)]
        own.data = torch.cat(shares, -1).contiguous()
    made.register_forward_pre_hook(lambda _, args: (given_to_all(args[0]),))
    return made


class _Rows(nn.Module):
    """A share of a layer's inputs, and the sum of the results."""

    def __init__(self, layer: Conv1D) -> None:
        super().__init__()
        rank, size = distributed.get_rank(), distributed.get_world_size()
        self.weight = nn.Parameter(layer.weight.detach().chunk(size)[rank].clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return summed_over_all(x @ self.weight) + self.bias


def gpt2_by_hand() -> Step:
    """Cut the layers, and leave the vocabulary whole, as `parallelize_module` has no style for `Conv1D`."""
    made, loss, _ = gpt2()
    model = cast("Any", made)
    for block in model.model.h:
        attention, mlp = block.attn, block.mlp
        attention.split_size //= distributed.get_world_size()
        attention.c_attn, attention.c_proj = _columns(attention.c_attn, 3), _Rows(attention.c_proj)
        mlp.c_fc, mlp.c_proj = _columns(mlp.c_fc, 1), _Rows(mlp.c_proj)
    return training_step(model, loss)


WAYS = [
    Way("tensor, Llama", llama_by_hand, lambda: by_pass(llama, "tensor_parallel")),
    Way("tensor, GPT-2", gpt2_by_hand, lambda: by_pass(gpt2, "tensor_parallel")),
]
