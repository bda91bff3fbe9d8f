"""What analyses know about a program; computed when first asked for, dropped when the program changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["CallSites", "TensorOwners"]


@dataclass(frozen=True)
class CallSites:
    """How often each module is called from the graphs of a program."""

    calls: Mapping[nn.Module, int]

    @classmethod
    def compute(cls, program: Program) -> CallSites:
        calls: Counter[nn.Module] = Counter()
        for home, capture in program.captures.items():
            per_variant: list[Counter[nn.Module]] = []
            for variant in capture.variants:
                nodes = [node for node in variant.graph.nodes if node.op == "call_module"]
                per_variant.append(Counter(program.callee(home, node) for node in nodes))
            for module in {module for counts in per_variant for module in counts}:
                calls[module] += max(counts[module] for counts in per_variant)
        return cls(calls)

    def count(self, module: nn.Module) -> int:
        """Return the number of call sites; a module inside an opaque one may have more than are known."""
        return self.calls.get(module, 0)


@dataclass(frozen=True)
class TensorOwners:
    """Under which names each parameter and buffer is registered."""

    by_name: Mapping[str, tuple[str, ...]]

    @classmethod
    def compute(cls, program: Program) -> TensorOwners:
        names: defaultdict[int, list[str]] = defaultdict(list)
        model = program.model
        for name, tensor in model.named_parameters(remove_duplicate=False):
            names[id(tensor)].append(name)
        for name, tensor in model.named_buffers(remove_duplicate=False):
            names[id(tensor)].append(name)
        return cls({name: tuple(group) for group in names.values() for name in group})

    def names(self, name: str) -> tuple[str, ...]:
        """Return every name of the tensor called `name`, `name` among them."""
        return self.by_name.get(name, (name,))
