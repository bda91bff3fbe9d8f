"""The backend `fxopt` of `torch.compile`: passes on the graphs that dynamo captures, with their parameters."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from . import api
from .compat.dynamo import is_kept_between_calls
from .errors import FxoptError, NothingDoneWarning, UsageError, one_line
from .known_passes import PRESETS
from .runtime.values import requires_grad

__all__ = ["compile_graph"]

_PASSES = tuple(each for each in PRESETS["inference"] if not each.startswith("fuse_"))
"""Those that leave parameters where they are: dynamo hands these over at each call."""
_MOST = 4
"""For so many sets of parameters a graph is rewritten: models of one class share it."""

Run = Callable[..., Any]


def compile_graph(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Run:
    """Return what computes a graph of dynamo, rewritten by passes for inference, as `torch.compile` asks a backend to.

    Where gradients may be asked for, and where no pass applies, the graph runs as it is.

    Args:
        graph: what dynamo captured; its parameters are among its inputs.
        example_inputs: of the graph, the parameters and buffers as they are.
        options: of `torch.compile`: `passes`, as for `fxopt.optimize`; they may not move parameters.
        mode: of `torch.compile`; the backend has none.

    Raises:
        UsageError: an unknown option, a mode, or a pass that moves parameters.
    """
    if mode is not None:
        raise UsageError(f"the backend fxopt has no mode {mode!r}; leave mode out, and give options={{'passes': ...}}")
    given = dict(options or {})
    passes = given.pop("passes", _PASSES)
    if given:
        raise UsageError(f"the backend fxopt has no option {next(iter(given))!r}; there is 'passes'")
    if torch.is_grad_enabled() and any(map(requires_grad, example_inputs)):
        warnings.warn(
            "gradients may be asked for, so the backend fxopt runs the graph as it is; for inference call the model "
            "under torch.no_grad(), for training give fxopt.optimize(model) to torch.compile",
            NothingDoneWarning,
            stacklevel=2,
        )
        return graph.forward
    return _Rewritten(graph, example_inputs, passes)


class _Rewritten:
    """A graph, and what passes made of it for the parameters that it was called with."""

    def __init__(self, graph: fx.GraphModule, example_inputs: Sequence[Any], passes: Any) -> None:
        self._graph, self._passes = graph, passes
        nodes = graph.graph.find_nodes(op="placeholder")
        self._kept = {place: node for place, node in enumerate(nodes) if is_kept_between_calls(node)}
        tensors = [place for place, value in enumerate(example_inputs) if isinstance(value, Tensor)]
        self._given = [place for place in tensors if place not in self._kept]
        self._made: list[tuple[list[Tensor], nn.Module | None]] = []
        self._make(example_inputs)

    def __call__(self, *args: Any) -> Any:
        kept = [args[place] for place in self._kept]
        known = (fast for tensors, fast in self._made if all(map(operator.is_, tensors, kept)))
        fast = next(known, self)
        if fast is self:
            fast = self._make(args) if len(self._made) < _MOST else None
        return self._graph.forward(*args) if fast is None else fast(*[args[place] for place in self._given])

    def _make(self, args: Sequence[Any]) -> nn.Module | None:
        """Rewrite the graph for the parameters and buffers among arguments; None where it runs as it is."""
        fast = None
        try:
            fast = self._optimized(args)
        except UsageError:
            raise
        except FxoptError as error:
            warnings.warn(f"the graph runs as it is: {one_line(error)}", NothingDoneWarning, stacklevel=4)
        self._made.append(([args[place] for place in self._kept], fast))
        return fast

    def _optimized(self, args: Sequence[Any]) -> nn.Module | None:
        tensors = {node.name: cast("Tensor", args[place]) for place, node in self._kept.items()}
        module = _holding(self._graph, tensors)
        if module is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingDoneWarning)
            inputs = tuple(args[place] for place in self._given)
            fast = api.optimize(module, self._passes, example_inputs=inputs, phase="eval", inplace=True)
        if any(getattr(fast, name, None) is not tensor for name, tensor in tensors.items()):
            raise UsageError(
                "the backend fxopt takes no passes that move parameters, since dynamo hands them over at each call; "
                "optimize the model by them first, and give the result to torch.compile"
            )
        return fast


def _holding(graph: fx.GraphModule, tensors: Mapping[str, Tensor]) -> nn.Module | None:
    """Return a module that holds tensors which a graph is given, and reads sizes from its other inputs; or None."""
    new, placeholders = fx.Graph(), graph.graph.find_nodes(op="placeholder")
    inputs = [node for node in placeholders if node.name not in tensors and not _symbol(node)]
    copies = {node: new.placeholder(node.name) for node in inputs}
    for node in placeholders:
        if node.name in tensors:
            copies[node] = new.get_attr(node.name)
        elif symbol := _symbol(node):
            place = _place(symbol, inputs)
            if place is None:
                return None
            copies[node] = new.call_method("size", (copies[place[0]], place[1]))
    for node in graph.graph.nodes:
        if node not in copies:
            copies[node] = new.node_copy(node, lambda each: copies[each])
    own = {str(node.target) for node in graph.graph.nodes if node.op in ("get_attr", "call_module")}
    held: dict[str, Any] = {**{name: operator.attrgetter(name)(graph) for name in own}, **tensors}
    return _plain_module(fx.GraphModule(held, new))


def _plain_module(graph: fx.GraphModule) -> nn.Module:
    """Return a module that runs the code of a graph, and prints nothing where that raises."""
    module = type("CapturedGraph", (nn.Module,), {"forward": type(graph).forward})()
    for name, value in (*graph.named_parameters(recurse=False), *graph.named_children()):
        setattr(module, name, value)
    for name, value in graph.named_buffers(recurse=False):
        module.register_buffer(name, value)
    return module.eval()


def _symbol(node: fx.Node) -> str:
    """Return the symbol of a size that a graph is given, or ""."""
    value = node.meta.get("example_value")
    return str(value) if isinstance(value, torch.SymInt) else ""


def _place(symbol: str, inputs: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """Return which dimension of which input is as large as a symbol says."""
    for node in inputs:
        value = node.meta.get("example_value")
        for dimension, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if str(size) == symbol:
                return node, dimension
    return None
