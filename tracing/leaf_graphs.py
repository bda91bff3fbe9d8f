"""The functional graph of a `torch.nn` leaf: what `nn.Linear` or `nn.GELU` calls, with its tensors as attributes."""

from __future__ import annotations

from torch import fx, nn

from ..errors import CaptureError
from .interception import tracing_session
from .names import ModelNames
from .recorder import Untraceable
from .signature import signature_of
from .tracer import ModuleTracer

__all__ = ["trace_leaf"]


def _no(_: nn.Module) -> bool:
    return False


def trace_leaf(module: nn.Module) -> fx.Graph:
    """Return what the forward of a leaf calls, traced without example values; `self.training` stays a read.

    Raises:
        CaptureError: if the forward cannot be traced.
    """
    names = ModelNames(module)
    try:
        with tracing_session(names.modules.values()) as session:
            tracer = ModuleTracer(session, names, "", None, _no, {})
            graph = tracer.trace(signature_of(type(module).forward)).graph
    except (Untraceable, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise CaptureError(f"{type(module).__name__} cannot be traced: {error}") from error
    if tracer.decisions.flags:
        raise CaptureError(
            f"{type(module).__name__} cannot be traced: {' and '.join(map(str, tracer.decisions.flags))} decides"
        )
    return graph
