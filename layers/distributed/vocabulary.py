"""A vocabulary that is split over processes: its words, its embedding, and the cross entropy of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from ...compat.distributed import added_up
from .share import Share

__all__ = ["SplitCrossEntropy", "SplitEmbedding", "Words"]

_HALF = (torch.float16, torch.bfloat16)


class Words(Share):
    """What a process has of the words of a vocabulary."""

    def places(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return where words are in this process, 0 for those of others, and which are here."""
        here = (words >= self.start) & (words < self.end)
        return torch.where(here, words - self.start, 0), here

    def check(self, words: Tensor) -> None:
        """Raise IndexError, as torch does on CPUs, for words that are in no process."""
        if words.device.type == "cpu" and words.numel() and not (0 <= int(words.min()) <= int(words.max()) < self.size):
            raise IndexError(f"index out of range: the vocabulary has {self.size} words")


class SplitEmbedding(nn.Embedding):
    """An embedding of whose rows each process has a share."""

    _fxopt_is_operation = True
    share: Words

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  its name in torch
        self.share.check(input)
        places, here = self.share.places(input)
        own: Tensor = cast("Any", self.weight).to_local()
        padding = None if self.padding_idx is None else self.padding_idx - self.share.start
        padding = padding if padding is not None and 0 <= padding < len(own) else None
        found = F.embedding(places, own, padding)
        return added_up(found.masked_fill(~here.unsqueeze(-1), 0), self.share.mesh)


@dataclass(frozen=True)
class SplitCrossEntropy:
    """Compute `F.cross_entropy` of logits [rows, words of this process]; all logits of a row are nowhere together.

    As in Shoeybi et al. 2019, "Megatron-LM", section 3: the largest logit, the sum of exponentials and the logit of
    the target are exchanged.
    """

    share: Words

    @property
    def __name__(self) -> str:
        return "split_cross_entropy"

    def __call__(
        self,
        input: Tensor,  # noqa: A002  its name in torch
        target: Tensor,
        weight: None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        counts = target != ignore_index
        words = torch.where(counts, target, 0)
        self.share.check(words)
        rows = input if input.dim() == 2 else input.unsqueeze(0)
        losses = cast("Tensor", _Losses.apply(rows, words.reshape(-1), self.share)).view(target.shape)
        losses = torch.where(counts, losses, 0)
        if reduction == "none":
            return losses
        return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


class _Losses(torch.autograd.Function):
    """The loss of each row, for targets that are all words."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, share: Words) -> Tensor:
        group, (places, here) = share.mesh.get_group(), share.places(target)
        wide = logits.float() if logits.dtype in _HALF else logits
        largest = wide.amax(-1)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
        shifted = wide - largest.unsqueeze(-1)
        of_target = shifted.gather(-1, places.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
        shares = shifted.exp_()
        sums = torch.stack([shares.sum(-1), of_target])
        distributed.all_reduce(sums, group=group)
        total, of_target = sums
        ctx.save_for_backward(shares.div_(total.unsqueeze(-1)), places, here)
        ctx.dtype = logits.dtype
        return (total.log() - of_target).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shares, places, here = ctx.saved_tensors
        gradient = gradients[0].to(shares.dtype)
        own = shares * gradient.unsqueeze(-1)
        own.scatter_add_(-1, places.unsqueeze(-1), -(gradient * here).unsqueeze(-1))
        return own.to(ctx.dtype), None, None
