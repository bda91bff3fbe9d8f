"""Let a model run on its own tensors, and not on stand-ins, so that what its code derives from them is made once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from ....compat import version_of
from ..stage import Stage
from ..trial import Kept

__all__ = ["own_tensors"]


@contextmanager
def own_tensors(stage: Stage) -> Generator[Kept]:
    """Yield a model's own parameters and buffers as what trials keep as stand-ins; buffers are put back at the end.

    It is for runs that take no gradients and are to write to no buffer.
    """
    tensors = {id(tensor): tensor for tensor in stage.state.values() if not tensor.is_inference()}
    before = [(buffer, buffer.detach().clone()) for buffer in stage.buffers.values() if id(buffer) in tensors]
    try:
        yield {(number, tensor.dtype): (tensor, version_of(tensor)) for number, tensor in tensors.items()}
    finally:
        with torch.no_grad():
            for buffer, copy in before:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
