"""Random numbers from a counter: Philox 4x64-10, as numpy has it compiled, faster on a CPU than torch's generator.
Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..compat.operators import numbers_of
from ..errors import UsageError

__all__ = ["key_of", "uniform"]


def uniform(shape: Sequence[int], key: Tensor) -> Tensor:
    """Return float32 numbers of `shape` in [0, 1), multiples of 2**-24, for a key of two int64, on the CPU.
    Numpy counts blocks of four words from one; element i is the half i % 2, the lower first, of word i // 2.
    """
    count = math.prod(shape)
    words = _at_start(numbers_of(key).view(np.uint64)).random_raw((count + 1) // 2)
    halves = torch.from_numpy(words.view(np.int32)[:count].reshape(tuple(shape)))
    return halves.bitwise_right_shift_(8).to(torch.float32).mul_(2**-24).add_(0.5)


_of_thread = threading.local()


def _at_start(key: NDArray[np.uint64]) -> np.random.Philox:
    """Return this thread's generator, set to a key: making a new one takes ten times as long."""
    if not hasattr(_of_thread, "generator"):
        _of_thread.generator = np.random.Philox(0)
    generator: np.random.Philox = _of_thread.generator
    zeros = np.zeros(4, np.uint64)
    generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": zeros, "key": key},
        "buffer": zeros,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return generator


def key_of(operator: str, seed: int | Tensor | None, offset: int, device: torch.device) -> Tensor:
    """Return two int64, of a seed and an offset (alone a UsageError), or drawn by torch, or the key given."""
    if (seed is None or isinstance(seed, Tensor)) and offset:
        found = "None, which draws both" if seed is None else "a tensor, which holds both"
        raise UsageError(f"{operator}: offset is {offset}, seed is {found}; leave offset out")
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (2,), device=device)
    return seed if isinstance(seed, Tensor) else torch.tensor([seed, offset], device=device)
