"""Which modules of a finished model are gathered and freed as one: repeated blocks, or large layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ...compat import own_children
from ...passes.sites import Refusal
from ...runtime.graphs import Region, specializations_of
from ...runtime.values import qualified, user_class
from ...tracing.program import Program, TensorOwners, TensorReads

__all__ = ["Units"]


_MOST = 0.5
"""The share of all parameters that a unit, and the root beside all units, has at the most where no size is given."""
_LARGE = 0.25
"""The share of the largest block from which a layer is worth a unit of its own, where the root has too much."""


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together before the first of them runs."""

    modules: tuple[str, ...]  # their names
    size: int  # how many parameters they have


@dataclass
class Units:
    """The search for the units of a program."""

    program: Program
    most: int | None = None  # parameters of a unit; None leaves that to the blocks
    kept: frozenset[str] = frozenset()  # names of parameters that are not sharded
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    _sizes: dict[str, int] = field(default_factory=dict[str, int], init=False)

    def find(self) -> list[Unit]:
        """Return the units in the order of their calls, the root last: it has what no other has."""
        blocks = list(self._blocks(""))
        layers = (self._own_size(name) for name in self.program.names.modules)
        largest = max(map(self._size, blocks), default=0) or max(layers)
        # What the root has is gathered once a step; a unit is gathered for the backward again.
        is_root_large = self._rest(blocks) > self._limit
        chosen = {*blocks, *(self._layers("", blocks, largest) if is_root_large else ())}
        ordered = [name for name in self.program.names.modules if name in chosen]
        units = list(self._joined(ordered, self.most or largest))
        number = {module: place for place, module in enumerate(self._callers.of)}
        units.sort(key=lambda unit: number[self.program.module(unit.modules[0])])
        return [*units, Unit(("",), self._rest(chosen))]

    # -- what may be a unit ----------------------------------------------------------------------------------------

    def _blocks(self, name: str) -> Iterator[str]:
        """Yield the outermost repeated modules inside one: siblings of one class that have modules inside."""
        children = self._children(name)
        kinds = Counter(user_class(type(child)) for child in children.values() if any(own_children(child).values()))
        for path, child in children.items():
            is_block = kinds[user_class(type(child))] > 1 and self._size(path) <= self._limit
            if is_block and self._can_be_unit(path):
                yield path
            else:
                yield from self._blocks(path)

    def _layers(self, name: str, blocks: Sequence[str], largest: int) -> Iterator[str]:
        """Yield the large modules without others inside, outside the blocks."""
        for path, child in self._children(name).items():
            if path in blocks:
                continue
            if any(own_children(child).values()):
                yield from self._layers(path, blocks, largest)
            elif self._size(path) >= max(1, _LARGE * largest) and self._can_be_unit(path):
                yield path

    def _can_be_unit(self, name: str) -> bool:
        module = self.program.module(name)
        if not self._size(name) or name != self.program.name_of(module):
            return False
        if module not in self._callers.of:
            self._refuse_unseen(name)
            return False
        reason = self._tied_outside(name) or self._read_outside(name) or self._called_outside(name)
        if reason:
            self.refusals.append(Refusal(reason, at=name))
        return not reason

    def _refuse_unseen(self, name: str) -> None:
        around = (name[:end] for end in range(len(name)) if name[end] == ".")
        names = {"", *around} & {self.program.name_of(module) for module in self._callers.unseen}
        is_container = type(self.program.module(name)).forward is nn.Module.forward
        if names and not is_container:
            reason = "nothing shows whether it is called; give example inputs"
            self.refusals.append(Refusal(reason, at=name))

    def _tied_outside(self, name: str) -> str:
        owners = self.program.analyses[TensorOwners]
        inside = tuple(f"{each}." for each in self.program.names.names(self.program.module(name)))
        for own, _ in self.program.module(name).named_parameters(prefix=name):
            other = next((alias for alias in owners.names(own) if not alias.startswith(inside)), None)
            if other is not None:
                return f"'{own}' is tied to '{other}': one unit around both has it"
        return ""

    def _read_outside(self, name: str) -> str:
        reads = self.program.analyses[TensorReads]
        for own, parameter in self.program.module(name).named_parameters():
            reader = next((each for each in reads.readers_of(parameter) if not f"{each}.".startswith(f"{name}.")), None)
            if reader is not None:
                return f"the graph of {reader} reads its '{own}'"
        return ""

    def _called_outside(self, name: str) -> str:
        unit, inside = self.program.module(name), f"{name}."
        for module in unit.modules():
            callers = map(self.program.name_of, self._callers.of.get(module, ()))
            caller = next((each for each in callers if not f"{each}.".startswith(inside)), None)
            if module is not unit and caller is not None:
                called = self.program.name_of(module).removeprefix(inside)
                return f"{caller or '(root)'} calls its '{called}' itself"
        return ""

    # -- sizes -----------------------------------------------------------------------------------------------------

    def _joined(self, names: Iterable[str], most: int) -> Iterator[Unit]:
        """Yield small neighbours as one unit each, no larger than `most`: fewer messages, and no higher peak."""
        unit: Unit | None = None
        for name in names:
            size = self._size(name)
            is_beside = unit is not None and _parent(unit.modules[0]) == _parent(name)
            if unit is not None and is_beside and unit.size + size <= most:
                unit = Unit((*unit.modules, name), unit.size + size)
                continue
            if unit is not None:
                yield unit
            unit = Unit((name,), size)
        if unit is not None:
            yield unit

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            named = self.program.module(name).named_parameters(prefix=name)
            self._sizes[name] = sum(parameter.numel() for own, parameter in named if own not in self.kept)
        return self._sizes[name]

    def _own_size(self, name: str) -> int:
        named = self.program.module(name).named_parameters(prefix=name, recurse=False)
        return sum(parameter.numel() for own, parameter in named if own not in self.kept)

    def _rest(self, names: Iterable[str]) -> int:
        """Return how many parameters are left for the root."""
        return self._size("") - sum(map(self._size, names))

    @property
    def _limit(self) -> float:
        return _MOST * self._size("") if self.most is None else self.most

    # -- what the program says -------------------------------------------------------------------------------------

    @property
    def _callers(self) -> Callers:
        return self.program.analyses[Callers]

    def _children(self, name: str) -> dict[str, nn.Module]:
        children = own_children(self.program.module(name))
        return {
            qualified(name, key): child
            for key, child in children.items()
            if child is not None and not isinstance(child, Region)
        }


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class Callers:
    """The modules that a model calls, as its graphs and, where there is no graph, its example inputs show it."""

    of: Mapping[nn.Module, frozenset[nn.Module]]  # a called module -> those that call it, in the order of first calls
    # The root calls itself.
    unseen: frozenset[nn.Module]  # the modules of which nothing shows what they call

    @classmethod
    def compute(cls, program: Program) -> Callers:
        model = program.model
        found: defaultdict[nn.Module, set[nn.Module]] = defaultdict(set, {model: {model}})
        unseen = set[nn.Module]()

        def follow(caller: nn.Module) -> None:
            called = list(_called(program, caller))
            if not called and any(own_children(caller).values()) and not program.inputs:
                unseen.add(caller)
            for module in called:
                is_new = module not in found
                found[module].add(caller)
                if is_new:
                    follow(module)

        follow(model)
        return cls({module: frozenset(callers) for module, callers in found.items()}, frozenset(unseen))


def _called(program: Program, caller: nn.Module) -> Iterator[nn.Module]:
    specializations = specializations_of(caller)
    for specialization in specializations:
        for node in specialization.graph.find_nodes(op="call_module"):
            yield caller.get_submodule(str(node.target))
    if not specializations and program.inputs and any(own_children(caller).values()):
        for call in program.recording().calls.get(caller, ()):
            yield from (module for module, _ in call.children)
