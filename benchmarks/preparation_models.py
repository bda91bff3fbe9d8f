"""Small detectors, segmenters and video models with random weights: much Python in a forward, many unequal parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS"]

_SIDE = 64
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_DETECTOR = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
}  # fmt: skip

Made = tuple[nn.Module, dict[str, Any]]


def _image(count: int = 1, side: int = _SIDE) -> dict[str, Any]:
    return {"pixel_values": torch.randn(count, 3, side, side)}


def _video(frames: int = 4, side: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, frames, 3, side, side)}


def _backbone(**more: Any) -> Any:
    return hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], **more)


def _swin() -> Any:
    return hf.SwinConfig(
        image_size=_SIDE, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def _detr() -> Made:
    config = hf.DetrConfig(backbone_config=_backbone(out_features=["stage4"]), **_DETECTOR)
    return hf.DetrForObjectDetection(config), _image()


def _conditional_detr() -> Made:
    config = hf.ConditionalDetrConfig(backbone_config=_backbone(out_features=["stage4"]), **_DETECTOR)
    return hf.ConditionalDetrForObjectDetection(config), _image()


def _deformable_detr() -> Made:
    backbone = _backbone(out_features=["stage2", "stage3", "stage4"])
    config = hf.DeformableDetrConfig(backbone_config=backbone, num_feature_levels=3, **_DETECTOR)
    return hf.DeformableDetrForObjectDetection(config), _image()


def _yolos() -> Made:
    config = hf.YolosConfig(image_size=[_SIDE, _SIDE], num_detection_tokens=10, **_SMALL)
    return hf.YolosForObjectDetection(config), _image()


def _segformer() -> Made:
    config = hf.SegformerConfig(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], decoder_hidden_size=32)
    return hf.SegformerForSemanticSegmentation(config), _image()


def _maskformer() -> Made:
    decoder = hf.DetrConfig(**_DETECTOR, num_labels=5)
    config = hf.MaskFormerConfig(
        backbone_config=_swin(), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32
    )
    return hf.MaskFormerModel(config), _image()


_MASKED = {
    "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 64, "encoder_layers": 2,
    "decoder_layers": 3, "num_attention_heads": 2, "dim_feedforward": 64, "num_queries": 10,
}  # fmt: skip


def _mask2former() -> Made:
    config = hf.Mask2FormerConfig(backbone_config=_swin(), **_MASKED)
    return hf.Mask2FormerModel(config), _image()


def _upernet() -> Made:
    config = hf.UperNetConfig(backbone_config=_swin(), hidden_size=32, auxiliary_channels=16, auxiliary_in_channels=64)
    return hf.UperNetForSemanticSegmentation(config), _image()


def _mask_rcnn_like() -> Made:
    return Proposals(), {"x": torch.randn(1, 3, 128, 128)}


def _videomae() -> Made:
    config = hf.VideoMAEConfig(image_size=32, num_frames=4, tubelet_size=2, **_SMALL)
    return hf.VideoMAEForVideoClassification(config), _video()


def _timesformer() -> Made:
    config = hf.TimesformerConfig(image_size=32, num_frames=4, **_SMALL)
    return hf.TimesformerForVideoClassification(config), _video()


def _vivit() -> Made:
    config = hf.VivitConfig(image_size=32, num_frames=4, tubelet_size=[2, 16, 16], **_SMALL)
    return hf.VivitForVideoClassification(config), _video()


def _s3d_like() -> Made:
    return Separable3d(), {"x": torch.randn(1, 3, 8, 64, 64)}


def _maxvit_like() -> Made:
    return MaxVit(), {"x": torch.randn(1, 3, 128, 128)}


class Separable3d(nn.Module):
    """Convolutions over space, then over time, in branches that are joined, as in S3D."""

    def __init__(self, widths: tuple[int, ...] = (16, 24, 32, 32, 48, 48)) -> None:
        super().__init__()
        self.stem = _separable(3, widths[0], 7)
        parts = itertools.pairwise(widths)
        self.blocks = nn.ModuleList(
            nn.ModuleList([_separable(one, two // 2, 3), nn.Sequential(_conv3d(one, two // 2, (1, 1, 1)))])
            for one, two in parts
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = torch.cat([branch(x) for branch in block], 1)
            x = functional.max_pool3d(x, (1, 2, 2)) if number % 2 else x
        return self.head(x.mean((2, 3, 4)))


def _conv3d(inputs: int, outputs: int, size: tuple[int, int, int]) -> nn.Module:
    padding = tuple(each // 2 for each in size)
    conv = nn.Conv3d(inputs, outputs, size, padding=padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True))


def _separable(inputs: int, outputs: int, size: int) -> nn.Module:
    return nn.Sequential(_conv3d(inputs, outputs, (1, size, size)), _conv3d(outputs, outputs, (size, 1, 1)))


class MaxVit(nn.Module):
    """Inverted bottlenecks with squeeze and excite, then attention in windows and across them, as in MaxViT."""

    def __init__(self, widths: tuple[int, ...] = (32, 48, 64), depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 2, 1)
        inputs = (widths[0], *widths)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    Bottleneck(w if i else inputs[at], w, 1 + (not i)), Windows(w, False), Windows(w, True)
                )
                for at, w in enumerate(widths)
                for i in range(depth)
            )
        )  # fmt: skip
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * outputs
        self.inner = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.GELU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.GELU(),
        )  # fmt: skip
        self.excite = nn.Sequential(nn.Conv2d(wide, wide // 16, 1), nn.SiLU(), nn.Conv2d(wide // 16, wide, 1))
        self.last = nn.Conv2d(wide, outputs, 1)
        self.short = nn.Sequential(nn.AvgPool2d(stride), nn.Conv2d(inputs, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y = y * torch.sigmoid(self.excite(y.mean((2, 3), keepdim=True)))
        return self.last(y) + self.short(x)


class Windows(nn.Module):
    """Attention among the pixels of a window of 4 by 4 or, `across` windows, of a grid."""

    def __init__(self, width: int, across: bool, size: int = 4) -> None:
        super().__init__()
        self.across, self.size, self.heads = across, size, width // 16
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(self.heads, size * size, size * size))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        count, width, high, wide = x.shape
        size = self.size
        rows, columns = high // size, wide // size
        if self.across:
            parts = x.view(count, width, size, rows, size, columns).permute(0, 3, 5, 2, 4, 1)
        else:
            parts = x.view(count, width, rows, size, columns, size).permute(0, 2, 4, 3, 5, 1)
        tokens = parts.reshape(-1, size * size, width)
        q, k, v = self.qkv(self.norm(tokens)).view(-1, size * size, 3, self.heads, 16).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / 4 + self.bias
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(tokens.shape)
        tokens = tokens + self.out(mixed)
        tokens = tokens + self.mlp(tokens)
        back = tokens.view(count, rows, columns, size, size, width)
        order = (0, 5, 3, 1, 4, 2) if self.across else (0, 5, 1, 3, 2, 4)
        return back.permute(order).reshape(x.shape)


class Proposals(nn.Module):
    """Boxes that a small network proposes, each pooled by a loop in Python, then classified: two-stage detection."""

    def __init__(self, width: int = 32, count: int = 16) -> None:
        super().__init__()
        self.count = count
        layers: list[nn.Module] = []
        for inputs in (3, width, width, width):
            layers += [nn.Conv2d(inputs, width, 3, 1 + (inputs == 3), 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.boxes = nn.Conv2d(width, 5, 1)
        self.head = nn.Sequential(nn.Linear(width * 49, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        found = self.boxes(features).flatten(2)
        scores, places = found[:, 0].topk(self.count, 1)
        boxes = found[:, 1:].gather(2, places[:, None].expand(-1, 4, -1)).sigmoid()
        pairs = ((each, box) for each, some in zip(features, boxes, strict=True) for box in some.T)
        pooled = torch.stack([self.pooled(each, box) for each, box in pairs])
        return scores, self.head(pooled.flatten(1))

    def pooled(self, features: Tensor, box: Tensor) -> Tensor:
        """Pool a box to 7 by 7, bilinearly, row by row."""
        left, top = box[0] * 0.5, box[1] * 0.5
        rows = []
        for row in range(7):
            y = 2 * (top + (0.1 + 0.4 * box[3]) * row / 6) - 1
            x = 2 * (left + (0.1 + 0.4 * box[2]) * torch.arange(7, device=box.device) / 6) - 1
            grid = torch.stack([x, y.expand(7)], -1)[None, None]
            rows.append(functional.grid_sample(features[None], grid, align_corners=False)[0, :, 0])
        return torch.stack(rows, 1)


MODELS: dict[str, Callable[[], Made]] = {
    "detr": _detr, "conditional_detr": _conditional_detr, "deformable_detr": _deformable_detr, "yolos": _yolos,
    "two_stage": _mask_rcnn_like, "segformer": _segformer, "maskformer": _maskformer, "mask2former": _mask2former,
    "upernet": _upernet, "videomae": _videomae, "timesformer": _timesformer, "vivit": _vivit, "s3d_like": _s3d_like,
    "maxvit_like": _maxvit_like,
}  # fmt: skip
"""Functions that make a model and its inputs, by name."""
