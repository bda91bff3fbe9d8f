"""The private names of torch that tell what exported programs hold, load them, let the ONNX exporter be quiet, and
simplify what TorchScript traced.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import torch
from torch.fx import Graph

__all__ = ["ONNX_EXPORTER", "batches_by_vmap", "load_exported_program", "onnx_log_off", "without_repetitions"]

ONNX_EXPORTER = "torch.onnx._internal.exporter"
"""The logger of the exporter of exported programs."""


def batches_by_vmap(graph: Graph) -> bool:
    """Say whether an exported graph opens and closes levels of `torch.vmap`, which only functorch can run."""
    module = "torch._functorch.predispatch"
    return any(getattr(node.target, "__module__", "") == module for node in graph.nodes)


def load_exported_program(file: BinaryIO) -> Any:
    """Return the `ExportedProgram` in a `.pt2` file; `torch.export.load` would try an older format where this fails."""
    from torch.export.pt2_archive._package import load_pt2

    from .quantized import load_pattern

    load_pattern()

    return load_pt2(file).exported_programs["model"]


_NATIVE = cast("Any", torch)._C
_ONNX_LOG = _NATIVE._jit_onnx_log


@contextmanager
def onnx_log_off() -> Generator[None]:
    """Let the ONNX exporter print no graph where it does not know an operation: its error names that.

    It turns its log on itself, so the function that writes to it is replaced.
    """
    _NATIVE._jit_onnx_log = _nothing
    try:
        yield
    finally:
        _NATIVE._jit_onnx_log = _ONNX_LOG


def without_repetitions(graph: Any) -> Any:
    """Return a graph of TorchScript in which equal constants are one, and what computes the same is computed once."""
    new = graph.copy()
    _NATIVE._jit_pass_constant_pooling(new)
    _NATIVE._jit_pass_cse(new)
    return new


def _nothing(*_: object) -> None: ...
