"""Noise that makes a comparison discriminate: fresh biases are zero, members may be equal, inputs symmetric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....runtime.values import map_tensors
from ..float64 import widened

__all__ = ["jittered", "perturbed_inputs", "perturbed_state", "stands_for_infinity"]

_STRENGTH = 0.25
"""How far values move, relative to the tensor's own scale: far enough to tell things apart, and rarely too far."""

_PERIOD = 65537
"""After so many elements noise repeats: a prime, so that no two rows, columns or members get the same."""

_DECIDES = 4.0
"""Numbers so far apart outweigh what layers with weights as they are drawn mostly give."""

_HUGE = 1e4
"""Values that stand for infinity (masks of -1e4, -1e9 or finfo.min) are kept as they are."""


def perturbed_state(state: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return `state` with noise on every float, in the same types; tied tensors stay tied. Buffers, which may be
    variances or masks, keep sign and zeros unless all are zero. Vectors of unlike numbers are turned round: a bias that
    sends all rows to one expert sends them to another.
    """
    generator = torch.Generator().manual_seed(seed)
    done: dict[int, Tensor] = {}
    for tensor in state.values():
        if id(tensor) not in done:
            done[id(tensor)] = _moved(tensor, generator) if _can_move(tensor) else tensor
    return {name: done[id(tensor)] for name, tensor in state.items()}


def perturbed_inputs(arguments: Any, seed: int) -> Any:
    """Return `arguments` with noise on every float tensor; integers are kept, and so is the sign of what is >= 0."""
    generator = torch.Generator().manual_seed(seed)

    def move(tensor: Tensor) -> Tensor:
        if not _can_move(tensor):
            return tensor
        keep_sign = not tensor.is_complex() and bool((tensor >= 0).all()) and bool(tensor.any())
        return _moved_buffer(tensor, generator) if keep_sign else _moved_parameter(tensor, generator)

    return map_tensors(move, arguments)


def jittered(value: Any, step: float, wide: torch.dtype | None, seed: int) -> Any:
    """Return `value` in `wide` floats, each off by about `step` relatively: what rounding elsewhere might have done."""
    generator = torch.Generator().manual_seed(seed)

    def move(tensor: Tensor) -> Tensor:
        if not _can_move(tensor):
            return tensor
        exact = tensor.detach().to(tensor.dtype if wide is None else widened(tensor.dtype, wide))
        return exact + exact * (step * _noise(tensor, generator)).to(exact.dtype)

    return map_tensors(move, value)


def stands_for_infinity(tensor: Tensor) -> bool:
    """Say whether any value in a tensor is infinite, or so large that it stands for that: the tensor is a mask."""
    return not bool((tensor.abs() < _HUGE).all())


def _can_move(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_plain and is_float and tensor.dtype.itemsize > 1 and tensor.numel() > 0


def _noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return normal noise of a tensor's shape; what is drawn for a large one repeats, which costs a tenth."""
    count = tensor.numel()
    noise = torch.randn(min(count, _PERIOD), generator=generator, dtype=torch.float32)
    if count > _PERIOD:
        noise = noise.repeat(-(-count // _PERIOD))[:count]
    return noise.view(tensor.shape).to(device=tensor.device)


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return _moved_buffer(tensor, generator)
    return _moved_parameter(tensor.detach().flip(0) if _decides(tensor) else tensor, generator)


def _decides(tensor: Tensor) -> bool:
    """Say whether a parameter may be a bias that outweighs whatever it is added to."""
    if tensor.ndim != 1 or tensor.is_complex():
        return False
    return _DECIDES < float(tensor.detach().max() - tensor.detach().min()) < _HUGE


def _moved_parameter(tensor: Tensor, generator: torch.Generator) -> Tensor:
    start = tensor.detach()
    norm = _norm(start)
    if norm < _HUGE:
        return torch.add(start, _noise(start, generator).to(start.dtype), alpha=_STRENGTH * _scale(norm, start))
    ordinary = start.abs() < _HUGE
    kept = torch.where(ordinary, start, 0).to(widened(start.dtype))
    scale = _scale(_norm(kept), start)
    return torch.where(ordinary, kept + _STRENGTH * scale * _noise(start, generator), start).to(start.dtype)


def _norm(tensor: Tensor) -> float:
    """Return about the norm: it says how far values move, and whether any may stand for infinity."""
    wide = widened(tensor.dtype, torch.float32)  # in float64 it takes ten times as long
    return float(cast("Any", torch.linalg).vector_norm(tensor.to(wide)))


def _scale(norm: float, tensor: Tensor) -> float:
    return norm / math.sqrt(tensor.numel()) or 1.0


def _moved_buffer(tensor: Tensor, generator: torch.Generator) -> Tensor:
    noise = _noise(tensor, generator).tanh()
    start = tensor.detach()
    if not start.any():
        return (_STRENGTH * noise.abs()).to(start.dtype)
    moved = start * (1 + _STRENGTH * noise)
    return torch.where(start.abs() < _HUGE, moved, start).to(start.dtype)
