"""Identifiers over the whole of their tables, and other masks: what an example shows few of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....runtime.values import Arguments, TensorFunction, map_tensors
from ..float64 import Table

__all__ = ["Drawn", "leaves_of"]

_BYTES = Table(256)


class Drawn:
    """Draw identifiers from the whole of their tables, and masks anew; exchange those of which only some are known."""

    def __init__(self, tables: Sequence[Table | None], seed: int, *, masks: bool = True) -> None:
        """Take the table that each tensor of a call picks from, in the order in which calls are mapped."""
        self._tables, self._seed, self._masks = tables, seed, masks

    def over(self, arguments: Arguments, change: TensorFunction, *, exchanged: bool = False) -> Arguments:
        """Return a call with identifiers and masks drawn, and all other tensors changed by `change`.

        Identifiers of which only some values are known are exchanged, or stay. Numbers that are all zeros and ones are
        a mask, too, beside tensors that are not.
        """
        tables, alone = iter(self._tables), all(_is_binary(tensor) for tensor in leaves_of(arguments))
        generator = torch.Generator().manual_seed(self._seed)

        def draw(tensor: Tensor) -> Tensor:
            table = next(tables)
            if table is not None and table.length:
                return _identifiers(tensor, table, generator)
            if table is not None:
                return self._exchanged(tensor, generator) if exchanged else tensor
            if tensor.dtype is torch.uint8 and exchanged and bool((tensor > 1).any()):
                return _identifiers(tensor, _BYTES, generator)
            if tensor.dtype is torch.bool:
                return self._mask(tensor, generator)
            if alone or not _is_binary(tensor):
                return change(tensor)
            return self._mask(tensor.detach().bool(), generator).to(tensor.dtype)

        return map_tensors(draw, arguments)

    def _exchanged(self, numbers: Tensor, generator: torch.Generator) -> Tensor:
        """Return a mask of zeros and ones changed; other identifiers in another order of their rows."""
        if numbers.dim() > 1 and _is_binary(numbers):
            return self._mask(numbers.bool(), generator).to(numbers.dtype)
        return numbers.roll(1, 0) if numbers.dim() else numbers

    def _mask(self, mask: Tensor, generator: torch.Generator) -> Tensor:
        """Return a mask with about a third of its places the other way, or with none."""
        if not self._masks or not mask.dim():
            return ~mask if self._masks else torch.ones_like(mask)
        other = (torch.rand(mask.shape, generator=generator) < 1 / 3).to(mask.device)
        other[..., :1] = False
        return mask ^ other


def _is_binary(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and tensor.dim() > 0 and tensor.numel() > 0 and not tensor.is_complex()
    return is_plain and bool(((tensor == 0) | (tensor == 1)).all())


def _identifiers(like: Tensor, table: Table, generator: torch.Generator) -> Tensor:
    """Return identifiers over a whole table; where there is room, its ends are among them, and what stands apart."""
    drawn = torch.randint(0, table.length, like.shape, generator=generator)
    flat = drawn.view(-1)
    flat[:2] = torch.tensor([table.length - 1, 0])[: flat.numel()]
    if table.apart is not None:
        flat[2::3] = table.apart
    return drawn.to(device=like.device, dtype=like.dtype)


def leaves_of(arguments: Arguments) -> list[Tensor]:
    """Return the tensors of a call, in the order in which calls are mapped."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, arguments)
    return found
