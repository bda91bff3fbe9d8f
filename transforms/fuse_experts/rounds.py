"""The rounds of a loop over experts, in a call that was written out: who gets which tokens, and where results go."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...errors import MatchFailure
from ...operators import canonical_name, reached, upwards
from ...runtime.values import tensors_in
from .members import operands
from .unrolling import Unrolled

__all__ = ["Joined", "Loop", "Round", "draws", "dropping_module", "find_loop", "is_dropout"]

_TRAINS_BY_DEFAULT = {"dropout": True, "alpha_dropout": False}
"""Functions that drop elements -> what they take the mode for where a call does not say it."""

_RESHAPES = ("to", "type_as", "squeeze", "unsqueeze", "view", "reshape", "contiguous", "flatten", "float")


@dataclass(frozen=True)
class Round:
    """One expert applied to its tokens."""

    experts: Tensor  # the expert of each of its tokens [n]
    tokens: Tensor  # the numbers of its tokens [n]
    weights: Tensor | None  # what its outputs are multiplied by [n], or None
    weighting: fx.Node | None
    scale: float  # what they are multiplied by besides
    rows: fx.Node  # the node that gives its tokens' inputs
    output: fx.Node
    nodes: Sequence[fx.Node]  # what it computes from tensors of its own, `output` included, in order
    idle: Sequence[fx.Node] = ()  # dropouts behind it


@dataclass(frozen=True)
class Loop:
    """A loop over experts."""

    rounds: Sequence[Round]  # one for each time that an expert was called
    target: fx.Node  # the node of the tensor that results are added to
    result: fx.Node  # the node that stands for that tensor after the loop; in place it is `target`
    tokens: int
    tainted: frozenset[fx.Node]  # every node that depends on a tensor of an expert
    writes: Sequence[fx.Node]  # the nodes that add results to it
    joined: Mapping[fx.Node, Joined]
    called: Sequence[int]  # the expert of each round; -1 of all
    replaces: bool  # whether results take the place of what is in that tensor, and is not zeros


@dataclass(frozen=True)
class Joined:
    """Linear layers of all experts, each of rows of its own, and their results side by side."""

    rows: fx.Node  # the node whose rows are split among them
    sizes: Sequence[int]  # how many rows each expert has
    first: fx.Node  # the layer of one of them


@dataclass(frozen=True)
class _Write:
    node: fx.Node
    target: fx.Node
    tokens: Tensor
    value: fx.Node
    in_place: bool
    replaces: bool = False


_Peeled = tuple[fx.Node, fx.Node | None, float, list[fx.Node]]
"""An output of experts, what it is multiplied by (a node, a number), and dropouts behind it."""


class _LoopReader:
    def __init__(self, call: Unrolled) -> None:
        self.owner, self.graph, self.values, self.sources = call.module, call.graph, call.values, call.sources
        self.experts: dict[fx.Node, frozenset[int]] = {}
        self.joined: dict[fx.Node, Joined] = {}
        for node in call.graph.nodes:
            joined = self._joined(node)
            if joined is not None:
                self.joined[node] = joined
                self.experts[node] = frozenset((_ALL,))
                continue
            inputs = [self.experts[used] for used in node.all_input_nodes]
            own = frozenset((call.sources[node][1],)) if node in call.sources else _NOBODY
            # A shape or type of a tensor does not depend on what is in it.
            holds_tensors = next(tensors_in(call.values.get(node)), None) is not None
            self.experts[node] = own.union(*inputs) if holds_tensors else _NOBODY

    def _joined(self, node: fx.Node) -> Joined | None:
        """Return what a node joins, if that is the results of linear layers for what was split before."""
        is_cat = canonical_name(node) == "cat" and bool(operands(node))
        items = cast("Sequence[fx.Node]", operands(node)[0]) if is_cat else ()
        if len(items) < 2 or node.kwargs.get("dim", 0) != 0 or operands(node)[1:] not in ((), (0,)):
            return None
        if [self.experts.get(item, _NOBODY) - {_ALL} for item in items] != [{number} for number in range(len(items))]:
            return None
        parts: list[Any] = [operands(item)[0] for item in items if canonical_name(item) in ("linear", "matmul", "mm")]
        splits: set[Any] = {operands(part)[0] for part in parts if canonical_name(part) == "getitem"}
        if len(parts) < len(items) or len(splits) != 1 or canonical_name(split := splits.pop()) != "split":
            return None
        rows = operands(split)[0]
        if [operands(part)[1] for part in parts] != list(range(len(parts))) or self.values[rows].ndim != 2:
            return None
        return Joined(rows, [len(self.values[part]) for part in parts], items[0])

    def is_tainted(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and bool(self.experts[node])

    def loop(self) -> Loop | None:
        writes = [write for node in self.graph.nodes if (write := self._write(node)) is not None]
        self._refuse_single_tokens()
        if any(len(self.experts[write.value]) > 1 and canonical_name(write.node) == "setitem" for write in writes):
            self._refuse_other_forms()
        rounds = [each for write in writes for each in self._rounds(write)]
        if not any(len(self.experts[each.output]) == 1 for each in rounds):
            self._refuse_other_forms()
            self._refuse_all_tokens()
            return None
        target = self._root(writes[0])
        if any(self._root(write) is not target for write in writes):
            raise MatchFailure("the experts' results are added to several tensors")
        result = target if writes[0].in_place else writes[-1].node
        tainted = frozenset(node for node, experts in self.experts.items() if experts)
        count = self.values[target].shape[:-1].numel()
        called = [next(iter(self.experts[each.output])) for each in rounds]
        nodes = [write.node for write in writes]
        replaces = any(write.replaces for write in writes) and bool(self.values[target].any())
        return Loop(rounds, target, result, count, tainted, nodes, self.joined, called, replaces)

    def _refuse_other_forms(self) -> None:
        """Refuse experts on sorted tokens, on products with one-hot tensors, or on one token after another."""
        for node in self.graph.nodes:
            joins = canonical_name(node) in ("cat", "concat", "stack") and bool(operands(node))
            joined: Any = operands(node)[0] if joins else ()
            experts = [self.experts.get(item, _NOBODY) for item in cast("Sequence[fx.Node]", joined)]
            if len(experts) < 2 or not all(experts):
                continue
            if len(set(experts)) == len(experts) and all(map(self._is_cut, joined)):
                raise MatchFailure(
                    "its tokens are sorted by expert, cut by counts, and joined behind the experts; with index_add_ of "
                    "each expert's results, or fxopt.layers.MixtureOfExperts, they are computed together"
                )
            if all(map(self._is_one_hot, joined)):
                raise MatchFailure(
                    "tokens go to its experts by products with one-hot tensors, as many to each; "
                    "fuse_ensembles computes such experts together"
                )

    def _is_one_hot(self, node: fx.Node) -> bool:
        """Say whether an expert's tokens come from a product with a one-hot tensor."""
        before = [one for one in upwards(node) if not self.is_tainted(one)]
        products = [one for one in before if _name(one) in ("einsum", "matmul", "bmm", "mm")]
        return any(_name(used) == "one_hot" for one in products for used in upwards(one))

    def _refuse_all_tokens(self) -> None:
        """Refuse experts that get all tokens, where scores of as many as there are weigh their results."""
        count = len({number for _, number in self.sources.values()})
        products = [node for node in self.graph.nodes if self.is_tainted(node) and _name(node) in _PRODUCTS]
        weights = {one for node in products for one in node.all_input_nodes if not self.is_tainted(one)}
        for one in weights:
            scores = [self.values[node] for node in upwards(one) if canonical_name(node) in ("softmax", "sigmoid")]
            tokens = [each.shape[:-1].numel() for each in scores if each.shape[-1] == count > 1]
            if tokens and self.values[one].numel() % tokens[0] == 0:
                raise MatchFailure("every token goes to every expert; fuse_ensembles computes that")

    def _refuse_single_tokens(self) -> None:
        """Refuse experts that get one token at a time, and are called again and again."""
        called = [node for node in self.sources if node.op == "call_module" and operands(node)]
        called = [node for node in called if not self.is_tainted(operands(node)[0])]
        rows = [self.values.get(operands(node)[0]) for node in called]
        is_single = [isinstance(each, Tensor) and each.shape[:-1].numel() == 1 for each in rows]
        if all(is_single) and len(called) > 2 * len({self.sources[node] for node in called}):
            raise MatchFailure(
                "it goes through the tokens one by one; call each expert with all its tokens instead "
                "(rows, nth = torch.where(chosen == expert))"
            )

    def _is_cut(self, node: fx.Node) -> bool:
        """Say whether an expert's results are of rows that were cut from a tensor in another order."""
        return any(canonical_name(one) in ("sort", "argsort") for one in upwards(node))

    def _root(self, write: _Write) -> fx.Node:
        target = write.target
        while not write.in_place and canonical_name(target) in ("index_add", "index_copy") and self.is_tainted(target):
            target = operands(target)[0]
        return target

    # -- where results go

    def _write(self, node: fx.Node) -> _Write | None:
        name = canonical_name(node)
        if name in ("index_add", "index_copy") or node.target in ("index_add_", "index_copy_"):
            return self._index_add(node)
        return self._setitem(node) if name == "setitem" else None

    def _index_add(self, node: fx.Node) -> _Write | None:
        named: dict[str, Any] = dict(node.kwargs)
        given = dict(zip(("input", "dim", "index", "source"), operands(node), strict=False)) | named
        value: Any = given.get("source")
        if not self.is_tainted(value) or given.get("dim") != 0 or "alpha" in node.kwargs:
            return None
        target, index = given["input"], self.values[given["index"]]
        in_place = node.op == "call_method" and str(node.target).endswith("_")
        replaces = node.target == "index_copy_" or canonical_name(node) == "index_copy"
        if self.values[target].ndim != 2:
            raise MatchFailure("the experts' results are added along the first of several dimensions")
        return _Write(node, target, index, value, in_place, replaces)

    def _setitem(self, node: fx.Node) -> _Write | None:
        target, key, value = operands(node)[:3]
        if not self.is_tainted(value) or not isinstance(value, fx.Node):
            return None
        if canonical_name(value) == "add" and len(operands(value)) == 2:
            items = [a for a in operands(value) if isinstance(a, fx.Node) and a.target is operator.getitem]
            here = [a for a in items if operands(a)[0] is target and (operands(a)[1] is key or operands(a)[1] == key)]
            rest = [a for a in operands(value) if a not in here]
            if len(here) == 1 and self.is_tainted(rest[0]):
                return _Write(node, target, self._tokens(target, key), rest[0], in_place=True)
        return _Write(node, target, self._tokens(target, key), value, in_place=True, replaces=True)

    def _tokens(self, target: fx.Node, key: Any) -> Tensor:
        shape = self.values[target].shape[:-1]
        keys: list[Any] = list(cast("tuple[Any, ...]", key)) if isinstance(key, tuple) else []
        if len(keys) == len(shape) + 1 and keys[-1] == slice(None):
            key = tuple(keys[:-1])
        numbers = torch.arange(shape.numel(), device=self.values[target].device).view(shape)
        where: Any = fx.map_arg(cast("Any", key), lambda node: self.values[node])
        try:
            return numbers[where].flatten()
        except (IndexError, RuntimeError) as error:
            raise MatchFailure(f"the experts' results are written to a part of the features ({error})") from error

    # -- what a round computes

    def _rounds(self, write: _Write) -> Iterator[Round]:
        """Yield what a write adds: the results of one expert, or of several that were joined, each with its tokens."""
        peeled = self._peeled(write.value, len(write.tokens))
        start = 0
        for output in self._joined_results(peeled[0]):
            count = len(self.values[output])
            yield self._round(write, peeled, output, slice(start, start + count))
            start += count

    def _joined_results(self, node: fx.Node) -> Sequence[fx.Node]:
        """Return the results of single experts that a node joins; the node itself where it is one."""
        experts = self.experts[node]
        if len(experts) == 1:
            return [node]
        is_cat = canonical_name(node) in ("cat", "concat") and node.kwargs.get("dim", 0) == 0
        items = cast("Sequence[fx.Node]", operands(node)[0]) if is_cat and operands(node)[1:] in ((), (0,)) else ()
        if not items or any(len(self.experts[item]) != 1 for item in items):
            raise MatchFailure("a result is of several experts")
        return items

    def _round(self, write: _Write, peeled: _Peeled, output: fx.Node, place: slice) -> Round:
        _, weighting, scale, idle = peeled
        (expert,), tokens = self.experts[output], write.tokens[place]
        count = len(tokens)
        nodes = self._slice(output)
        weights = None if weighting is None else self.values[weighting].reshape(-1)[place]
        numbers = self._numbers(nodes, count) if expert == _ALL else torch.full_like(tokens, expert)
        return Round(numbers, tokens, weights, weighting, scale, self._rows(nodes, count), output, nodes, idle)

    def _peeled(self, node: fx.Node, count: int) -> _Peeled:
        """Return the output of the expert, what it is multiplied by, and dropouts behind that."""
        weighting, scale, idle = None, 1.0, list[fx.Node]()
        while True:
            name = canonical_name(node)
            if name == "mul" and len(operands(node)) == 2:
                others = [a for a in operands(node) if not self.is_tainted(a)]
                if len(others) != 1:
                    break
                if isinstance(others[0], (int, float)):
                    scale *= others[0]
                elif weighting is None and isinstance(others[0], fx.Node) and self._is_column(others[0], count):
                    weighting = others[0]
                else:
                    break
                node = next(a for a in operands(node) if self.is_tainted(a))
            elif name in _RESHAPES and self._keeps(node):
                node = operands(node)[0]
            elif is_dropout(node, self.owner):
                idle += [node] if draws(node, self.owner) else []
                node = operands(node)[0]
            else:
                break
        return node, weighting, scale, idle

    def _is_column(self, node: fx.Node, count: int) -> bool:
        value = self.values[node]
        return isinstance(value, Tensor) and value.numel() == count and value.is_floating_point()

    def _keeps(self, node: fx.Node) -> bool:
        before = operands(node)[0]
        if not self.is_tainted(before) or not isinstance(self.values[before], Tensor):
            return False
        return [n for n in self.values[node].shape if n != 1] == [n for n in self.values[before].shape if n != 1]

    def _numbers(self, nodes: Sequence[fx.Node], count: int) -> Tensor:
        """Return the expert of each row, where rows of all are side by side."""
        sizes = {tuple(self.joined[node].sizes) for node in nodes if node in self.joined}
        if len(sizes) != 1 or sum(found := sizes.pop()) != count:
            raise MatchFailure("the experts' linear layers have different rows")
        return torch.arange(len(found)).repeat_interleave(torch.tensor(found))

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return [self.joined[node].rows] if node in self.joined else node.all_input_nodes

    def _slice(self, output: fx.Node) -> list[fx.Node]:
        wanted = set(reached([output], lambda node: filter(self.is_tainted, self._inputs(node))))
        return [node for node in self.graph.nodes if node in wanted]

    def _rows(self, nodes: Sequence[fx.Node], count: int) -> fx.Node:
        inside = set(nodes)
        reading = [node for node in nodes if node not in self.sources or node.op == "call_module"]
        outside = (used for node in reading for used in self._inputs(node))
        found = {u for u in outside if u not in inside and isinstance(self.values[u], Tensor)}
        rows = [u for u in found if self.values[u].ndim == 2 and self.values[u].shape[0] == count]
        if len(found) != 1 or len(rows) != 1:
            raise MatchFailure("an expert reads more than its own tensors and the inputs of its tokens")
        return rows[0]


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


_PRODUCTS = ("mul", "einsum", "matmul", "bmm")
_NOBODY = frozenset[int]()
_ALL = -1


def is_dropout(node: fx.Node, owner: nn.Module) -> bool:
    """Say whether a node drops elements in training alone: a module, or a function that is told the mode of one."""
    if node.op == "call_module":
        return type(owner.get_submodule(str(node.target))) in (nn.Dropout, nn.AlphaDropout)
    return canonical_name(node) in _TRAINS_BY_DEFAULT and (_mode(node) is False or dropping_module(node) is not None)


def dropping_module(node: fx.Node) -> str | None:
    """Return the path of the module whose mode says whether a dropout drops anything; None where none does."""
    if node.op == "call_module":
        return str(node.target)
    mode = _mode(node)
    is_read = isinstance(mode, fx.Node) and mode.op == "get_attr"
    path, _, last = str(mode.target).rpartition(".") if is_read else ("", "", "")
    return path if last == "training" else None


def _mode(node: fx.Node) -> Any:
    """Return what a call of the function says of the mode."""
    return dict(zip(("input", "p", "training"), operands(node), strict=False)).get(
        "training", node.kwargs.get("training", _TRAINS_BY_DEFAULT[canonical_name(node) or "dropout"])
    )


def draws(node: fx.Node, owner: nn.Module) -> bool:
    """Say whether a dropout may draw random numbers in training."""
    if node.op == "call_module":
        return bool(owner.get_submodule(str(node.target)).p)
    return _mode(node) is not False


def find_loop(call: Unrolled) -> Loop | None:
    """Return the loop over experts of a call, or None; MatchFailure: it does more than add weighted outputs."""
    return _LoopReader(call).loop()
