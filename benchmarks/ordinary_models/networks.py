"""Ordinary networks at real size, with random weights: those of transformers, and plain ones where it has none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Graph",
    "Perceptron",
    "Step",
    "Tagger",
    "UNet",
    "bert_base",
    "convnext_tiny",
    "gpt2",
    "llama",
    "mobilenet_v2",
    "past",
    "resnet_18",
    "resnet_50",
    "tokens",
    "vit_small",
]


def tokens(count: int, vocabulary: int, rows: int = 1) -> Tensor:
    """Return random tokens."""
    return torch.randint(0, vocabulary, (rows, count))


def _resnet(depths: list[int], sizes: list[int], layer: str) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=depths, hidden_sizes=sizes, layer_type=layer, num_labels=1000)
    return ResNetForImageClassification(config)


def resnet_18() -> nn.Module:
    return _resnet([2, 2, 2, 2], [64, 128, 256, 512], "basic")


def resnet_50() -> nn.Module:
    return _resnet([3, 4, 6, 3], [256, 512, 1024, 2048], "bottleneck")


def mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000))


def convnext_tiny() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(num_labels=1000))


def vit_small() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000)
    return ViTForImageClassification(config)


def bert_base(labels: int | None = None) -> nn.Module:
    """Return the encoder, or with `labels` a classifier without dropout, whose steps can be compared."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    if labels is None:
        return BertModel(BertConfig())
    config = BertConfig(num_labels=labels, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def llama() -> Any:
    """Return a Llama of 125 million parameters, with a quarter as many heads of keys as of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Step(nn.Module):
    """One step of a decoder: a token behind `past`, keys and values of each layer in turn. Gives logits."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, token: Tensor, past: list[Tensor]) -> Tensor:
        from transformers import DynamicCache

        cache: Any = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        decoder: Any = self.decoder
        return decoder(input_ids=token, past_key_values=cache, use_cache=True).logits


def past(config: Any, length: int) -> list[Tensor]:
    """Return random keys and values of `length` tokens for each layer of a decoder."""
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = config.hidden_size // config.num_attention_heads
    return [torch.randn(1, heads, length, width) for _ in range(2 * config.num_hidden_layers)]


class Tagger(nn.Module):
    """Tag tokens by a two-layer LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20_000, 256)
        self.lstm = nn.LSTM(256, 512, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(512, 32)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        return self.head(hidden)


class Perceptron(nn.Sequential):
    """Three linear layers with ReLUs, as digits are classified by."""

    def __init__(self) -> None:
        hidden = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()]
        super().__init__(*hidden, nn.Linear(128, 10))


class Graph(nn.Module):
    """Two convolutions on graphs, of a class of torch-geometric, with 64 channels."""

    def __init__(self, kind: str) -> None:
        import torch_geometric.nn

        super().__init__()
        layer: Any = getattr(torch_geometric.nn, kind)
        self.first, self.second = layer(64, 64), layer(64, 64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class _Double(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        layers: list[nn.Module] = []
        for width in (before, after):
            layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """A U-Net of four levels (Ronneberger et al., 2015), padded, with batch norms."""

    def __init__(self, width: int = 32, levels: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.first, self.pool = _Double(3, width), nn.MaxPool2d(2)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(_Double(before, after) for before, after in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(deep, flat, 2, stride=2) for flat, deep in reversed(pairs))
        self.join = nn.ModuleList(_Double(2 * flat, flat) for flat, _ in reversed(pairs))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        seen = [self.first(image)]
        for down in self.down:
            seen.append(down(self.pool(seen[-1])))
        x = seen.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((seen.pop(), up(x)), dim=1))
        return self.head(x)
