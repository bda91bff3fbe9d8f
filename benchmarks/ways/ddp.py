"""Data parallel training: `DistributedDataParallel` by hand, and the pass `ddp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

import fxopt

from .way import Step, Way

Loss = Callable[[nn.Module], Tensor]


def bert() -> tuple[nn.Module, Loss, dict[str, Tensor]]:
    """Return a BERT of 5 million parameters and a loss that leaves its pooler out."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=8000
    )
    inputs = {"input_ids": torch.randint(0, 8000, (4, 32))}
    return BertModel(config), lambda model: model(**inputs).last_hidden_state.square().mean(), inputs


def resnet() -> tuple[nn.Module, Loss, dict[str, Tensor]]:
    """Return a ResNet of 1.5 million parameters, whose buffers rank 0 has the say of."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic")
    inputs = {"pixel_values": torch.randn(4, 3, 48, 48)}
    return ResNetForImageClassification(config), lambda model: model(**inputs).logits.square().mean(), inputs


def _by_hand(make: Callable[[], tuple[nn.Module, Loss, Any]], **settings: Any) -> Step:
    model, loss, _ = make()
    return _step(DistributedDataParallel(model.train(), **settings), loss)


def _by_pass(make: Callable[[], tuple[nn.Module, Loss, Any]]) -> Step:
    model, loss, inputs = make()
    return _step(fxopt.optimize(model.train(), "ddp", example_inputs=inputs), loss)


def _step(model: nn.Module, loss: Loss) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(distributed.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


WAYS = [
    Way("ddp, BERT", lambda: _by_hand(bert, find_unused_parameters=True), lambda: _by_pass(bert)),
    Way("ddp, ResNet", lambda: _by_hand(resnet), lambda: _by_pass(resnet)),
]
