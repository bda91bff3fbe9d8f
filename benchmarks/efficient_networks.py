"""Efficient networks for images, with random weights, at any width: what they are made of in a few lines each.

After the papers, in the way in which libraries write them: MobileNetV3 (Howard et al., 2019), EfficientNet (Tan and
Le, 2019), HardCoRe-NAS (Nayman et al., 2021), ReXNet (Han et al., 2021), HaloNet (Vaswani et al., 2021), ShuffleNetV2
(Ma et al., 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NETWORKS", "network"]

Make = Callable[[], nn.Module]


def _rounded(width: float) -> int:
    return max(8, int(width + 4) // 8 * 8)


class NormAct(nn.BatchNorm2d):
    """A batch norm with its activation inside."""

    def __init__(self, width: int, act: Make = nn.Identity) -> None:
        super().__init__(width)
        self.act = act()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch.nn calls it
        training = self.training or self.running_mean is None
        args = self.running_mean, self.running_var, self.weight, self.bias, training, self.momentum or 0.0, self.eps
        return self.act(F.batch_norm(input, *args))


class ConvNormAct(nn.Sequential):
    """A convolution, its batch norm and an activation."""

    def __init__(
        self, before: int, after: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: Make = nn.Identity
    ) -> None:
        conv = nn.Conv2d(before, after, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(after), act())


class Squeeze(nn.Module):
    """Squeeze-and-excite."""

    def __init__(self, width: int, inner: int, act: Make, gate: Make, *, norm: bool = False) -> None:
        super().__init__()
        self.reduce, self.norm = nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner) if norm else nn.Identity()
        self.act, self.expand, self.gate = act(), nn.Conv2d(inner, width, 1), gate()

    def forward(self, x: Tensor) -> Tensor:
        squeezed = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.expand(self.act(self.norm(self.reduce(squeezed)))))


class Inverted(nn.Module):
    """An inverted residual: wide, depthwise, with squeeze-and-excite where there is a `gate`, narrow."""

    def __init__(
        self, before: int, inner: int, after: int, kernel: int, stride: int, act: Make,
        gate: Make | None = None, squeezed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = [] if inner == before else [ConvNormAct(before, inner, act=act)]
        layers.append(ConvNormAct(inner, inner, kernel, stride, inner, act))
        if gate is not None:
            inside = nn.SiLU if act is nn.SiLU else nn.ReLU
            layers.append(Squeeze(inner, squeezed or _rounded(inner / 4), inside, gate))
        self.block = nn.Sequential(*layers, ConvNormAct(inner, after))
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return x + y if self.adds else y


def _head(before: int, inner: int, act: Make, classes: int = 1000) -> list[nn.Module]:
    return [ConvNormAct(before, inner, act=act), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes)]


_V3 = (  # kernel, inner, after, squeeze, hard swish, stride
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)  # fmt: skip


def mobilenet_v3(width: float = 1.0) -> nn.Module:
    """MobileNetV3-large."""
    before = _rounded(16 * width)
    layers: list[nn.Module] = [ConvNormAct(3, before, 3, 2, act=nn.Hardswish)]
    for kernel, inner, after, squeeze, hard, stride in _V3:
        inner, after = _rounded(inner * width), _rounded(after * width)
        act, gate = nn.Hardswish if hard else nn.ReLU, nn.Hardsigmoid if squeeze else None
        layers.append(Inverted(before, inner, after, kernel, stride, act, gate))
        before = after
    return nn.Sequential(*layers, *_head(before, 6 * before, nn.Hardswish))


_B0 = (  # expansion, after, times, stride, kernel
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)  # fmt: skip


def efficientnet(width: float = 1.0) -> nn.Module:
    """EfficientNet-B0."""
    before = _rounded(32 * width)
    layers: list[nn.Module] = [ConvNormAct(3, before, 3, 2, act=nn.SiLU)]
    for expansion, after, times, stride, kernel in _B0:
        after = _rounded(after * width)
        for number in range(times):
            own = 1 if number else stride
            squeezed = max(1, before // 4)
            layers.append(Inverted(before, expansion * before, after, kernel, own, nn.SiLU, nn.Sigmoid, squeezed))
            before = after
    return nn.Sequential(*layers, *_head(before, 4 * before, nn.SiLU))


class HardCoreBlock(nn.Module):
    """An inverted residual whose norms have their activations inside."""

    def __init__(self, before: int, after: int, expansion: int, kernel: int, stride: int, act: Make, se: bool) -> None:
        super().__init__()
        inner = before * expansion
        self.conv_pw, self.bn1 = nn.Conv2d(before, inner, 1, bias=False), NormAct(inner, act)
        self.conv_dw = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False)
        self.bn2 = NormAct(inner, act)
        self.se = Squeeze(inner, _rounded(inner / 4), nn.ReLU, nn.Hardsigmoid) if se else nn.Identity()
        self.conv_pwl, self.bn3 = nn.Conv2d(inner, after, 1, bias=False), NormAct(after)
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))
        y = self.bn3(self.conv_pwl(self.se(y)))
        return y + x if self.adds else y


_HARDCORE = (  # after, expansion, kernel, stride, hard swish, squeeze: of blocks
    ((24, 3, 5, 2, 0, 0), (24, 3, 5, 1, 0, 1)),
    ((40, 3, 5, 2, 0, 1), (40, 3, 5, 1, 0, 1), (40, 3, 3, 1, 0, 0)),
    ((80, 6, 5, 2, 1, 1), (80, 3, 5, 1, 1, 1), (80, 3, 5, 1, 1, 1), (80, 3, 3, 1, 1, 0)),
    ((112, 6, 5, 1, 1, 1), (112, 3, 5, 1, 1, 1), (112, 3, 5, 1, 1, 1)),
    ((192, 6, 5, 2, 1, 1), (192, 6, 5, 1, 1, 1), (192, 3, 5, 1, 1, 1)),
)


class HardCore(nn.Module):
    """HardCoRe-NAS, in the form of its larger networks."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        before = _rounded(32 * width)
        self.conv_stem, self.bn1 = nn.Conv2d(3, before, 3, 2, 1, bias=False), NormAct(before, nn.Hardswish)
        stages: list[nn.Module] = []
        for stage in _HARDCORE:
            blocks: list[nn.Module] = []
            for after, expansion, kernel, stride, hard, se in stage:
                act, after = nn.Hardswish if hard else nn.ReLU, _rounded(after * width)
                blocks.append(HardCoreBlock(before, after, expansion, kernel, stride, act, bool(se)))
                before = after
            stages.append(nn.Sequential(*blocks))
        self.blocks, inner = nn.Sequential(*stages), 6 * before
        self.conv_head, self.act, self.classifier = nn.Conv2d(before, inner, 1), nn.Hardswish(), nn.Linear(inner, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.bn1(self.conv_stem(image)))
        return self.classifier(self.act(self.conv_head(F.adaptive_avg_pool2d(x, 1))).flatten(1))


class Rex(nn.Module):
    """A linear bottleneck of a ReXNet: the shortcut is added to the first channels alone."""

    def __init__(self, before: int, after: int, expansion: int, stride: int, se: bool) -> None:
        super().__init__()
        inner = before * expansion
        self.expand = ConvNormAct(before, inner, act=nn.SiLU) if expansion > 1 else None
        self.depth = ConvNormAct(inner, inner, 3, stride, inner)
        self.se = Squeeze(inner, max(8, inner // 12), nn.ReLU, nn.Sigmoid, norm=True) if se else None
        self.act, self.project = nn.ReLU6(), ConvNormAct(inner, after)
        self.channels = before if stride == 1 and before <= after else 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(x if self.expand is None else self.expand(x))
        y = self.project(self.act(y if self.se is None else self.se(y)))
        if not self.channels:
            return y
        return torch.cat([y[:, : self.channels] + x, y[:, self.channels :]], dim=1)


def rexnet(width: float = 1.0) -> nn.Module:
    """ReXNet: each block is somewhat wider than the one before."""
    before, blocks = _rounded(32 * width), [(1, 1, False)]
    for times, stride, se in ((2, 2, False), (2, 2, True), (3, 2, True), (3, 1, True), (5, 2, True)):
        blocks += [(6, 1 if number else stride, se) for number in range(times)]
    layers: list[nn.Module] = [ConvNormAct(3, before, 3, 2, act=nn.SiLU)]
    for number, (expansion, stride, se) in enumerate(blocks):
        after = int((16 + 164 * number / (len(blocks) - 1)) * width)
        layers.append(Rex(before, after, expansion, stride, se))
        before = after
    return nn.Sequential(*layers, *_head(before, 1280, nn.SiLU))


class Halo(nn.Module):
    """Attention of blocks of an image to themselves and what is around them."""

    def __init__(self, width: int, heads: int, block: int = 8, halo: int = 3) -> None:
        super().__init__()
        self.heads, self.block, self.halo, self.window = heads, block, halo, block + 2 * halo
        self.q, self.kv = nn.Conv2d(width, width, 1, bias=False), nn.Conv2d(width, 2 * width, 1, bias=False)
        self.position = nn.Parameter(torch.zeros(heads, block * block, self.window**2))

    def forward(self, x: Tensor) -> Tensor:
        n, width, h, w = x.shape
        d, b = width // self.heads, self.block
        q = self.q(x).reshape(n * self.heads, d, h // b, b, w // b, b).permute(0, 2, 4, 3, 5, 1)
        q = q.reshape(n * self.heads, -1, b * b, d)
        kv = F.pad(self.kv(x), [self.halo] * 4).unfold(2, self.window, b).unfold(3, self.window, b)
        kv = kv.reshape(n * self.heads, 2 * d, -1, self.window**2).permute(0, 2, 3, 1)
        k, v = kv.split(d, dim=-1)
        bias = self.position.repeat(n, 1, 1).unsqueeze(1)
        y = ((q @ k.transpose(-1, -2)) * d**-0.5 + bias).softmax(-1) @ v
        y = y.reshape(n, self.heads, h // b, w // b, b, b, d).permute(0, 1, 6, 2, 4, 3, 5)
        return y.reshape(n, width, h, w)


class HaloBlock(nn.Module):
    """A bottleneck of a HaloNet."""

    def __init__(self, before: int, after: int, stride: int, attends: bool) -> None:
        super().__init__()
        inner = after // 4
        self.first = ConvNormAct(before, inner, act=nn.SiLU)
        self.mix = Halo(inner, max(1, inner // 16)) if attends else ConvNormAct(inner, inner, 3, 1, act=nn.SiLU)
        self.pool = nn.AvgPool2d(2) if stride == 2 else nn.Identity()
        self.norm = nn.Sequential(nn.BatchNorm2d(inner), nn.SiLU()) if attends else nn.Identity()
        self.last, self.act = ConvNormAct(inner, after), nn.SiLU()
        self.short = nn.Identity() if before == after and stride == 1 else ConvNormAct(before, after)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.pool(self.mix(self.first(x)))))
        return self.act(y + self.short(self.pool(x)))


def halonet(width: float = 1.0) -> nn.Module:
    """HaloNet: bottlenecks, of which the later ones attend."""
    before = _rounded(64 * width)
    layers: list[nn.Module] = [ConvNormAct(3, before, 3, 2, act=nn.SiLU), nn.MaxPool2d(3, 2, 1)]
    for after, times, stride, attends in ((256, 2, 1, False), (512, 2, 2, True), (1024, 2, 1, True)):
        after = _rounded(after * width)
        for number in range(times):
            layers.append(HaloBlock(before, after, 1 if number else stride, attends))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


class Shuffle(nn.Module):
    """A unit of a ShuffleNetV2."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner, given = after // 2, before if stride == 2 else before // 2
        self.stride = stride
        short = [ConvNormAct(before, before, 3, 2, before), ConvNormAct(before, inner, act=nn.ReLU)]
        self.short = nn.Sequential(*short) if stride == 2 else nn.Identity()
        self.long = nn.Sequential(
            ConvNormAct(given, inner, act=nn.ReLU), ConvNormAct(inner, inner, 3, stride, inner),
            ConvNormAct(inner, inner, act=nn.ReLU),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        one, other = (x, x) if self.stride == 2 else x.chunk(2, dim=1)
        y = torch.cat((self.short(one), self.long(other)), dim=1)
        n, width, h, w = y.shape
        return y.view(n, 2, width // 2, h, w).transpose(1, 2).contiguous().view(n, width, h, w)


def shufflenet(width: float = 1.0) -> nn.Module:
    """ShuffleNetV2."""
    before = 24
    layers: list[nn.Module] = [ConvNormAct(3, before, 3, 2, act=nn.ReLU), nn.MaxPool2d(3, 2, 1)]
    for after, times in ((116, 4), (232, 8), (464, 4)):
        after = int(after * width) // 4 * 4
        for number in range(times):
            layers.append(Shuffle(before, after, 1 if number else 2))
            before = after
    return nn.Sequential(*layers, *_head(before, 1024, nn.ReLU))


NETWORKS: Mapping[str, Callable[[float], nn.Module]] = {
    "hardcorenas": HardCore, "mobilenet_v3": mobilenet_v3, "efficientnet_b0": efficientnet, "rexnet": rexnet,
    "halonet": halonet, "shufflenet_v2": shufflenet,
}  # fmt: skip


def network(name: str, width: float = 1.0, seed: int = 0) -> nn.Module:
    """Return a network in evaluation, with random weights and statistics that keep numbers at their scale."""
    torch.manual_seed(seed)
    model = NETWORKS[name](width).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.8, 1.2)
    return model
