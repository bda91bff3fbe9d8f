"""Which module calls which in the finished model: FSDP2 gathers tensors when modules are called, and only then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx, nn

from ...compat import own_children
from ...tracing.graphs import capture_of
from ...tracing.program import Program

__all__ = ["Callers", "graphs_of"]


@dataclass(frozen=True)
class Callers:
    """The modules that a model calls, as its graphs and, where there is no graph, its example inputs show it.

    Attributes:
        of: a called module -> those that call it; the root calls itself.
        unseen: the modules of which nothing shows what they call.
    """

    of: Mapping[nn.Module, frozenset[nn.Module]]
    unseen: frozenset[nn.Module]

    @classmethod
    def compute(cls, program: Program) -> Callers:
        model = program.model
        found: defaultdict[nn.Module, set[nn.Module]] = defaultdict(set, {model: {model}})
        pending, unseen = [model], set[nn.Module]()
        while pending:
            caller = pending.pop()
            called = list(_called(program, caller))
            if not called and any(own_children(caller).values()) and not program.inputs:
                unseen.add(caller)
            pending += [module for module in dict.fromkeys(called) if module not in found]
            for module in called:
                found[module].add(caller)
        return cls({module: frozenset(callers) for module, callers in found.items()}, frozenset(unseen))


def graphs_of(module: nn.Module) -> list[fx.Graph]:
    """Return the graphs of a module; none if it could not be captured."""
    capture = capture_of(module)
    return [] if capture is None else [specialization.graph for specialization in capture.specializations]


def _called(program: Program, caller: nn.Module) -> Iterator[nn.Module]:
    graphs = graphs_of(caller)
    for graph in graphs:
        for node in graph.find_nodes(op="call_module"):
            yield caller.get_submodule(str(node.target))
    if not graphs and program.inputs and any(own_children(caller).values()):
        for call in program.recording().calls.get(caller, ()):
            yield from (module for module, _ in call.children)
