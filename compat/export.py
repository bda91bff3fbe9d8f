"""The private names of torch that tell what exported programs hold, and load them."""

from __future__ import annotations

from typing import Any, BinaryIO

from torch.fx import Graph

__all__ = ["batches_by_vmap", "load_exported_program"]


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
