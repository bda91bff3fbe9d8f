"""How many multiplications and additions an operator takes: torch's own count, and attention on a CPU with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, flop_registry

__all__ = ["counted_flops", "flops_of"]


def counted_flops() -> FlopCounterMode:
    """Return a context that counts what runs inside."""
    return FlopCounterMode(display=False, custom_mapping=_on_cpu())


def flops_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return what one call of an operator of `torch.ops` takes; 0 where that is not known."""
    packet = operator.overloadpacket
    if packet in _on_cpu():
        return float(_attention(*(tensor.shape for tensor in args[:3])))
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _on_cpu() -> dict[Any, Any]:
    attention = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return {} if attention is None else {attention: _attention}


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count attention on a CPU, which torch's counter does not know; of shapes."""
    return cast("Any", flop_counter).sdpa_flop_count(query, key, value)
