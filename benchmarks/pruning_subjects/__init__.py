"""The models that pruning is measured on: small ones of known families, and two written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SUBJECTS", "Subject"]


@dataclass(frozen=True)
class Subject:
    """A model, the keyword arguments of a call, and what a comparison keeps whole.

    Attributes:
        make: builds it.
        call: the arguments of an example call of so many rows.
        head: the layer that makes the result.
        heads: names that end the names of attention's query, key and value layers -> how many heads they make.
    """

    make: Callable[[], nn.Module]
    call: Callable[[int], dict[str, Tensor]]
    head: str
    heads: Mapping[str, int]


def _images(size: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda rows: {"pixel_values": torch.randn(rows, 3, size, size)}


def _tokens(rows: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 500, (rows, 64))}


def _transformers(name: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        family = {"Bert": "BertForSequenceClassification", "Llama": "LlamaForCausalLM", "Qwen2": "Qwen2ForCausalLM"}
        cls = getattr(transformers, family.get(name, f"{name}ForImageClassification"))
        return cls(getattr(transformers, f"{name}Config")(**config))

    return make


_DECODER: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 500, "use_cache": False, "max_position_embeddings": 128,
}  # fmt: skip


class _Dense(nn.Module):
    """One layer of a dense block: its result goes behind what came in."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(torch.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu(self.norm2(y)))], 1)


class DenseNet(nn.Module):
    """Two dense blocks with a transition between them."""

    def __init__(self, growth: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.block1 = nn.Sequential(*(_Dense(32 + i * growth, growth) for i in range(depth)))
        width = 32 + depth * growth
        self.transition = nn.Conv2d(width, width // 2, 1)
        self.block2 = nn.Sequential(*(_Dense(width // 2 + i * growth, growth) for i in range(depth)))
        self.norm = nn.BatchNorm2d(width // 2 + depth * growth)
        self.classifier = nn.Linear(width // 2 + depth * growth, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(self.transition(self.block1(self.stem(pixel_values))), 2)
        return self.classifier(torch.relu(self.norm(self.block2(x))).mean((2, 3)))


def _twice(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
        nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Two steps down, two up through transposed convolutions, skips by concatenation."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = _twice(3, width), _twice(width, 2 * width)
        self.middle = _twice(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = _twice(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = _twice(2 * width, width)
        self.classifier = nn.Conv2d(width, 2, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        one = self.down1(pixel_values)
        two = self.down2(nn.functional.max_pool2d(one, 2))
        x = self.middle(nn.functional.max_pool2d(two, 2))
        x = self.join2(torch.cat([two, self.up2(x)], 1))
        return self.classifier(self.join1(torch.cat([one, self.up1(x)], 1)))


_QKV = {"q_proj": 8, "k_proj": 4, "v_proj": 4}

SUBJECTS: dict[str, Subject] = {
    "resnet50": Subject(_transformers("ResNet", num_labels=10), _images(96), "classifier.1", {}),
    "convnext": Subject(
        _transformers("ConvNext", hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2], num_labels=10),
        _images(96), "classifier", {},
    ),
    "vit": Subject(
        _transformers("ViT", hidden_size=192, num_hidden_layers=4, num_attention_heads=4, intermediate_size=768,
                      image_size=96, num_labels=10),
        _images(96), "classifier", {"query": 4, "key": 4, "value": 4, "q_proj": 4, "k_proj": 4, "v_proj": 4},
    ),
    "bert": Subject(
        _transformers("Bert", hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
                      vocab_size=500, num_labels=10),
        _tokens, "classifier", {"query": 4, "key": 4, "value": 4},
    ),
    "llama": Subject(_transformers("Llama", **_DECODER), _tokens, "lm_head", _QKV),
    "qwen2": Subject(_transformers("Qwen2", **_DECODER, tie_word_embeddings=True), _tokens, "lm_head", _QKV),
    "densenet": Subject(DenseNet, _images(48), "classifier", {}),
    "unet": Subject(UNet, _images(48), "classifier", {}),
}  # fmt: skip
