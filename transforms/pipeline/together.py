"""What the ranks of a pipeline tell each other besides tensors, so that none waits for another that failed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from ...errors import FxoptError, GuardError, UsageError
from .line import Line

__all__ = ["Together"]


@dataclass(frozen=True)
class Together:
    """All ranks of a pipeline. Every rank calls each method; what one rank raises, all raise."""

    line: Line
    group: Any = field(init=False)  # on processors: a GPU need not finish its work for it

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self.line.on_processors())

    def agree(self, failed: FxoptError | None, form: object) -> None:
        """Raise where a rank cannot take its batch, or was given one of another form."""
        code = zlib.crc32(repr(form).encode())
        largest = self._largest(torch.tensor([failed is not None, code, -code]))
        if not largest[0] and largest[1] == -largest[2]:
            return
        everyone: list[Any] = [None] * self.line.size
        distributed.all_gather_object(everyone, (None if failed is None else str(failed), repr(form)), group=self.group)
        if failed is not None:
            raise failed
        for rank, (message, other) in zip(self.line.ranks, everyone, strict=True):
            if message is not None:
                raise UsageError(f"rank {rank} cannot take its batch: {message}")
            if other != everyone[0][1]:
                raise UsageError(
                    f"rank {rank} was given a batch of another form than rank {self.line.ranks[0]}, or is in another "
                    "mode; all stages take the same batch: the ranks of one pipeline need no DistributedSampler"
                )

    def raise_any(self, error: Exception | None, hint: str = "") -> None:
        """Raise a rank's error, and on the others one that tells of the first rank that failed."""
        if not self._largest(torch.tensor([error is not None]).long())[0]:
            return
        everyone: list[Any] = [None] * self.line.size
        mine = None if error is None else (isinstance(error, GuardError), _text(error))
        distributed.all_gather_object(everyone, mine, group=self.group)
        if error is not None:
            raise error
        said = zip(self.line.ranks, everyone, strict=True)
        rank, (is_guard, text) = next((rank, each) for rank, each in said if each is not None)
        raise (GuardError if is_guard else FxoptError)(f"rank {rank} raised {text}{hint}")

    def _largest(self, values: Tensor) -> list[int]:
        distributed.all_reduce(values, distributed.ReduceOp.MAX, group=self.group)
        return list(map(int, values))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
