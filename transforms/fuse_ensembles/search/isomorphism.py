"""Find independent, isomorphic computations: the packs of operations that one batched operation could replace.

The search is superword-level parallelism (Larsen and Amarasinghe, PLDI 2000) on whole tensors: operations get a colour
from what they compute and from the colours of what they read, operations of one colour form a pack, and packs grow
along the dataflow from the linear layers on. Equal colours imply equal levels, so the members of a pack cannot depend
on one another.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from ....compat import own_tensor, submodule
from ....operators import function_path, operator_info
from ....tracing.program import Program
from ..inlining import InlinedGraph, Known, Operation, inlined_graph, module_signature, state_names
from .canonicalization import canonical_form, packable
from .packs import (
    Ensemble,
    Flags,
    Gathered,
    Operand,
    Pack,
    Parameters,
    Selected,
    Shared,
    dimensional_slots,
    is_one_of_several_places,
    is_stacked,
    operand_ranks,
    selected,
    selection,
)

__all__ = ["find_ensembles"]

_SIZES = frozenset(("shape", "size", "dim", "numel", "len"))
_NUMBER = re.compile(r"\d+")


class _Ensembles(Known[tuple[str, int, bool], list[Ensemble]]):
    """The ensembles of graphs."""


def find_ensembles(program: Program, owner: str, specialization: int = 0, *, flipped: bool = False) -> list[Ensemble]:
    """Return the ensembles of at least two members in what `owner` computes, in order; see `inlined_graph`."""
    known, key = program.analyses[_Ensembles], (owner, specialization, flipped)
    if key not in known:
        known[key] = _search(inlined_graph(program, owner, specialization, flipped=flipped), program.module(owner))
    return known[key]


def _search(inlined: InlinedGraph, owner: nn.Module) -> list[Ensemble]:
    """Look for members by their places in the module tree first, then among the rest by structure alone."""
    found: list[Ensemble] = []
    taken: set[Operation] = set()
    for by_place in (True, False):
        search = _Search(owner, by_place)
        for operation in inlined.operations:
            if operation not in taken:
                search.color(operation)
        for members in list(search.classes.values()):
            for group in search.align(members):
                search.pack_group(group)
        ensembles = [each for each in search.ensembles() if _is_of_interest(each)]
        found.extend(ensembles)
        taken.update(member for ensemble in ensembles for pack in ensemble.packs for member in pack.members)
    return found


def _is_of_interest(ensemble: Ensemble) -> bool:
    """Say whether it computes more than tensors that are kept, and not all in one inlined call: that is found there."""
    members = [member for pack in ensemble.packs for member in pack.members]
    belongs_to_a_child = all("/" in member.name for member in members) and len({each.call for each in members}) == 1
    return not belongs_to_a_child and any(p.operator != "derived" and not _is_derived(p) for p in ensemble.packs)


class _Search:
    """The state of one search: colours, packs and which pack each operation is in."""

    def __init__(self, owner: nn.Module, by_place: bool) -> None:
        self.owner = owner
        self.by_place = by_place
        self.colors: dict[Operation, int] = {}
        self.classes: dict[object, list[Operation]] = {}
        self.numbers: dict[object, int] = {}
        self.located: dict[Operation, tuple[Pack, int]] = {}
        self.packs: list[Pack] = []
        self.same: dict[Operation, Operation] = {}
        self.sizes: dict[object, Operation] = {}
        self.forms: dict[Operation, tuple[Any, list[Operation]]] = {}
        self.values: dict[str, object] = {}
        self.places: dict[str, tuple[str, bool]] = {}
        self.modules: dict[str, nn.Module | None] = {"": owner}

    def color(self, operation: Operation) -> None:
        """Give `operation` a colour if it can be batched and reads a parameter or something coloured."""
        if not packable(operation):
            return
        if is_one_of_several_places(operation):
            return
        template, text, operands = self.spelled(operation)
        seed = operation.operator == "linear" or (operation.operator in _SIZES and selected(operands[0]) is not None)
        if not seed and not any(operand in self.colors or self.is_parameter(operand) for operand in operands):
            self.number(operation, text, operands)
            return
        what: str | None = operation.operator
        if what == "derived":
            what = repr(operation.node.target)
        elif operation.kind != "call_module" and what != "linear" and not operator_info(what).elementwise:
            what = function_path(operation.node)
        signature = (what, text, *(self.describe(operand) for operand in operands))
        self.forms[operation] = template, operands
        self.colors[operation] = self.numbers.setdefault(signature, len(self.numbers))
        if not _is_made_of_parameters(operation):
            self.classes.setdefault(signature, []).append(operation)

    def number(self, operation: Operation, text: str, operands: Sequence[Operation]) -> None:
        """Let equal calculations with sizes, which each member does for itself, count as one value."""
        if _is_size(operation):
            key = (operation.operator, text, *(id(self.same.get(o, o)) for o in operands))
            self.same[operation] = self.sizes.setdefault(key, operation)

    def spelled(self, operation: Operation) -> tuple[tuple[Any, ...], str, list[Operation]]:
        """Return an operation's arguments with slots for the operands, the text of these, and the operands."""
        form = canonical_form(operation)
        operands = [operation.inputs[place] for place in form.order]
        if operation.kind != "call_module":
            return form.arguments, form.text, operands
        path = str(operation.target)
        module = self.owner.get_submodule(path)
        node, call, index = operation.node, operation.call, operation.index
        names = [f"{path}.{name}" for name in state_names(module)]
        state = [Operation(name, "get_attr", name, (), {}, None, node, call, index) for name in names]
        template = (*form.arguments, module_signature(module), len(operands))
        return template, repr(template), [*operands, *state]

    def is_parameter(self, operand: Operation) -> bool:
        return operand.kind == "get_attr" and isinstance(self.value(str(operand.target)), nn.Parameter)

    def value(self, name: str) -> object:
        """Return the attribute of a dotted name, looked up once."""
        if name not in self.values:
            path, _, last = name.rpartition(".")
            module = self.module(path)
            tensor = None if module is None else own_tensor(module, last)
            self.values[name] = getattr(module, last, None) if tensor is None else tensor
        return self.values[name]

    def module(self, path: str) -> nn.Module | None:
        """Return the module at a dotted path, looked up once."""
        if path not in self.modules:
            self.modules[path] = submodule(self.owner, path)
        return self.modules[path]

    def describe(self, operand: Operation) -> object:
        if operand in self.colors:
            return "color", self.colors[operand]
        if operand.kind == "get_attr":
            name = str(operand.target)
            value, (path, _, last) = self.value(name), name.rpartition(".")
            place = self.place(path, last) if self.by_place else ""
            if isinstance(value, torch.Tensor):
                return "attribute", place, value.shape, value.dtype, value.device
            return ("flag", place) if _is_flag(name, value) else ("constant", name)
        if operand in self.same:
            return "shared", self.same[operand].name
        picked = selected(operand)
        if picked is not None:
            return "select", picked[0].name, picked[1]
        if len(operand.users) > 1:
            return "shared", operand.name
        return "own", operand.level, repr(operand.example)

    def place(self, path: str, last: str) -> str:
        """Return an attribute's name without what tells members apart: numbers, and the keys of dictionaries."""
        if path not in self.places:
            outer, _, name = path.rpartition(".")
            in_dictionary = isinstance(self.module(path), (nn.ModuleDict, nn.ParameterDict))
            self.places[path] = (self.place(outer, name) if path else "", in_dictionary)
        around, in_dictionary = self.places[path]
        return f"{around}.{'*' if in_dictionary else _without_numbers(last)}"

    def pack_group(self, group: Sequence[Operation]) -> Pack | None:
        """Form the pack of a group, in its order, where there is one."""
        pack = self.form(group) if len(group) > 1 else None
        if pack is not None:
            self.packs.append(pack)
            self.located.update((member, (pack, position)) for position, member in enumerate(group))
        return pack

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
        full = [
            [group[i] for i in range(complete[pack])]
            for (pack, _), group in groups.items()
            if len(group) == complete[pack]
        ]
        # Members that are alike up to here and differ later: those still alike go on together.
        grouped = {member for group in full for member in group}
        return [*full, [member for member in members if member not in grouped]]

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
        first = group[0]
        template, operations = self.forms[first]
        columns = zip(*(self.forms[member][1] for member in group), strict=True)
        operands = [self.operand(column) for column in columns]
        if any(operand is None for operand in operands):
            return None
        found = tuple(operand for operand in operands if operand is not None)
        if all(isinstance(operand, (Shared, Flags)) for operand in found):
            return None  # one computation, several times: nothing to batch
        if first.operator == "linear" and not _linear_is_batchable(found):
            return None
        state: tuple[str, ...] = ()
        module = None
        if first.kind == "call_module":
            *template, _, inputs = template
            module = self.owner.get_submodule(str(first.target))
            state = tuple(str(o.target).removeprefix(f"{first.target}.") for o in operations[inputs:])
        path = "" if first.kind == "call_module" else function_path(first.node) or ""
        ranks = tuple(operand_ranks(operand, self.owner) for operand in found)
        return Pack(
            first.operator or "", tuple(group), tuple(template), found, ranks, dimensional_slots(found, self.owner),
            path, _result_kind(first, found), state, module,
        )  # fmt: skip

    def operand(self, column: tuple[Operation, ...]) -> Operand | None:
        """Return how all members' values of one argument are had at once, or None."""
        column = tuple(self.same.get(operand, operand) for operand in column)
        first = column[0]
        reads = (o.kind == first.kind == "get_attr" and o.target == first.target for o in column)
        if all(same or o is first for same, o in zip(reads, column, strict=True)):
            return Shared(first)
        pack = self.packed(column) or self.kept(column)
        if pack is not None:
            return pack
        if all(operand.kind == "get_attr" for operand in column):
            return self.attributes(tuple(str(operand.target) for operand in column))
        distinct = len(set(column)) == len(column)
        tensors = all(not _is_size(o) if o.example is None else hasattr(o.example, "dtype") for o in column)
        return selection(column) or (Gathered(column) if distinct and tensors else None)

    def attributes(self, names: tuple[str, ...]) -> Operand | None:
        if all(_is_flag(name, self.value(name)) for name in names):
            return Flags(names)
        return Parameters(names) if all(map(self.is_lasting, names)) else None

    def is_lasting(self, name: str) -> bool:
        """Say whether `name` is a parameter or a buffer that state dicts hold."""
        path, _, last = name.rpartition(".")
        module = self.module(path)
        if module is None:
            return False
        owner = vars(module)
        kept = last in owner["_buffers"] and last not in owner["_non_persistent_buffers_set"]
        return kept or isinstance(owner["_parameters"].get(last), nn.Parameter)

    def packed(self, column: Sequence[Operation]) -> Pack | None:
        """Return the pack that `column` is, in the same order, or None."""
        places = [self.located.get(operand) for operand in column]
        pack = places[0][0] if places[0] else None
        if pack is None or any(place != (pack, i) for i, place in enumerate(places)) or pack.size != len(column):
            return None
        return pack

    def kept(self, column: tuple[Operation, ...]) -> Pack | None:
        """Return a pack of tensors made of parameters and kept, formed for the operations that read just these."""
        if len({self.colors.get(operand) for operand in column}) > 1 or not all(map(_is_made_of_parameters, column)):
            return None
        return self.pack_group(column)

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


def _is_made_of_parameters(operation: Operation) -> bool:
    """Say whether it is made from parameters and kept: a derived tensor, or one of several."""
    made = operation.inputs[0] if operation.operator == "getitem" else operation
    return made.operator == "derived"


@functools.lru_cache(4096)
def _without_numbers(name: str) -> str:
    return _NUMBER.sub("*", name)


def _is_flag(name: str, value: object) -> bool:
    return isinstance(value, bool) and name.rpartition(".")[2] == "training"


def _is_size(operation: Operation) -> bool:
    """Say whether a value is a whole number or several: a size, or what was calculated with sizes."""
    value = operation.example
    if isinstance(value, tuple):
        return all(type(item) is int for item in cast("tuple[object, ...]", value))
    if value is not None:
        return type(value) is int
    calculated = operation.operator == "getitem" or operator_info(operation.operator).elementwise
    return operation.operator in _SIZES or (calculated and all(map(_is_size, operation.inputs)))


def _result_kind(operation: Operation, operands: Sequence[Operand]) -> Literal["stacked", "several", "common"]:
    """Return what a batched call of the operation gives; see `Pack`."""
    if operation.operator in _SIZES or not any(map(is_stacked, operands)):
        return "common"
    if operation.operator in ("chunk", "split", "tensor_split", "unbind", "recurrent"):
        return "several"
    return "several" if isinstance(operation.example, tuple) else "stacked"


def _linear_is_batchable(operands: Sequence[Operand]) -> bool:
    _, weight, *bias = operands
    if isinstance(weight, Shared):
        return all(isinstance(b, Shared) for b in bias)
    return all(isinstance(operand, (Parameters, Selected)) or _is_derived(operand) for operand in (weight, *bias))


def _is_derived(operand: Operand) -> bool:
    """Say whether an operand is made from the members' parameters and kept."""
    if not isinstance(operand, Pack) or operand.operator != "getitem":
        return False
    source = operand.operands[0]
    return isinstance(source, Pack) and source.operator == "derived"
