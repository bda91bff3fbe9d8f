"""What analyses know about a program; computed when first asked for, dropped when the program changes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor, fx, nn

from ...compat import all_modules
from ...runtime.graphs import Region
from ...runtime.values import all_tensors
from ..analyses import StructuralHash
from .program import Program

__all__ = ["CallSites", "TensorOwners", "TensorReads", "found_in_graphs", "is_on_meta"]

T = TypeVar("T")


class CallSite(NamedTuple):
    """A node that calls a module, in which graph of which owner."""

    owner: str
    specialization: int
    node: fx.Node


@dataclass(frozen=True)
class CallSites:
    """Where the graphs of a program call each module; a module inside an opaque one may have calls that none knows."""

    sites: Mapping[nn.Module, Sequence[CallSite]]

    @classmethod
    def compute(cls, program: Program) -> CallSites:
        sites: defaultdict[nn.Module, list[CallSite]] = defaultdict(list)
        for owner, capture in program.captures.items():
            for number, specialization in enumerate(capture.specializations):
                for node in specialization.graph.find_nodes(op="call_module"):
                    sites[program.callee(owner, node)].append(CallSite(owner, number, node))
        return cls(sites)

    def of(self, module: nn.Module) -> Sequence[CallSite]:
        """Return the calls of a module, in all graphs."""
        return self.sites.get(module, ())

    def count(self, module: nn.Module) -> int:
        """Return how often a module is called, where each owner runs the graph that calls it most."""
        most: dict[str, int] = {}
        for (owner, _), count in Counter(site[:2] for site in self.of(module)).items():
            most[owner] = max(count, most.get(owner, 0))
        return sum(most.values())


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
    hashes, known = program.analyses[StructuralHash], dict[tuple[int, int], T]()
    for owner, capture in program.captures.items():
        kind = hashes.of(program.module(owner))
        for number, specialization in enumerate(capture.specializations):
            if (kind, number) not in known:
                known[kind, number] = look(specialization.graph, program, owner)
            yield owner, number, specialization.graph, known[kind, number]
