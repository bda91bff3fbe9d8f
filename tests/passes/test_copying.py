"""Copies of module trees."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fxopt.passes.copying import copied_module


class Sharing(nn.Module):
    """Hold buffers on the same memory, and some that are copied in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(4, 6)
        self.register_buffer("whole", whole)
        self.register_buffer("rows", whole[1:])
        self.register_buffer("flat", whole.view(24))
        self.register_buffer("turned", whole.t())
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.cfloat).conj())
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("outline", torch.empty(2, device="meta"))
        self.again = nn.Module()
        self.again.register_buffer("whole", whole)
        self.norm = nn.BatchNorm1d(3)


def test_copies_are_those_of_deepcopy():
    model = Sharing()
    ours, theirs = copied_module(model), copy.deepcopy(model)
    for (name, one), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device), name
        assert one.stride() == other.stride() and one.is_conj() == other.is_conj(), name
        assert one.is_meta or torch.equal(one, other), name


def test_buffers_that_share_memory_share_their_copy():
    for names in (("whole", "rows", "flat", "turned"), ("turned", "rows", "flat", "whole")):
        model = Sharing()
        for name in names:  # the order in which they are copied
            model._buffers[name] = model._buffers.pop(name)
        fresh = copied_module(model)
        assert fresh.again.whole is fresh.whole
        fresh.whole.zero_()
        assert not any(getattr(fresh, name).any() for name in names)
        assert all(getattr(model, name).any() for name in names)
