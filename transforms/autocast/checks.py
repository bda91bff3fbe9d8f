"""What is refused before any work: dtypes that a device lacks, and words that name nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from ...errors import UsageError, one_line
from ...operators import operator_info
from ...passes.contract import check_named
from .lists import FLOAT32, FOLLOWING, LOWER

__all__ = ["check_dtype", "check_words"]


def check_dtype(dtype: torch.dtype, device: str) -> None:
    """Raise `UsageError` unless devices of a type can autocast to a dtype, a product and its gradient."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise UsageError(f"pass 'autocast': dtype={str(dtype).removeprefix('torch.')}; use bfloat16 or float16")
    if device == "meta":
        return
    reason = f"PyTorch has no autocast for {device}"
    if torch.amp.is_autocast_available(device):
        reason = _failure(dtype, device)
    if reason:
        other = "float16" if dtype is torch.bfloat16 else "bfloat16"
        named = str(dtype).removeprefix("torch.")
        raise UsageError(f"pass 'autocast': {device} does not compute in {named} ({reason}); try dtype={other}")


def _failure(dtype: torch.dtype, device: str) -> str:
    """Return why a device does not compute in a dtype, or ""."""
    try:
        with warnings.catch_warnings(record=True) as said, torch.autocast(device, dtype=dtype), torch.enable_grad():
            x = torch.ones(2, 2, device=device, requires_grad=True)
            product = x @ x
            product.sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return one_line(error)
    return "" if product.dtype is dtype else next((str(each.message) for each in said), "autocast is off")


def check_words(words: Sequence[str], model: nn.Module) -> None:
    """Raise `UsageError` for a word of `keep` that names no module, no class of one and no operator."""
    others = [word for word in words if word not in LOWER | FLOAT32 | FOLLOWING and not operator_info(word).name]
    check_named("autocast", "keep", others, model)
