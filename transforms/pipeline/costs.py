"""What each node of an opened graph costs, and what kind of value it gives: seen in one run on the example inputs."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from ...compat import all_modules, version_of
from ...operators import counted_flops
from ...runtime.graphs import capture_of, fitting
from ...runtime.guards import require
from ...runtime.values import is_leaf, is_library, is_plain_structure, tensors_within
from ...tracing.analyses import has_random_effects, module_has_random_effects
from ...tracing.examples import Inputs
from ...tracing.isolation import in_phase, preserved
from ...tracing.program import function_of_node
from .opening import Holds, Opened
from .running import last_uses

__all__ = ["Cost", "Kind", "NodeFacts", "observed"]

Cost = Literal["flops", "time"]
"""What the stages are balanced by: floating-point operations, or seconds on this machine."""

_FORM_FUNCTIONS = (getattr, len)
_FORM_METHODS = ("dim", "is_complex", "is_floating_point", "ndimension", "numel", "size", "stride")
"""What tells of a tensor what all of its shape and type have in common."""

_REPEATS = 3
"""So often a node is timed; the fastest counts, since whatever else the machine does only makes it slower."""


class Kind(enum.Enum):
    """How a value gets from one stage to the next."""

    TENSOR = "tensor"
    PLAIN = "plain"
    """A size or what hangs on sizes: told once for each shape of the batch."""
    OTHER = "other"
    """An object, or a number that hangs on data: it stays in its stage."""


@dataclass
class NodeFacts:
    """What is known of one node."""

    cost: float = 0.0  # of running it forward
    kind: Kind = Kind.OTHER  # of its value
    size: int = 0  # of its value, in bytes
    repeatable: bool = False  # it hangs on inputs and buffers alone: every stage that needs it computes it for itself
    repeatable_when_told: bool = False  # so it does, but it hangs on plain values of other stages, too
    last_writer: fx.Node | None = None  # the last node that writes into its memory, if any
    tuple_length: int | None = None  # if it is a tuple whose items can cross one by one


@dataclass
class _Run:
    """One run of an opened graph."""

    opened: Opened
    model: nn.Module
    cost: Cost
    seen: dict[fx.Node, NodeFacts] = field(default_factory=dict[fx.Node, NodeFacts])
    fitting_graphs: dict[str, list[int]] = field(default_factory=dict[str, "list[int]"])
    values: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    versions: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict[fx.Node, "tuple[int, ...]"])


def observed(
    opened: Opened, model: nn.Module, call: Inputs, cost: Cost, *, training: bool
) -> tuple[dict[fx.Node, NodeFacts], dict[str, list[int]]]:
    """Run an opened graph; return what is known of each node, and by path which graphs captured modules would run.

    The model is left as it was. GuardError says that the graphs are not for this call.
    """
    run = _Run(opened, model, cost)
    with ExitStack() as around:
        around.enter_context(preserved(model))
        around.enter_context(in_phase(model, training))
        around.enter_context(torch.enable_grad())
        meter = around.enter_context(counted_flops()).get_total_flops if cost == "flops" else None
        run.values.update(opened.given(call.args, call.kwargs))
        nodes = [node for node in opened.graph.nodes if node.op not in ("placeholder", "output")]
        for node in run.values:
            _note_value(run, node, 0.0)
            run.seen[node].repeatable = True
        last = last_uses(nodes, ())
        for node in nodes:
            _step(run, node, meter)
            for over in last.get(node, ()):
                run.values.pop(over)
    return run.seen, run.fitting_graphs


def _step(run: _Run, node: fx.Node, flops: Callable[[], int] | None) -> None:
    """Run one node."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), run.values.__getitem__)
    function = function_of_node(node, run.model)
    if isinstance(function, nn.Module) and capture_of(function) is not None:
        _note_fitting_graphs(run, node, function, args, kwargs)
    random, before = torch.get_rng_state(), flops() if flops else 0
    run.values[node], seconds = _timed(function, args, kwargs, 1 if flops or not _is_heavy(node) else _REPEATS)
    draws = not torch.equal(random, torch.get_rng_state())
    wrote = _written_by(run, node)
    cost = float(flops() - before) if flops else seconds
    _note_value(run, node, cost)
    if not (draws or wrote) and _only_computes(run, node):
        inputs = [run.seen[used] for used in node.all_input_nodes]
        run.seen[node].repeatable = all(each.repeatable for each in inputs)
        told = all(each.repeatable or each.repeatable_when_told or each.kind is Kind.PLAIN for each in inputs)
        run.seen[node].repeatable_when_told = told and not run.seen[node].repeatable and not _checks(node)


def _timed(function: Callable[..., Any], args: Any, kwargs: Any, repeats: int) -> tuple[Any, float]:
    """Return a function's value, and the seconds of the fastest call."""
    value, fastest = None, float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        value = function(*args, **kwargs)
        fastest = min(fastest, time.perf_counter() - start)
    return value, fastest


def _is_heavy(node: fx.Node) -> bool:
    """Say whether a node is worth timing more than once; a function might write into its arguments."""
    return node.op == "call_module"


def _note_fitting_graphs(run: _Run, node: fx.Node, module: nn.Module, args: Any, kwargs: Any) -> None:
    capture = capture_of(module)
    found = fitting(module, args, kwargs)
    if found and capture is not None and node.name in run.opened.paths:
        run.fitting_graphs[run.opened.paths[node.name]] = [capture.specializations.index(each) for each in found]


def _note_value(run: _Run, node: fx.Node, cost: float) -> None:
    value = run.values[node]
    kind = Kind.TENSOR if isinstance(value, Tensor) else Kind.PLAIN if _is_size(run, node, value) else Kind.OTHER
    size = value.nbytes if isinstance(value, Tensor) else 0
    run.seen[node] = NodeFacts(cost, kind, size, tuple_length=_tuple_length(value) if kind is Kind.OTHER else None)
    run.versions[node] = _versions(value)


def _is_size(run: _Run, node: fx.Node, value: Any) -> bool:
    """Say whether a value is plain and equal for all data of a shape."""
    reads_form = node.target in _FORM_FUNCTIONS or (node.op == "call_method" and node.target in _FORM_METHODS)
    return is_plain_structure(value) and (
        reads_form or all(run.seen[used].kind is Kind.PLAIN for used in node.all_input_nodes)
    )


def _tuple_length(value: Any) -> int | None:
    items = cast("tuple[Any, ...]", value) if type(value) is tuple else ()
    return len(items) if all(isinstance(item, Tensor) or is_plain_structure(item) for item in items) and items else None


def _versions(value: Any) -> tuple[int, ...]:
    # Writing into a tensor is counted by its version, which views share; tensors of inference mode have none.
    return tuple(version_of(tensor) for tensor in tensors_within(value) if not tensor.is_inference())


def _written_by(run: _Run, writer: fx.Node) -> bool:
    """Note the values that a node has just written into."""
    wrote = False
    for node, value in run.values.items():
        if node in run.versions and _versions(value) != run.versions[node]:
            run.versions[node] = _versions(value)
            run.seen[node].last_writer = writer
            wrote = True
    return wrote


def _only_computes(run: _Run, node: fx.Node) -> bool:
    """Say whether a node that was not seen to draw or to write holds no parameters, and draws in no mode either."""
    if node.op == "get_attr":
        return not isinstance(run.values[node], nn.Parameter)
    if node.op == "call_module":
        module = run.model.get_submodule(str(node.target))
        return next(module.parameters(), None) is None and not any(map(_may_draw, all_modules(module)))
    return isinstance(node.target, Holds) or not has_random_effects(node)


def _checks(node: fx.Node) -> bool:
    return isinstance(node.target, Holds) or node.target is require


def _may_draw(module: nn.Module) -> bool:
    """Say whether a module of torch may draw random numbers, now or in the other mode."""
    return is_leaf(module) and is_library(type(module)) and module_has_random_effects(module)
