"""Which module calls which in the finished model: FSDP2 gathers tensors when modules are called, and only then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ...compat import own_children
from ...runtime.graphs import specializations_of
from ...tracing.program import Program

__all__ = ["Callers"]


@dataclass(frozen=True)
class Callers:
    """The modules that a model calls, as its graphs and, where there is no graph, its example inputs show it."""

    of: Mapping[nn.Module, frozenset[nn.Module]]  # a called module -> those that call it; the root calls itself
    unseen: frozenset[nn.Module]  # the modules of which nothing shows what they call

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


def _called(program: Program, caller: nn.Module) -> Iterator[nn.Module]:
    specializations = specializations_of(caller)
    for specialization in specializations:
        for node in specialization.graph.find_nodes(op="call_module"):
            yield caller.get_submodule(str(node.target))
    if not specializations and program.inputs and any(own_children(caller).values()):
        for call in program.recording().calls.get(caller, ()):
            yield from (module for module, _ in call.children)
