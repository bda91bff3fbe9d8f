"""Experts that a graph computes together already, on tokens sorted by expert, by `grouped_mm`: as transformers does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ...errors import MatchFailure
from ...layers.moe import FusedExperts, Lowering
from ...operators import canonical_name, mutates, reached, upwards
from ...passes.rewriting import Edit, hold_written_out, shape_of
from ...runtime.graphs import specializations_of
from ...runtime.guards import Attribute
from ...runtime.values import TensorMeta
from .members import Slices, Source, operands
from .rounds import Round
from .template import ExpertTemplate, is_grouped_product, template_of
from .write import sweep

__all__ = ["GroupedExperts", "grouped_experts", "write_grouped"]

_UNKNOWN = "its experts are multiplied together already (grouped_mm), in a form that is not read"


@dataclass(frozen=True)
class GroupedExperts:
    """Experts in a graph: which nodes say what goes to whom, and what each of them computes."""

    hidden: fx.Node  # of the inputs of all tokens
    chosen: fx.Node  # of the choices [tokens, k]
    weights: fx.Node  # of their weights
    result: fx.Node  # of the weighted sums
    template: ExpertTemplate
    count: int

    @property
    def tensors(self) -> list[fx.Node]:
        """Return the nodes that read the stacked parameters, weight and bias of each linear layer in turn."""
        sources = (s for layer in self.template.layers for s in (layer.weight, layer.bias) if s is not None)
        return [source.stack for source in sources if isinstance(source, Slices)]


def grouped_experts(module: nn.Module, graph: fx.Graph) -> GroupedExperts:
    """Return the experts whose products a module's graph groups; MatchFailure where it does more, or otherwise."""
    return _Reader(module, graph).experts()


class _Reader:
    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.module, self.graph = module, graph
        self.products = [node for node in graph.nodes if is_grouped_product(node)]

    def experts(self) -> GroupedExperts:
        ends = {_given(product, 2, "offs") for product in self.products}
        _expect(len(ends) == 1 and all(isinstance(end, fx.Node) for end in ends))
        (end,) = ends
        order, numbers, chosen, count = self._sorted(end)
        rows = _uncast(operands(self.products[0])[0])
        hidden, tokens = operands(_expected(rows, "getitem"))
        divided, slots = operands(_expected(tokens, "floor_divide", "floordiv"))
        _expect(divided is order and _is_last_size(slots, chosen))
        weighted, weights = self._weighted(order)
        template = self._template(weighted, numbers, count)
        return GroupedExperts(hidden, chosen, weights, self._sum(weighted, order, chosen), template, count)

    def _sorted(self, ends: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, int]:
        """Return the order of sorted pairs, their experts, what they are sorted by, and of how many experts."""
        counts = _expected(operands(_expected(ends, "cumsum"))[0], "histc")
        numbers = _expected(_uncast(operands(counts)[0]), "getitem")
        ranked, first = operands(numbers)
        flat = operands(_expected(ranked, "sort"))
        _expect(first == 0 and len(flat) == 1 and not ranked.kwargs)
        order = next((user for user in ranked.users if operands(user)[1:] == (1,)), None)
        limits, count = (_given(counts, 2, "min"), _given(counts, 3, "max")), _number(_given(counts, 1, "bins"))
        if order is None or count is None or [_number(limit) for limit in limits] != [0, count - 1]:
            raise MatchFailure(_UNKNOWN)
        return order, numbers, self._unfolded(flat[0]), count

    def _unfolded(self, flat: Any) -> fx.Node:
        """Return what was made a row: [tokens, k]."""
        given = operands(_expected(flat, "reshape", "view", "flatten"))[0]
        _expect(isinstance(given, fx.Node) and len(shape_of(given) or ()) == 2 and len(shape_of(flat) or ()) == 1)
        return given

    def _weighted(self, order: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return the product of the experts' outputs with the weights of the sorted pairs, and those of all pairs."""
        for node in order.users:
            if _name(node) != "getitem" or operands(node)[1] is not order:
                continue
            for column in node.users:
                scaled = next(iter(column.users), None)
                if _name(column) == "unsqueeze" and scaled is not None and _name(scaled) == "mul":
                    return scaled, self._unfolded(operands(node)[0])
        raise MatchFailure(_UNKNOWN)

    def _template(self, weighted: fx.Node, numbers: fx.Node, count: int) -> ExpertTemplate:
        """Return what is between the rows and their weights."""
        behind = set(reached(self.products, lambda node: node.users))
        output = _only(node for node in weighted.all_input_nodes if node in behind)
        sources = dict(self._sources(numbers, count))
        wanted = set(upwards(output)) & {*behind, *sources, *(user for node in sources for user in node.users)}
        wanted |= {user for node in behind & wanted for user in node.users if mutates(user)}
        nodes = [node for node in self.graph.nodes if node in wanted]
        values = {node: _example(node) for node in self.graph.nodes}
        none = torch.empty(0)
        first = operands(self.products[0])[0]
        return template_of(Round(none, none, None, None, 1.0, first, output, nodes), {}, self.module, sources, values)

    def _sources(self, numbers: fx.Node, count: int) -> Iterator[tuple[fx.Node, tuple[Source, int]]]:
        """Yield what reads the stacked parameters: themselves, or vectors picked by the experts of sorted pairs."""
        for node in self.graph.find_nodes(op="get_attr"):
            shape = shape_of(node) or ()
            if len(shape) == 3 and shape[0] == count:
                yield node, (Slices(node, count), 0)
            elif len(shape) == 2 and shape[0] == count:
                picks = (user for user in node.users if _name(user) == "getitem" and operands(user)[0] is node)
                yield from ((pick, (Slices(node, count), 0)) for pick in picks if operands(pick)[1] is numbers)

    def _sum(self, weighted: fx.Node, order: fx.Node, chosen: fx.Node) -> fx.Node:
        """Return the sum over the experts of each token, whose pairs are put in their own order again."""
        back = _only(weighted.users)
        _, places = operands(_expected(back, "getitem"))
        _expect(isinstance(places, fx.Node) and any(_writes(user, places, order) for user in places.users))
        folded = _only(back.users)
        shape = operands(_expected(folded, "view", "reshape"))[1:]
        total = _only(folded.users)
        _expect(len(shape) == 3 and _is_last_size(shape[1], chosen) and _name(total) == "sum")
        _expect(_given(total, 1, "dim") == 1 and not total.kwargs.get("keepdim", False))
        return total


def _writes(node: fx.Node, places: fx.Node, order: fx.Node) -> bool:
    """Say whether a node makes of some places those that pairs had before they were sorted."""
    if _name(node) != "setitem" or operands(node)[:2] != (places, order):
        return False
    return _name(operands(node)[2]) == "arange"


def _given(node: fx.Node, place: int, name: str) -> Any:
    return operands(node)[place] if len(operands(node)) > place else node.kwargs.get(name)


def _only(nodes: Iterable[fx.Node]) -> fx.Node:
    """Return the one node that there is, or raise MatchFailure."""
    found = list(nodes)
    _expect(len(found) == 1)
    return found[0]


def _expect(holds: bool) -> None:
    if not holds:
        raise MatchFailure(_UNKNOWN)


def _expected(node: Any, *names: str) -> fx.Node:
    """Return a node that calls one of some operators, or raise MatchFailure."""
    if not isinstance(node, fx.Node) or _name(node) not in names:
        raise MatchFailure(_UNKNOWN)
    return node


def _name(node: fx.Node) -> str:
    """Return the operator of a node, or the name of a function that no row of the table is about."""
    return canonical_name(node) or str(getattr(node.target, "__name__", node.target))


def _uncast(node: Any) -> Any:
    while isinstance(node, fx.Node) and _name(node) in ("to", "float", "int"):
        node = operands(node)[0]
    return node


def _is_last_size(value: Any, chosen: fx.Node) -> bool:
    """Say whether a number is written out as how many experts each token has, or read off the choices."""
    if type(value) is int:
        return value == (shape_of(chosen) or (0,))[-1]
    if not isinstance(value, fx.Node):
        return False
    if _name(value) == "size":
        return operands(value)[0] is chosen and _given(value, 1, "dim") in (1, -1)
    return _name(value) == "getitem" and operands(value)[1] in (1, -1) and _is_shape(operands(value)[0], chosen)


def _is_shape(node: Any, of: fx.Node) -> bool:
    return isinstance(node, fx.Node) and _name(node) in ("shape", "size") and node.args in ((of,), (of, "shape"))


def _number(value: Any) -> int | None:
    """Return a whole number, or what a node gave in the examples."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return value if type(value) is int else None


def _example(node: fx.Node) -> Any:
    meta = node.meta.get("val")
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta") if isinstance(meta, TensorMeta) else meta


# -- writing -------------------------------------------------------------------------------------------------------


def write_grouped(lowering: Lowering, edit: Edit) -> None:
    """Let one graph compute its experts by a layer that says who goes to whom, in the place of sorted products."""
    graph = edit.graph
    found, before = grouped_experts(edit.owner, graph), _called(graph)
    linears = [(layer.transposed, layer.bias is not None) for layer in found.template.layers]
    child = edit.add_module(FusedExperts(found.template.compute, linears, lowering=lowering), name="mixture")
    with graph.inserting_before(found.result):
        call = graph.call_module(child, (found.hidden, found.chosen, found.weights, *found.tensors))
    edit.sign(call)
    edit.replace(found.result, call)
    sweep(graph)
    # On which device tokens are counted made another operation of it; the layer is for all of them.
    guards = specializations_of(edit.owner)[edit.site.specialization].guards
    edit.hold_where([], [guard for guard in guards if any(_is_of_device(source) for source in guard.sources())])
    hold_written_out(edit, sorted(before - _called(graph)))


def _is_of_device(source: object) -> bool:
    return isinstance(source, Attribute) and source.name == "device"


def _called(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.find_nodes(op="call_module")}
