"""Let a model run on its own tensors, and not on stand-ins, so that what its code derives from them is made once."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ....compat import version_of
from ..execution import Kept
from ..module_harness import ModuleHarness

__all__ = ["leaves_tensors", "own_tensors", "written_parameter"]


def leaves_tensors(harness: ModuleHarness, kept: Kept, after: Iterable[Mapping[str, Tensor]]) -> bool:
    """Say whether runs of a model on `kept` stand-ins left parameters and buffers (`after` each run) as they were;
    of sparse ones that is not known.
    """
    if any(version_of(made) != version for made, version in kept.values() if isinstance(made, nn.Parameter)):
        return False
    pairs = [(buffer, run.get(name)) for run in after for name, buffer in harness.buffers.items()]
    return all(
        left is not None and buffer.layout is torch.strided and torch.equal(buffer, left) for buffer, left in pairs
    )


@contextmanager
def own_tensors(harness: ModuleHarness) -> Generator[Kept]:
    """Yield a model's own tensors as what runs keep as stand-ins; buffers are put back at the end. It is for runs
    that take no gradients and are to write to none of them.
    """
    tensors = {id(tensor): tensor for tensor in harness.state.values() if not tensor.is_inference()}
    kept = {(number, tensor.dtype): (tensor, version_of(tensor)) for number, tensor in tensors.items()}
    buffers = [each for each in harness.buffers.values() if id(each) in tensors]
    before = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in buffers]
    try:
        yield kept
    finally:
        with torch.no_grad():
            for buffer, version, copy in before:
                if version_of(buffer) != version:
                    buffer.copy_(copy)


def written_parameter(harness: ModuleHarness, kept: Kept) -> str:
    """Return the name of a parameter that runs on a model's own tensors wrote to, or ""."""
    for name, tensor in harness.parameters.items():
        known = kept.get((id(tensor), tensor.dtype))
        if known is not None and known[0] is tensor and version_of(tensor) != known[1]:
            return name
    return ""
