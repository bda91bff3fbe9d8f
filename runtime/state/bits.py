"""Flags as text: what a plan and a state map, which are JSON, keep of a mask."""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import StateError

__all__ = ["packed", "unpacked"]


def packed(flags: Tensor) -> str:
    """Return a tensor of booleans as text: eight to the byte, compressed, in base 64."""
    bits = np.packbits(flags.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1))
    return base64.b64encode(zlib.compress(bits.tobytes(), 1)).decode("ascii")


def unpacked(text: str, shape: Sequence[int]) -> Tensor:
    """Return the tensor of booleans, of this shape, that `packed` wrote.

    Raises:
        StateError: the text is no such thing, or of another size.
    """
    count = math.prod(shape)
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(text, validate=True), -(-count // 8) + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise StateError(f"a mask of shape {list(shape)} cannot be read: {error}") from error
    if len(data) != -(-count // 8):
        raise StateError(f"a mask of shape {list(shape)} has {len(data)} bytes; it needs {-(-count // 8)}")
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count)
    return torch.from_numpy(bits).bool().reshape(tuple(shape))
