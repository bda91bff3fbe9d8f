"""What analyses know about a program; computed when first asked for, dropped when the program changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, fx, nn

from ...compat import all_modules
from ...runtime.graphs import Region
from ...runtime.values import all_tensors
from ..analyses import StructuralHash
from .program import Program

__all__ = ["CallSites", "TensorOwners", "TensorReads", "found_in_graphs", "is_on_meta"]

T = TypeVar("T")


@dataclass(frozen=True)
class CallSites:
    """How often each module is called from the graphs of a program."""

    calls: Mapping[nn.Module, int]

    @classmethod
    def compute(cls, program: Program) -> CallSites:
        calls: Counter[nn.Module] = Counter()
        for owner, capture in program.captures.items():
            per_specialization: list[Counter[nn.Module]] = []
            for specialization in capture.specializations:
                nodes = [node for node in specialization.graph.nodes if node.op == "call_module"]
                per_specialization.append(Counter(program.callee(owner, node) for node in nodes))
            for module in {module for counts in per_specialization for module in counts}:
                calls[module] += max(counts[module] for counts in per_specialization)
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
        borrowed = tuple(f"{name}." for name, module in program.names.modules.items() if isinstance(module, Region))
        for name, tensor in program.names.registered().items():
            if not name.startswith(borrowed):
                names[id(tensor)].append(name)
        return cls({name: tuple(group) for group in names.values() for name in group})

    def names(self, name: str) -> tuple[str, ...]:
        """Return every name of the tensor called `name`, `name` among them."""
        return self.by_name.get(name, (name,))


@dataclass(frozen=True)
class TensorReads:
    """Which parameters and buffers graphs read themselves, other than by calling the module that holds them."""

    readers: Mapping[int, Mapping[str, Sequence[fx.Node]]]

    @classmethod
    def compute(cls, program: Program) -> TensorReads:
        readers: defaultdict[int, dict[str, list[fx.Node]]] = defaultdict(dict)
        for owner, capture in program.captures.items():
            module = program.module(owner)
            for specialization in capture.specializations:
                for node in specialization.graph.find_nodes(op="get_attr"):
                    path, _, last = str(node.target).rpartition(".")
                    of_tensor = readers[id(getattr(module.get_submodule(path), last, None))]
                    of_tensor.setdefault(owner or "(root)", []).append(node)
        return cls(readers)

    def readers_of(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the modules whose graphs read a tensor."""
        return tuple(self.readers.get(id(tensor), ()))

    def nodes_of(self, tensor: Tensor, reader: str) -> Sequence[fx.Node]:
        """Return the nodes by which a module's graphs read a tensor."""
        return self.readers.get(id(tensor), {}).get(reader, ())

    def reader(self, tensor: Tensor) -> str | None:
        """Return the module whose graph reads a tensor, or None."""
        return next(iter(self.readers_of(tensor)), None)


def is_on_meta(module: nn.Module) -> bool:
    """Say whether a module has tensors without data: then it can be neither compared nor timed."""
    return any(tensor.is_meta for tensor in all_tensors(all_modules(module)))


def found_in_graphs(
    program: Program, look: Callable[[fx.Graph, Program, str], T]
) -> Iterator[tuple[str, int, fx.Graph, T]]:
    """Yield the owner and the number of each graph, the graph, and what `look(graph, program, owner)` finds in it.
    Modules that are alike have the same graphs: what is found in those of the first is handed out for all of them.
    """
    likeness, known = program.analyses[StructuralHash], dict[tuple[int, int], T]()
    for owner, capture in program.captures.items():
        kind = likeness.of(program.module(owner))
        for number, specialization in enumerate(capture.specializations):
            if (kind, number) not in known:
                known[kind, number] = look(specialization.graph, program, owner)
            yield owner, number, specialization.graph, known[kind, number]
