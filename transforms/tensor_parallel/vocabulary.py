"""A vocabulary that is split: embeddings by rows, heads by columns, and what reads the logits of a head."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import fx, nn

from ...compat import has_hooks, own_children, own_parameters
from ...operators import canonical_name, mutates, normalized_arguments
from ...passes.rewriting import shape_of, substituted, writes
from ...passes.sites import Refusal
from ...runtime.graphs import specializations_of
from ...runtime.values import TensorMeta, user_class
from ...tracing.program import Program, TensorReads
from .axes import SplitAxis, SplitBlock, SplitTensor, Stop, parts_in
from .rules import SplitCall, result_of

__all__ = ["vocabularies_in"]

_MANY = 4
"""An embedding that no head belongs to is split if it has so many times more rows than columns: not positions."""


@dataclass(frozen=True)
class _Vocabulary:
    """Embeddings of one weight, and the heads of as many words."""

    program: Program
    embeddings: list[str]
    heads: list[str]
    words: int


def vocabularies_in(
    program: Program, processes: int, taken: Collection[str], *, even: bool = False
) -> Iterator[dict[str, Any] | Refusal]:
    """Yield what to do to each vocabulary that is split, as plain values, or why one stays whole.
    Layers that are `taken` are no heads; `even`: over processes that all have equally many words.
    """
    for vocabulary in _candidates(program, taken):
        name, words = vocabulary.embeddings[0], vocabulary.words
        widest = -(-words // processes)
        if even and words % processes:
            yield Refusal(f"its {words} rows do not divide by {processes} processes, which sharding needs", at=name)
            continue
        if widest * (processes - 1) >= words:
            yield Refusal(f"its {words} rows are too few for {processes} processes", at=name)
            continue
        try:
            edits = _edits(vocabulary)
        except Stop as stop:
            yield Refusal(str(stop), at=name)
            continue
        yield {"columns": vocabulary.heads, "rows": [], "embeddings": vocabulary.embeddings, "logits": edits}


def _candidates(program: Program, taken: Collection[str]) -> Iterator[_Vocabulary]:
    """Yield embeddings with their heads: layers that share the weight or, where none does, the last one of its size."""
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for module in program.names.distinct:
        for parameter in own_parameters(module).values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((program.names.name(module), module))
    reads = program.analyses[TensorReads]
    for holding in holders.values():
        weight = own_parameters(holding[0][1]).get("weight")
        embeddings = [name for name, module in holding if _is_embedding(module)]
        heads = [name for name, module in holding if _is_head(module)]
        if weight is None or not embeddings or len(embeddings) + len(heads) < len(holding):
            continue
        if reads.readers_of(weight) or _is_read_unseen(program, weight):
            continue
        words, width = weight.shape
        if not heads and words >= width:
            heads = [name for name in _heads_of_size(program, words, holders) if name not in taken][-1:]
        if heads or words >= _MANY * width:
            yield _Vocabulary(program, embeddings, heads, words)


def _is_embedding(module: nn.Module) -> bool:
    if user_class(type(module)) is not nn.Embedding or not isinstance(module, nn.Embedding):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _is_head(module: nn.Module) -> bool:
    return user_class(type(module)) is nn.Linear and not has_hooks(module)


def _is_read_unseen(program: Program, weight: nn.Parameter) -> bool:
    """Say whether code that was not captured is around a parameter, other than the module that it is of."""
    return any(
        not specializations_of(module)
        and any(own_children(module).values())
        and type(module).forward is not nn.Module.forward
        and any(parameter is weight for parameter in module.parameters())
        for module in program.names.distinct
    )


def _heads_of_size(program: Program, words: int, holders: Mapping[int, list[Any]]) -> list[str]:
    """Return linear layers with so many outputs, and parameters of their own."""
    found: list[str] = []
    for module in program.names.distinct:
        if _is_head(module) and cast("nn.Linear", module).out_features == words:
            parameters = [parameter for parameter in own_parameters(module).values() if parameter is not None]
            if all(len(holders[id(parameter)]) == 1 for parameter in parameters):
                found.append(program.names.name(module))
    return found


def _edits(vocabulary: _Vocabulary) -> dict[str, dict[str, Any]]:
    """Return what changes in each graph that calls a head; Stop where a head is called by code without a graph."""
    edits: dict[str, dict[str, Any]] = {}
    heads = {id(vocabulary.program.module(name)): name for name in vocabulary.heads}
    called: set[str] = set()
    for module in vocabulary.program.names.distinct:
        for number, each in enumerate(specializations_of(module)):
            calls = {
                node: heads[id(callee)]
                for node in each.graph.find_nodes(op="call_module")
                if id(callee := module.get_submodule(str(node.target))) in heads
            }
            if calls:
                called.update(calls.values())
                graphs = edits.setdefault(vocabulary.program.names.name(module), {})
                graphs[str(number)] = _Follower(vocabulary.program, module, each.graph, calls, vocabulary.words).edits()
    missing = next((name for name in vocabulary.heads if name not in called), None)
    if missing is not None:
        raise Stop(f"no graph calls its head '{missing}'")
    return edits


@dataclass
class _Follower:
    """Follows logits in a graph, as far as operators can do with a share of the words."""

    program: Program
    module: nn.Module
    graph: fx.Graph
    calls: Mapping[fx.Node, str]
    words: int

    def edits(self) -> dict[str, Any]:
        """Return nodes that become losses of shares, logits that are gathered for some nodes, and numbers that are
        the number of words.
        """
        try:
            return self._followed()
        except Stop:
            return {"gathers": {call.name: [user.name for user in call.users] for call in self.calls}}

    def _followed(self) -> dict[str, Any]:
        values: dict[fx.Node, Any] = dict.fromkeys(self.graph.nodes)
        losses, gathers, numbers = list[str](), dict[str, list[str]](), dict[str, list[Any]]()
        for node in self.graph.nodes:
            if node in self.calls:
                values[node] = SplitTensor(-1, SplitBlock([self.calls[node]], []), SplitAxis(self.words))
                continue
            call = SplitCall(node, partial(substituted, values=values), 1)
            if not call.parts:
                continue
            if self._is_loss(node, values):
                losses.append(node.name)
                continue
            result = self._result(call)
            if result is not None:
                values[node] = result
                if call.numbers:
                    numbers[node.name] = [path[:-1] for path in call.numbers]
                continue
            for source in node.all_input_nodes:
                if isinstance(values[source], SplitTensor):
                    gathers.setdefault(source.name, []).append(node.name)
                elif list(parts_in(values[source])):
                    raise Stop(f"'{node.name}' reads the size of a part")
        self._check_writes(losses)
        named = {"losses": losses, "gathers": gathers, "numbers": numbers}
        return {name: value for name, value in named.items() if value}

    def _check_writes(self, losses: Collection[str]) -> None:
        """Stop where code writes into logits or what is computed from them: gathered ones are other tensors."""
        owner, computed = self.program.names.name(self.module), set(self.calls)
        for node in self.graph.nodes:
            if node.name not in losses and not computed.isdisjoint(node.all_input_nodes):
                computed.add(node)
                if mutates(node) or (node.op == "call_module" and writes(node, self.program, owner)):
                    raise Stop(f"'{node.name}' writes into logits")

    def _result(self, call: SplitCall) -> Any:
        """Return the value of a call that can do with a share of the words; None if it has to have all."""
        if call.node.op not in ("call_function", "call_method"):
            return None
        is_reading = call.node.target is getattr and call.node.args[1] != "shape"
        try:
            result = result_of(call)
        except Stop:
            return None
        if is_reading:
            return ()
        kept = [part for part in parts_in(result) if isinstance(part, SplitTensor)]
        fits = all(part.dim == -1 and part.axis is not None and not part.axis.readings for part in kept)
        return result if result is not None and fits else () if result is None else None

    def _is_loss(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
        """Say whether a node is the cross entropy of logits that are rows of words, and of their numbers."""
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            is_plain_loss = user_class(type(module)) is nn.CrossEntropyLoss and not has_hooks(module)
            if not is_plain_loss or not isinstance(module, nn.CrossEntropyLoss):
                return False
            named = dict(zip(("input", "target"), node.args, strict=False)) | node.kwargs
            named |= {"weight": module.weight, "label_smoothing": module.label_smoothing}
        elif canonical_name(node) == "cross_entropy":
            named = dict(normalized_arguments("cross_entropy", node.target, node.args, node.kwargs).named)
        else:
            return False
        logits, target = named.get("input"), named.get("target")
        if not isinstance(logits, fx.Node) or not isinstance(target, fx.Node) or list(parts_in(values[target])):
            return False
        meta = target.meta.get("val")
        others = [named.get(name) for name in ("weight", "size_average", "reduce")]
        is_plain = all(each is None for each in others) and named.get("label_smoothing", 0.0) == 0.0
        is_numbers = isinstance(meta, TensorMeta) and not meta.dtype.is_floating_point
        are_rows = len(shape_of(logits) or ()) in (1, 2) and isinstance(values[logits], SplitTensor)
        return bool(is_plain and is_numbers and are_rows)
