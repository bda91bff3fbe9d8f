"""What each node of an opened graph costs, and what kind of value it gives: seen in one run on the example inputs."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from ...compat import all_modules, version_of
from ...operators import counted_flops
from ...passes.timing import race_clock
from ...runtime.graphs import capture_of, fitting
from ...runtime.guards import require
from ...runtime.values import is_leaf, is_library, is_plain_structure, tensors_within
from ...tracing.analyses import may_draw, module_may_draw
from ...tracing.examples import Inputs
from ...tracing.isolation import in_phase, preserved
from ...tracing.program import GraphRunner, function_of_node
from .opening import Holds, OpenedModel

__all__ = ["Cost", "NodeFacts", "ValueKind", "observed"]

Cost = Literal["flops", "time"]
"""What the stages are balanced by: floating-point operations, or seconds on this machine."""

_FORM_FUNCTIONS = (getattr, len)
_FORM_METHODS = ("dim", "is_complex", "is_floating_point", "ndimension", "numel", "size", "stride")
"""What tells of a tensor what all of its shape and type have in common."""

_REPEATS = 3
"""So often a node is timed; the fastest counts, since whatever else the machine does only makes it slower."""


class ValueKind(enum.Enum):
    """How a value gets from one stage to the next."""

    TENSOR = "tensor"
    PLAIN = "plain"
    """A size, or a value that depends on sizes: sent once for each shape of the batch."""
    OTHER = "other"
    """An object, or a number that depends on data: it stays in its stage."""


@dataclass
class NodeFacts:
    """What is known of one node."""

    cost: float = 0.0  # of running it forward
    kind: ValueKind = ValueKind.OTHER  # of its value
    size: int = 0  # of its value, in bytes
    repeatable: bool = False  # it depends on inputs and buffers only: every stage that needs it computes it for itself
    repeatable_with_plain: bool = False  # likewise, but it also depends on plain values of other stages
    last_writer: fx.Node | None = None  # the last node that writes into its memory, if any
    tuple_length: int | None = None  # if it is a tuple whose items can cross one by one


def observed(
    opened: OpenedModel, model: nn.Module, call: Inputs, cost: Cost, *, training: bool
) -> tuple[dict[fx.Node, NodeFacts], dict[str, list[int]]]:
    """Run an opened graph; return what is seen of each node, and by path which graphs captured modules would run."""
    counter = counted_flops() if cost == "flops" else None
    with preserved(model), in_phase(model, training), torch.enable_grad(), counter or nullcontext():
        observer = _Observer(opened, model, counter.get_total_flops if counter else None)
        given = opened.given(call.args, call.kwargs)
        for node, value in given.items():
            observer.note(node, value, 0.0)
            observer.seen[node].repeatable = True
        observer.run(initial_env=given)
    return observer.seen, observer.fitting_graphs


class _Observer(GraphRunner):
    """Run an opened graph and note what is seen of each node."""

    def __init__(self, opened: OpenedModel, model: nn.Module, flops: Callable[[], int] | None) -> None:
        super().__init__(model, opened.graph)
        self.seen: dict[fx.Node, NodeFacts] = {}
        self.fitting_graphs: dict[str, list[int]] = {}
        self._model, self._paths, self._flops = model, opened.paths, flops
        self._clock = race_clock(waits_for_gpu=any(parameter.is_cuda for parameter in model.parameters()))
        self._versions: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        function = function_of_node(n, self._model)
        if isinstance(function, nn.Module) and n.name in self._paths and (capture := capture_of(function)) is not None:
            found = [capture.specializations.index(each) for each in fitting(function, args, kwargs)]
            self.fitting_graphs.update({self._paths[n.name]: found} if found else {})
        random, before = torch.get_rng_state(), self._flops() if self._flops else 0
        # A function might write into its arguments: once.
        repeats = _REPEATS if n.op == "call_module" and not self._flops else 1
        value, seconds = self._timed(function, args, kwargs, repeats)
        draws = not torch.equal(random, torch.get_rng_state())
        wrote = self._has_written(n)
        self.note(n, value, float(self._flops() - before) if self._flops else seconds)
        if not (draws or wrote) and self._only_computes(n, value):
            seen, inputs = self.seen[n], [self.seen[used] for used in n.all_input_nodes]
            seen.repeatable = all(each.repeatable for each in inputs)
            known = all(
                each.repeatable or each.repeatable_with_plain or each.kind is ValueKind.PLAIN for each in inputs
            )
            checks = isinstance(n.target, Holds) or n.target is require
            seen.repeatable_with_plain = known and not seen.repeatable and not checks
        return value

    def _timed(self, function: Callable[..., Any], args: Any, kwargs: Any, repeats: int) -> tuple[Any, float]:
        """Return a function's value, and the seconds of the fastest call."""
        value, fastest = None, float("inf")
        for _ in range(repeats):
            start = self._clock()
            value = function(*args, **kwargs)
            fastest = min(fastest, self._clock() - start)
        return value, fastest

    def note(self, node: fx.Node, value: Any, cost: float) -> None:
        is_size = not isinstance(value, Tensor) and self._is_size(node, value)
        kind = ValueKind.TENSOR if isinstance(value, Tensor) else ValueKind.PLAIN if is_size else ValueKind.OTHER
        length = _tuple_length(value) if kind is ValueKind.OTHER else None
        self.seen[node] = NodeFacts(cost, kind, value.nbytes if isinstance(value, Tensor) else 0, tuple_length=length)
        self._versions[node] = _versions(value)

    def _is_size(self, node: fx.Node, value: Any) -> bool:
        """Say whether a value is plain and equal for all data of a shape."""
        reads_form = node.target in _FORM_FUNCTIONS or (node.op == "call_method" and node.target in _FORM_METHODS)
        of_sizes = all(self.seen[used].kind is ValueKind.PLAIN for used in node.all_input_nodes)
        return is_plain_structure(value) and (reads_form or of_sizes)

    def _has_written(self, writer: fx.Node) -> bool:
        """Note the values that a node has just written into; say whether there are any."""
        written = [node for node, value in self.env.items() if _versions(value) != self._versions[node]]
        for node in written:
            self._versions[node] = _versions(self.env[node])
            self.seen[node].last_writer = writer
        return bool(written)

    def _only_computes(self, node: fx.Node, value: Any) -> bool:
        """Say whether a node that was not seen to draw or to write holds no parameters, and draws in no mode either."""
        if node.op == "get_attr":
            return not isinstance(value, nn.Parameter)
        if node.op == "call_module":
            module = self._model.get_submodule(str(node.target))
            leaves = (each for each in all_modules(module) if is_leaf(each) and is_library(type(each)))
            return next(module.parameters(), None) is None and not any(map(module_may_draw, leaves))
        return isinstance(node.target, Holds) or not may_draw(node)


def _tuple_length(value: Any) -> int | None:
    items = cast("tuple[Any, ...]", value) if type(value) is tuple else ()
    return len(items) if all(isinstance(item, Tensor) or is_plain_structure(item) for item in items) and items else None


def _versions(value: Any) -> tuple[int, ...]:
    # Writing into a tensor is counted by its version, which views share; tensors of inference mode have none.
    return tuple(version_of(tensor) for tensor in tensors_within(value) if not tensor.is_inference())
