"""Find independent, isomorphic computations: the packs of operations that one batched operation could replace.

The search is superword-level parallelism (Larsen and Amarasinghe, PLDI 2000) on whole tensors: operations get a colour
from what they compute and from the colours of what they read, operations of one colour form a pack, and packs grow
along the dataflow from the linear layers on. Equal colours imply equal levels, so the members of a pack cannot depend
on one another.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..compat import own_children
from .expansion import Expansion, Operation, expand
from .forms import normal_form, packable
from .packs import Ensemble, Gathered, Operand, Pack, Parameters, Selected, Shared

if TYPE_CHECKING:
    from ..tracing.program import Program

__all__ = ["Ensembles", "attribute", "find_ensembles"]


class Ensembles:
    """The ensembles of a program, each home's looked for once until the program changes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[tuple[str, int], list[Ensemble]] = {}

    @classmethod
    def compute(cls, program: Program) -> Ensembles:
        return cls(program)

    def of(self, home: str, variant: int) -> list[Ensemble]:
        if (home, variant) not in self._known:
            expansion = expand(self._program, home, variant)
            self._known[home, variant] = _search(expansion, self._program.module(home))
        return self._known[home, variant]


def find_ensembles(program: Program, home: str, variant: int = 0) -> list[Ensemble]:
    """Return the ensembles of at least two members in what `home` computes, in execution order."""
    return program.facts[Ensembles].of(home, variant)


def _search(expansion: Expansion, home: nn.Module) -> list[Ensemble]:
    search = _Search(home)
    for operation in expansion.operations:
        search.color(operation)
    for members in list(search.classes.values()):
        search.pack(members)
    return search.ensembles()


class _Search:
    """The state of one search: colours, packs and which pack each operation is in."""

    def __init__(self, home: nn.Module) -> None:
        self.home = home
        self.colors: dict[Operation, int] = {}
        self.classes: dict[object, list[Operation]] = {}
        self.numbers: dict[object, int] = {}
        self.located: dict[Operation, tuple[Pack, int]] = {}
        self.packs: list[Pack] = []
        self.forms: dict[Operation, tuple[Any, list[Operation]]] = {}

    def color(self, operation: Operation) -> None:
        """Give `operation` a colour if it is a linear layer or element-wise on something coloured."""
        if not packable(operation):
            return
        template, operands = normal_form(operation)
        if operation.operator != "linear" and not any(operand in self.colors for operand in operands):
            return
        signature = (operation.operator, repr(template), *(self.describe(operand) for operand in operands))
        self.forms[operation] = template, operands
        self.colors[operation] = self.numbers.setdefault(signature, len(self.numbers))
        self.classes.setdefault(signature, []).append(operation)

    def describe(self, operand: Operation) -> object:
        if operand in self.colors:
            return "color", self.colors[operand]
        if operand.kind == "get_attr":
            return self.describe_attribute(str(operand.target))
        selection = selected(operand)
        if selection is not None:
            return "select", selection[0].name, selection[1]
        if len(operand.users) > 1:
            return "shared", operand.name
        return "own", operand.level, repr(operand.example)

    def describe_attribute(self, name: str) -> object:
        tensor = attribute(self.home, name)
        if not isinstance(tensor, torch.Tensor):
            return "constant", name
        return "attribute", _place(self.home, name), tuple(tensor.shape), tensor.dtype, tensor.device

    def pack(self, members: Sequence[Operation]) -> None:
        for group in self.align(members):
            pack = self.form(group) if len(group) > 1 else None
            if pack is None:
                continue
            self.packs.append(pack)
            for position, member in enumerate(group):
                self.located[member] = pack, position

    def align(self, members: Sequence[Operation]) -> list[list[Operation]]:
        """Split one colour into groups ordered like the packs that they read; linears on outer inputs are one group."""
        sources = [self.sources(member) for member in members]
        if not any(sources):
            return self.by_use(members)
        groups: dict[tuple[int, int], dict[int, Operation]] = defaultdict(dict)
        ranks: dict[tuple[int, int], int] = defaultdict(int)
        for member, source in zip(members, sources, strict=True):
            if not source:
                continue
            pack, position = source[0]
            rank = ranks[id(pack), position]
            ranks[id(pack), position] += 1
            groups[id(pack), rank][position] = member
        complete = {id(pack): pack.size for source in sources for pack, _ in source[:1]}
        return [
            [group[i] for i in range(complete[pack])]
            for (pack, _), group in groups.items()
            if len(group) == complete[pack]
        ]

    def by_use(self, members: Sequence[Operation]) -> list[list[Operation]]:
        """Split operations into the first uses of their last operand (mostly a parameter), second uses and so on."""
        uses: Counter[object] = Counter()
        groups: list[list[Operation]] = []
        for member in members:
            read = self.forms[member][1][-1]
            key = read.target if read.kind == "get_attr" else read
            if uses[key] == len(groups):
                groups.append([])
            groups[uses[key]].append(member)
            uses[key] += 1
        return groups if len(groups[0]) > 1 else [list(members)]

    def sources(self, member: Operation) -> list[tuple[Pack, int]]:
        return [self.located[operand] for operand in self.forms[member][1] if operand in self.located]

    def form(self, group: Sequence[Operation]) -> Pack | None:
        """Return the pack of `group`, or None where an operand cannot be given to all members at once."""
        template, _ = self.forms[group[0]]
        columns = zip(*(self.forms[member][1] for member in group), strict=True)
        operands = [self.operand(column) for column in columns]
        if any(operand is None for operand in operands):
            return None
        found = tuple(operand for operand in operands if operand is not None)
        if all(isinstance(operand, Shared) for operand in found):
            return None  # one computation, several times: nothing to batch
        if group[0].operator == "linear" and not _linear_is_batchable(found):
            return None
        return Pack(group[0].operator or "", tuple(group), template, found, tuple(map(self.ranks, found)))

    def operand(self, column: tuple[Operation, ...]) -> Operand | None:
        """Return how all members' values of one argument are had at once, or None."""
        if all(_same_value(operand, column[0]) for operand in column):
            return Shared(column[0])
        if any(operand in self.located for operand in column):
            return self.packed(column)
        if all(operand.kind == "get_attr" for operand in column):
            names = tuple(str(operand.target) for operand in column)
            return Parameters(names) if all(isinstance(attribute(self.home, n), nn.Parameter) for n in names) else None
        return _selection(column) or (Gathered(column) if len(set(column)) == len(column) else None)

    def packed(self, column: Sequence[Operation]) -> Pack | None:
        """Return the pack that `column` is, in the same order, or None."""
        places = [self.located.get(operand) for operand in column]
        pack = places[0][0] if places[0] else None
        if pack is None or any(place != (pack, i) for i, place in enumerate(places)) or pack.size != len(column):
            return None
        return pack

    def ranks(self, operand: Operand) -> frozenset[object]:
        """Return what decides an operand's number of dimensions; nothing where it has one at the most."""
        match operand:
            case Pack():
                return operand.ranks
            case Shared() if _is_flat(operand.operation.example) or self.is_flat_attribute(operand.operation):
                return frozenset()
            case Parameters() if _is_flat(attribute(self.home, operand.names[0])):
                return frozenset()
            case Selected():
                return frozenset((Selected(operand.source, 0),))
            case _:
                return frozenset((operand,))

    def is_flat_attribute(self, operation: Operation) -> bool:
        return operation.kind == "get_attr" and _is_flat(attribute(self.home, str(operation.target)))

    def ensembles(self) -> list[Ensemble]:
        owner: dict[Pack, Ensemble] = {}
        first: dict[Parameters, Pack] = {}
        for pack in sorted(self.packs, key=lambda pack: max(member.index for member in pack.members)):
            stacks = [first.setdefault(source, pack) for source in pack.operands if isinstance(source, Parameters)]
            sources = [
                source for source in (*pack.operands, *stacks) if isinstance(source, Pack) and source is not pack
            ]
            joined = dict.fromkeys(owner[source] for source in sources)
            ensemble = Ensemble([p for part in joined for p in part.packs] + [pack])
            owner.update(dict.fromkeys(ensemble.packs, ensemble))
        unique = dict.fromkeys(owner.values())
        for ensemble in unique:
            ensemble.packs.sort(key=lambda pack: max(member.index for member in pack.members))
        return [ensemble for ensemble in unique if any(True for _ in ensemble.parameters)]


def selected(operation: Operation) -> tuple[Operation, int, int] | None:
    """Return (source, dim, index) where `operation` is `source[..., index, ...]` with full slices elsewhere."""
    if operation.operator != "getitem" or len(operation.args) != 2 or not isinstance(operation.args[0], Operation):
        return None
    index = operation.args[1]
    parts = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
    places = [i for i, part in enumerate(parts) if isinstance(part, int) and not isinstance(part, bool)]
    others = [part for part in parts if not isinstance(part, int)]
    if len(places) != 1 or not _keeps_everything(others) or not _is_tensor(operation.args[0]):
        return None
    if others and others[0] is Ellipsis:
        return (operation.args[0], places[0] - len(parts), parts[places[0]])
    return operation.args[0], places[0], parts[places[0]]


def _keeps_everything(parts: Sequence[object]) -> bool:
    if any(part is Ellipsis for part in parts):
        return len(parts) == 1
    return all(part == slice(None) for part in parts)


def _is_tensor(operation: Operation) -> bool:
    return operation.kind == "get_attr" or hasattr(operation.example, "dtype")


def _same_value(one: Operation, other: Operation) -> bool:
    return one is other or (one.kind == other.kind == "get_attr" and one.target == other.target)


def _selection(column: Sequence[Operation]) -> Selected | None:
    picks = [selected(operand) for operand in column]
    first = picks[0]
    if first is None or any(pick != (first[0], first[1], i) for i, pick in enumerate(picks)):
        return None
    return Selected(first[0], first[1])


def _linear_is_batchable(operands: Sequence[Operand]) -> bool:
    _, weight, *bias = operands
    if isinstance(weight, Shared):
        return all(isinstance(b, Shared) for b in bias)
    return isinstance(weight, (Parameters, Selected)) and all(isinstance(b, (Parameters, Selected)) for b in bias)


def _is_flat(value: object) -> bool:
    """Say whether a value is a number, or a parameter or buffer with one dimension at the most."""
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() <= 1)


def _place(home: nn.Module, name: str) -> str:
    """Return an attribute's name without what tells members apart: numbers, and the keys of dictionaries."""
    module, parts = home, list[str]()
    for part in name.split("."):
        parts.append("*" if isinstance(module, (nn.ModuleDict, nn.ParameterDict)) else re.sub(r"\d+", "*", part))
        module = None if module is None else own_children(module).get(part)
    return ".".join(parts)


def attribute(home: nn.Module, name: str) -> object:
    """Return the attribute that a dotted name means, or None."""
    path, _, last = name.rpartition(".")
    try:
        return getattr(home.get_submodule(path), last, None)
    except AttributeError:
        return None
