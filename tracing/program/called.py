"""Which modules are called at all: the members of a fused ensemble are not any more, say."""

from __future__ import annotations

from ...runtime.graphs import capture_of
from .program import Program

__all__ = ["is_called"]


def is_called(program: Program, name: str) -> bool:
    """Say whether all modules around it that have graphs call a module, or what holds it."""
    around = name
    while around:
        around = around.rpartition(".")[0]
        capture = capture_of(program.module(around))
        if capture is not None and capture.specializations:
            graphs = [each.graph for each in capture.specializations]
            called = {str(node.target) for graph in graphs for node in graph.find_nodes(op="call_module")}
            path = name[len(around) + bool(around) :].split(".")
            if not any(".".join(path[: count + 1]) in called for count in range(len(path))):
                return False
    return True
