"""TorchScript, as a trace of the model: deprecated by torch, and what older deployments load."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...compat.quantized import simulating
from ...runtime.values import map_leaves
from .source import Source

__all__ = ["write_torchscript"]


def write_torchscript(source: Source, folder: Path) -> tuple[Path, ...]:
    """Write `model.ts` into a folder."""
    tensors = tuple(tensor.detach().clone() for tensor in source.arguments.values())
    jit = cast("Any", torch.jit)
    with warnings.catch_warnings(), simulating(False), torch.enable_grad():  # quantized layers: torch's own operators
        warnings.simplefilter("ignore")  # what is fixed by the trace is compared
        traced = jit.trace(_of_tensors(source), tensors, check_trace=False, strict=False)
        file = folder / "model.ts"
        jit.save(traced, str(file))
    return (file,)


def _of_tensors(source: Source) -> nn.Module:
    """Return a module that takes the tensors among the arguments, by name; all else is as in the example."""
    graph = fx.Graph()
    placeholders = iter([graph.placeholder(name) for name in source.arguments])

    def placed(leaf: Any) -> Any:
        return next(placeholders) if isinstance(leaf, Tensor) else leaf

    args, kwargs = map_leaves(placed, (source.call.args, source.call.kwargs))
    graph.output(graph.call_module("model", args, kwargs))
    return fx.GraphModule({"model": source.model}, graph)
