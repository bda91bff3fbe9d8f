"""Module calls that stay one operation: their forwards are no graph of functions, but N run at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ....compat import modules_by_name

__all__ = ["module_operator", "module_signature", "state_names"]

_OPERATORS: dict[type[nn.Module], str] = {
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.InstanceNorm1d: "module",
    nn.InstanceNorm2d: "module",
    nn.InstanceNorm3d: "module",
    nn.LSTM: "recurrent",
    nn.GRU: "recurrent",
    nn.RNN: "recurrent",
    nn.MultiheadAttention: "module",
    nn.TransformerEncoderLayer: "module",
    nn.TransformerDecoderLayer: "module",
}


def module_operator(module: nn.Module) -> str | None:
    """Return what a `torch.nn` leaf computes: `batch_norm`, `recurrent`, any `module` under vmap; None if unknown."""
    operator = _OPERATORS.get(type(module))
    if operator == "batch_norm" and getattr(module, "momentum", None) is None:
        return None  # the cumulative average divides by a tensor's value
    if operator == "recurrent" and getattr(module, "proj_size", 0):
        return None
    return operator


def state_names(module: nn.Module) -> Iterator[str]:
    """Yield what the module's forward reads of itself: parameters, buffers and training flags, in a fixed order."""
    for path, child in modules_by_name(module).items():
        dotted = f"{path}." if path else ""
        for register in ("_parameters", "_buffers"):
            yield from (dotted + name for name, tensor in vars(child)[register].items() if tensor is not None)
        yield f"{dotted}training"


def module_signature(module: nn.Module) -> tuple[Any, ...]:
    """Return what has to be equal for two modules to compute the same function of inputs and state."""
    return tuple(
        (path, type(child), *((n, repr(v)) for n, v in sorted(vars(child).items()) if _decides(n, v)))
        for path, child in modules_by_name(module).items()
    )


def _decides(name: str, value: object) -> bool:
    if name.startswith("_") or name == "training":
        return False
    return callable(value) or isinstance(value, (bool, int, float, str, tuple, list, type(None)))
