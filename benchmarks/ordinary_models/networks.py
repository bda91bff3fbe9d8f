"""Ordinary networks at real size, with random weights: those of transformers, and plain ones where it has none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Graph",
    "MobileNetV3",
    "Perceptron",
    "ShuffleNetV2",
    "Step",
    "Tagger",
    "UNet",
    "bert_base",
    "convnext_tiny",
    "detr",
    "efficientnet_b0",
    "gpt2",
    "llama",
    "mobilenet_v2",
    "past",
    "resnet_18",
    "resnet_50",
    "settled",
    "swin_tiny",
    "tokens",
    "vit_small",
]


def tokens(count: int, vocabulary: int, rows: int = 1) -> Tensor:
    """Return random tokens."""
    return torch.randint(0, vocabulary, (rows, count))


def settled(model: nn.Module, image: Tensor) -> nn.Module:
    """Give batch norms the statistics of an image, as training would: else layer by layer all values become 0."""
    norms = [each for each in model.eval().modules() if isinstance(each, nn.BatchNorm2d)]
    momenta = [each.momentum for each in norms]
    for each in norms:
        each.train().momentum = None
    with torch.no_grad():
        model(image)
    for each, momentum in zip(norms, momenta, strict=True):
        each.eval().momentum = momentum
    return model


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


def efficientnet_b0() -> nn.Module:
    """Return an EfficientNet with weights that keep variances above the epsilon of its norms."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280, initializer_range=0.1,
        num_labels=1000,
    )  # fmt: skip
    return EfficientNetForImageClassification(config)


def convnext_tiny() -> nn.Module:
    """Return a ConvNeXt whose blocks count: at the default scale of 1e-6 no error in them could be seen."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(num_labels=1000, layer_scale_init_value=1.0))


def swin_tiny() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(num_labels=1000))


def detr() -> nn.Module:
    """Return a detector of 100 boxes (Carion et al., 2020) over a ResNet-18; its first result are logits."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic", out_features=["stage4"]
    )
    config = DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone, num_labels=91)
    return DetrForObjectDetection(config)


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


class _Unit(nn.Sequential):
    """A convolution with its batch norm and perhaps an activation."""

    def __init__(self, before: int, after: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: Any = None):
        convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(after), *([] if act is None else [act()]))


class _SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = _eighths(width / 4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Sequential(nn.Conv2d(width, inner, 1), nn.ReLU(), nn.Conv2d(inner, width, 1), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.pool(x))


def _eighths(width: float) -> int:
    """Round to a multiple of eight, by no more than a tenth downwards."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * width else rounded


class _Inverted(nn.Module):
    """Expand, convolve each channel by itself, weigh channels, and project; inputs are added where shapes allow."""

    def __init__(self, before: int, after: int, inner: int, kernel: int, stride: int, squeezes: bool, act: Any) -> None:
        super().__init__()
        layers = [] if inner == before else [_Unit(before, inner, act=act)]
        layers.append(_Unit(inner, inner, kernel, stride, groups=inner, act=act))
        layers += [_SqueezeExcite(inner)] if squeezes else []
        self.layers = nn.Sequential(*layers, _Unit(inner, after))
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


_RE, _HS = nn.ReLU, nn.Hardswish
_V3_LARGE = (
    (3, 16, 16, False, _RE, 1), (3, 64, 24, False, _RE, 2), (3, 72, 24, False, _RE, 1), (5, 72, 40, True, _RE, 2),
    (5, 120, 40, True, _RE, 1), (5, 120, 40, True, _RE, 1), (3, 240, 80, False, _HS, 2), (3, 200, 80, False, _HS, 1),
    (3, 184, 80, False, _HS, 1), (3, 184, 80, False, _HS, 1), (3, 480, 112, True, _HS, 1), (3, 672, 112, True, _HS, 1),
    (5, 672, 160, True, _HS, 2), (5, 960, 160, True, _HS, 1), (5, 960, 160, True, _HS, 1),
)  # fmt: skip
"""Kernel, inner width, width, squeeze-and-excite, activation, stride."""


class MobileNetV3(nn.Sequential):
    """MobileNetV3-large (Howard et al., 2019, table 1)."""

    def __init__(self, classes: int = 1000) -> None:
        layers: list[nn.Module] = [_Unit(3, 16, 3, 2, act=_HS)]
        before = 16
        for kernel, inner, after, squeezes, act, stride in _V3_LARGE:
            layers.append(_Inverted(before, after, inner, kernel, stride, squeezes, act))
            before = after
        layers += [_Unit(before, 960, act=_HS), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        layers += [nn.Linear(960, 1280), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1280, classes)]
        super().__init__(*layers)


class _Shuffled(nn.Module):
    """Convolve half of the channels, or all of them twice at a stride, and let the halves take turns."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        half = after // 2
        given = before if stride > 1 else half
        self.own = nn.Sequential(
            _Unit(given, half, act=nn.ReLU), _Unit(half, half, 3, stride, groups=half), _Unit(half, half, act=nn.ReLU)
        )
        other = [_Unit(before, before, 3, stride, groups=before), _Unit(before, half, act=nn.ReLU)]
        self.other = nn.Sequential(*(other if stride > 1 else []))
        self.splits = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        kept, given = x.chunk(2, dim=1) if self.splits else (x, x)
        joined = torch.cat((self.other(kept), self.own(given)), dim=1)
        rows, channels, height, width = joined.shape
        return joined.view(rows, 2, channels // 2, height, width).transpose(1, 2).reshape(joined.shape)


class ShuffleNetV2(nn.Sequential):
    """ShuffleNetV2 at the width 1 (Ma et al., 2018, table 5)."""

    def __init__(self, classes: int = 1000) -> None:
        layers: list[nn.Module] = [_Unit(3, 24, 3, 2, act=nn.ReLU), nn.MaxPool2d(3, 2, padding=1)]
        before = 24
        for width, repeats in ((116, 4), (232, 8), (464, 4)):
            for place in range(repeats):
                layers.append(_Shuffled(before, width, 2 if place == 0 else 1))
                before = width
        layers += [_Unit(before, 1024, act=nn.ReLU), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, classes)]
        super().__init__(*layers)
