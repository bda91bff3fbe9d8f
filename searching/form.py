"""What a rewritten model is, in a few letters: two models with equal ones compute the same in the same way."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import modules_by_name, own_buffers, own_parameters
from ..layers.delegated import sum_of
from ..passes.timing import held_memory
from ..runtime.graphs import specializations_of
from ..runtime.values import flatten

__all__ = ["form_of"]

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
"""What the text of an object says of where it lies."""


def form_of(model: nn.Module, results: Sequence[Any]) -> str:
    """Return a digest of a model: its modules and graphs as text, the bytes that it holds, and `results` bit by bit; ""
    where results have no bits to compare.

    What graphs do not say, such as the precision of an engine, its results do.
    """
    digest = hashlib.sha256(str(held_memory(model)).encode())
    for line in _lines(model):
        digest.update(_ADDRESS.sub("", line).encode())
    tensors = [each for each in flatten(list(results)).values() if isinstance(each, Tensor)]
    try:
        digest.update(str(sum_of(tensors)).encode())
    except RuntimeError:  # of a result that is not on the CPU, or not in one piece
        return ""
    return digest.hexdigest()[:16]


def _lines(model: nn.Module) -> Iterator[str]:
    """Yield what each module is: its class, settings and tensors, and what its graphs compute."""
    for name, module in modules_by_name(model).items():
        yield f"{name}: {type(module).__qualname__}({module.extra_repr()})"
        for tensors in (own_parameters(module), own_buffers(module)):
            yield from (f"{key} {_kind(each)}" for key, each in tensors.items() if each is not None)
        yield from (str(each.graph) for each in specializations_of(module))


def _kind(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)
