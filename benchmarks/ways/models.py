"""The models that are trained, each with a loss and example inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

__all__ = ["Loss", "Made", "Make", "bert", "gpt2", "resnet"]

Loss = Callable[[nn.Module], Tensor]
"""Gives the loss of a model on its example inputs."""

Made = tuple[nn.Module, Loss, dict[str, Tensor]]
Make = Callable[[], Made]


def bert() -> Made:
    """Return a BERT of 5 million parameters and a loss that leaves its pooler out."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=8000
    )
    inputs = {"input_ids": torch.randint(0, 8000, (4, 32))}
    return BertModel(config), lambda model: model(**inputs).last_hidden_state.square().mean(), inputs


def resnet() -> Made:
    """Return a ResNet of 1.5 million parameters, whose buffers rank 0 has the say of."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic")
    inputs = {"pixel_values": torch.randn(4, 3, 48, 48)}
    return ResNetForImageClassification(config), lambda model: model(**inputs).logits.square().mean(), inputs


def gpt2() -> Made:
    """Return a GPT-2 of 7 million parameters, whose head is tied to its embedding."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=8000, n_positions=128, use_cache=False)
    inputs = {"input_ids": torch.randint(0, 8000, (8, 64))}
    return GPT2LMHeadModel(config), lambda model: model(**inputs, labels=inputs["input_ids"]).loss, inputs
