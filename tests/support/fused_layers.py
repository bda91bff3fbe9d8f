"""Small models that compute several things by one layer, as different libraries spell it, and a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SPELLINGS", "Language"]

WIDTH, HEADS, SIZE = 16, 4, 4


class Fused(nn.Module):
    """Attention whose queries, keys and values come out of one layer; a subclass says in which order."""

    def __init__(self, outputs: int = 3 * WIDTH) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, outputs), nn.Linear(WIDTH, WIDTH)

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values: [batch, heads, length, size]."""
        return tuple(each.view(*each.shape[:-1], HEADS, SIZE).transpose(1, 2) for each in qkv.split(WIDTH, dim=2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.heads(self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Chunked(Fused):
    """With one more operation before the parts are taken."""

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        parts = (qkv * 2).chunk(3, -1)
        return tuple(each.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for each in parts)


class Counted(Fused):
    """As in vision transformers: [batch, length, 3, heads, size]."""

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        batch, length, _ = qkv.shape
        return qkv.reshape(batch, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)


class ByHead(Fused):
    """As in BLOOM: each head has its queries, keys and values together."""

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        batch, length, _ = qkv.shape
        qkv = qkv.view(batch, length, HEADS, 3, SIZE)
        return tuple(qkv[..., number, :].transpose(1, 2) for number in range(3))


class Grouped(Fused):
    """As in Phi-3: half as many heads of keys and values, taken by slices."""

    def __init__(self) -> None:
        super().__init__(2 * WIDTH)

    def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        half = WIDTH // 2
        parts = qkv[..., :WIDTH], qkv[..., WIDTH : WIDTH + half], qkv[..., WIDTH + half :]
        q, k, v = (each.view(*each.shape[:-1], -1, SIZE).transpose(1, 2) for each in parts)
        return q, *(each[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))


class KeysAndValues(Fused):
    """Two layers; what two counts are the keys and values, and two processes could have one each."""

    def __init__(self) -> None:
        super().__init__(2 * WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.q(x).reshape(batch, length, HEADS, SIZE).transpose(1, 2)
        k, v = self.qkv(x).reshape(batch, length, 2, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        y = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        return x + self.proj(y.transpose(1, 2).reshape(batch, length, width))


class GateAndUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


SPELLINGS: dict[str, tuple[type[nn.Module], str, list[int]]] = {
    "split": (Fused, "qkv", [16, 16, 16]),
    "chunk": (Chunked, "qkv", [16, 16, 16]),
    "count": (Counted, "qkv", [16, 16, 16]),
    "by head": (ByHead, "qkv", []),
    "slices": (Grouped, "qkv", [16, 8, 8]),
    "keys and values": (KeysAndValues, "qkv", [16, 16]),
    "gate": (GateAndUp, "gate_up", [12, 12]),
}
"""A model, its fused layer, and the parts of which each process gets a share."""


class Language(nn.Module):
    """An embedding with a head, tied or not, and the loss where targets are given."""

    def __init__(self, words: int = 65, *, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH, padding_idx=words - 1)
        self.places, self.block = nn.Embedding(8, WIDTH), Fused()
        self.head = nn.Linear(WIDTH, words, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.block(self.words(ids) + self.places.weight[: ids.shape[1]]))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
