"""Models with the call that is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ordinary_models import CASES as ORDINARY
from torch import nn

from .prepared import Inputs

__all__ = ["CASES", "Case", "Greedy"]

LAYERS = ("float32 eager", "float32 compiled", "torchao dynamic eager", "torchao dynamic compiled")
ALL = (*LAYERS, "fxopt int8_dynamic", "fxopt int8_weight", "fxopt int4_weight", "fxopt float8", "fxopt int8_static")
DECODING = ("float32 eager", "bfloat16 eager", "torchao int8_weight eager", "fxopt int8_dynamic", "fxopt int8_weight")
STATIC = ("PT2E static compiled", "onnxruntime static", "NNCF on OpenVINO")
DYNAMIC = ("PT2E dynamic compiled", "onnxruntime dynamic")
WITH_ENGINES = ("fxopt preset int8", "fxopt int8_static, engine")
OF_METHODS = (
    "float32 eager", "torchao dynamic eager", "fxopt int8_dynamic rtn", "fxopt int8_dynamic smoothquant",
    "fxopt int8_static rtn", "fxopt int8_static smoothquant",
    "torchao int8_weight eager", "fxopt int8_weight rtn", "fxopt int8_weight gptq", "fxopt int4_weight rtn",
    "fxopt int4_weight awq", "fxopt int4_weight gptq",
)  # fmt: skip
TOKENS = 24


@dataclass(frozen=True)
class Case:
    """A model, its call, and the ways that make sense for it.

    Attributes:
        build: returns the model and its inputs.
        ways: names of ways.
        tokens: how many tokens one call generates; 0 for models that generate none.
    """

    build: Callable[[], tuple[nn.Module, Inputs]]
    ways: Sequence[str]
    tokens: int = 0


class Linear(nn.Module):
    """A linear layer 1024-4096 and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Convolutions(nn.Module):
    """Two convolutions with ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 128, 3, padding=1), nn.Conv2d(128, 128, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


class Greedy(nn.Module):
    """A decoder that generates tokens, one after another, with a cache; returned are the logits of the prompt."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        decoder: Any = self.decoder
        output = prompt = decoder(input_ids=input_ids, use_cache=True)
        for _ in range(TOKENS - 1):
            token = output.logits[:, -1:].argmax(-1)
            output = decoder(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        return prompt.logits


def linear(batch: int) -> tuple[nn.Module, Inputs]:
    """Return a linear layer at a batch size."""
    return Linear(), (torch.randn(batch, 1024),)


def convolutions() -> tuple[nn.Module, Inputs]:
    """Return the net of two convolutions."""
    return Convolutions(), (torch.randn(8, 64, 28, 28),)


def bert() -> tuple[nn.Module, Inputs]:
    """Return a BERT of 6 layers, 8 rows of 128 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=6, vocab_size=8000, attention_probs_dropout_prob=0.0)
    return BertModel(config), {"input_ids": torch.randint(0, 8000, (8, 128))}


def resnet() -> tuple[nn.Module, Inputs]:
    """Return ResNet-18 as transformers has it, 4 images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic")
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(4, 3, 224, 224)}


def llama() -> tuple[nn.Module, Inputs]:
    """Return a Llama of 8 layers that continues a prompt of 16 tokens, batch 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=8000)
    return Greedy(LlamaForCausalLM(config)), (torch.randint(0, 8000, (1, 16)),)


OUTLIERS, TIMES_AS_LARGE = 6, 10.0


def outliers() -> tuple[nn.Module, Inputs]:
    """Return a Llama of 4 layers whose norms make 6 of 512 channels 10 times as large as the others, 2 rows of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=2000))
    large = torch.randperm(512)[:OUTLIERS]
    with torch.no_grad():
        for name, norm in model.named_parameters():
            if "layernorm" in name:
                norm.mul_(torch.exp(0.3 * torch.randn(512)))
                norm[large] *= TIMES_AS_LARGE
    return model, {"input_ids": torch.randint(0, 2000, (2, 64))}


IMAGES = (*LAYERS[:2], *STATIC, "fxopt int8_static", *WITH_ENGINES)
TEXTS = (*LAYERS, *DYNAMIC, *STATIC, "fxopt int8_dynamic", "fxopt int8_static", *WITH_ENGINES)
ANY_ERROR = "fxopt int8_static, any error"
STEPS = (*DECODING[:3], *DYNAMIC, *STATIC, *DECODING[3:], "fxopt int8_static", ANY_ERROR, *WITH_ENGINES)
CASES = {
    "linear batch 8": Case(partial(linear, 8), ALL),
    "linear batch 128": Case(partial(linear, 128), ALL),
    "convolutions": Case(convolutions, (*LAYERS[:2], "fxopt int8_static")),
    "bert": Case(bert, TEXTS),
    "bert-base": Case(ORDINARY["bert-base, 64 tokens"].built, TEXTS),
    "resnet": Case(resnet, IMAGES),
    "resnet-50": Case(ORDINARY["resnet-50"].built, (*IMAGES, "fxopt int8_static, engine, any error")),
    "llama with outliers": Case(outliers, OF_METHODS),
    "gpt2, a step": Case(ORDINARY["gpt2, a step"].built, STEPS),
    "llama decoding": Case(llama, (*DECODING, "fxopt int4_weight"), TOKENS),
}
