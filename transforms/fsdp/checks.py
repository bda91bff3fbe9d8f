"""What FSDP2 cannot shard: said before any work, where FSDP2 itself would fail at the first step."""

from __future__ import annotations

import torch
from torch import nn

from ...compat import modules_by_name
from ...errors import UsageError
from ...layers.sync_batch_norm import BATCH_NORMS

__all__ = ["check_batch_norms", "check_parameters"]


def check_parameters(model: nn.Module) -> None:
    """Raise UsageError for parameters that FSDP2 does not take: scalars, not contiguous, of several dtypes."""
    first: tuple[str, torch.dtype] | None = None
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise UsageError(f"pass 'fsdp': '{name}' is a scalar; make it a tensor of one element to shard it")
        if not parameter.is_contiguous():
            step = "call model.to(memory_format=torch.contiguous_format) before"
            raise UsageError(f"pass 'fsdp': '{name}' is not contiguous, and FSDP2 shards only what is; {step}")
        if not parameter.requires_grad:
            continue
        first = first or (name, parameter.dtype)
        if parameter.dtype != first[1]:
            differ = f"'{first[0]}' is {first[1]} and '{name}' {parameter.dtype}"
            raise UsageError(f"pass 'fsdp': {differ}; bring all that is trained to one dtype")


def check_batch_norms(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise UsageError for a batch norm, computed in a dtype that is not its statistics'."""
    for name, module in modules_by_name(model).items():
        if isinstance(module, BATCH_NORMS):
            word = str(dtype).removeprefix("torch.")
            raise UsageError(
                f"pass 'fsdp': '{name}' keeps its statistics in float32, and takes no others; "
                f"use autocast{{dtype={word}}} before fsdp instead of its dtype"
            )
