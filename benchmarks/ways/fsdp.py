"""Sharded training: `fully_shard` of each block and the root by hand, and the pass `fsdp`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import fxopt

from .ddp import bert, resnet
from .way import Step, Way

Loss = Callable[[nn.Module], Tensor]
Made = tuple[nn.Module, Loss, dict[str, Tensor]]


def gpt2() -> Made:
    """Return a GPT-2 of 7 million parameters, whose head is tied to its embedding."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=8000, n_positions=128, use_cache=False)
    inputs = {"input_ids": torch.randint(0, 8000, (8, 64))}
    return GPT2LMHeadModel(config), lambda model: model(**inputs, labels=inputs["input_ids"]).loss, inputs


def _by_hand(make: Callable[[], Made], blocks: Callable[[Any], Sequence[nn.Module]]) -> Step:
    model, loss, _ = make()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in blocks(model.train()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(model, loss)


def _by_pass(make: Callable[[], Made]) -> Step:
    model, loss, inputs = make()
    return _step(fxopt.optimize(model.train(), "fsdp", example_inputs=inputs), loss)


def _step(model: nn.Module, loss: Loss) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(distributed.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


WAYS = [
    Way("fsdp, BERT", lambda: _by_hand(bert, lambda model: model.encoder.layer), lambda: _by_pass(bert)),
    Way("fsdp, GPT-2", lambda: _by_hand(gpt2, lambda model: model.transformer.h), lambda: _by_pass(gpt2)),
    Way("fsdp, ResNet", lambda: _by_hand(resnet, lambda model: model.resnet.encoder.stages), lambda: _by_pass(resnet)),
]
