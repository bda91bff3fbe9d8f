"""Run the graph of a module node by node, for real or on tensors that hold no data."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import map_arg

from ...compat import all_modules, fake_tensors, own_buffers, own_parameters
from ...runtime.graphs import capture_of, select
from ...runtime.values import Meta, TensorMeta, is_leaf, meta_of
from ..isolation import preserved

__all__ = ["GraphRunner", "changed_metas", "function_of_node"]


def function_of_node(node: fx.Node, module: nn.Module) -> Callable[..., Any]:
    """Return what computes the value of a node, neither placeholder nor output, from its arguments. `module` holds the
    modules and tensors that it names; tensors are looked up at each call.
    """
    match node.op:
        case "get_attr":
            path, _, name = str(node.target).rpartition(".")
            return partial(getattr, module.get_submodule(path), name)
        case "call_module":
            return module.get_submodule(str(node.target))
        case "call_method":
            return partial(_call_method, str(node.target))
        case _:
            return cast("Callable[..., Any]", node.target)


def _call_method(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)


class GraphRunner(fx.Interpreter):
    """Run a graph of a module; a subclass says what goes on around a node, in `run_node`."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)

    def run(self, *args: Any, initial_env: dict[fx.Node, Any] | None = None, enable_io_processing: bool = False) -> Any:
        """Run the graph; torch's own loop makes a progress bar, and the thread that watches it stays for good."""
        graph = cast("fx.Graph", self.graph)
        given: tuple[Any, ...] = graph.process_inputs(*args) if enable_io_processing else args
        self.env, self.args_iter = dict(initial_env or {}), iter(given)
        for node in graph.nodes:
            if node not in self.env:
                self.env[node] = self.run_node(node)
            if node.op == "output":
                return self.env[node]
            for spent in self.user_to_last_uses.get(node, ()):
                del self.env[spent]
        return None

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a node is given, plain lists and dicts where the graph keeps immutable ones: guards ask."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(_thawed, args)), {name: _thawed(value) for name, value in kwargs.items()}


def _thawed(value: Any) -> Any:
    if isinstance(value, immutable_list):
        return [_thawed(item) for item in cast("list[Any]", value)]
    if isinstance(value, immutable_dict):
        return {key: _thawed(item) for key, item in cast("dict[Any, Any]", value).items()}
    if type(value) is tuple:
        return tuple(_thawed(item) for item in cast("tuple[Any, ...]", value))
    return value


def changed_metas(owner: nn.Module, changed: Sequence[object]) -> Mapping[nn.Module, Mapping[fx.Node, Meta]]:
    """Return what nodes give that gave something of another form before, by the module in whose graphs they are. Only
    what reads one of the `changed` tensors and modules in `owner` runs. Code without a graph counts as before.
    """
    run, capture = _ChangedRun(changed), capture_of(owner)
    if capture is not None:
        with preserved(owner), torch.no_grad(), fake_tensors():
            for specialization in capture.specializations:
                run.graph(owner, specialization.graph, {})
    return run.metas


class _ChangedRun:
    """Run those nodes that read a changed value."""

    def __init__(self, changed: Sequence[object]) -> None:
        self.metas: dict[nn.Module, dict[fx.Node, Meta]] = {}
        self._changed = {id(item) for item in changed}

    def graph(self, owner: nn.Module, graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
        """Run a module's graph, given some values; others are added."""
        for node, value in list(values.items()):
            self._note(owner, node, value)
        for node in graph.nodes:
            if node.op not in ("placeholder", "output") and self._reads_changed(owner, node):
                with contextlib.suppress(Exception):
                    values[node] = self._result(owner, node, values)
                    self._note(owner, node, values[node])

    def _note(self, owner: nn.Module, node: fx.Node, value: Any) -> None:
        meta = meta_of(value)
        if "val" in node.meta and meta != node.meta["val"]:
            self.metas.setdefault(owner, {})[node] = meta

    def _reads_changed(self, owner: nn.Module, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return id(operator.attrgetter(str(node.target))(owner)) in self._changed
        if node.op == "call_module" and self._holds_changed(owner.get_submodule(str(node.target))):
            return True
        return any(operand in self.metas.get(owner, ()) for operand in node.all_input_nodes)

    def _holds_changed(self, module: nn.Module) -> bool:
        inside = all_modules(module)
        tensors = (t for m in inside for t in (*own_parameters(m).values(), *own_buffers(m).values()))
        return any(id(item) in self._changed for item in (*inside, *tensors))

    def _result(self, owner: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: _value(operand, values))
        function = function_of_node(node, owner)
        return self._call(function, args, kwargs) if isinstance(function, nn.Module) else function(*args, **kwargs)

    def _call(self, module: nn.Module, args: Collection[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_leaf(module):
            with _buffers_spared(module):
                return module.forward(*args, **kwargs)
        selected = select(module, tuple(args), kwargs)
        if selected is None:
            return self._only_graph(module)
        graph, given = selected[0].graph, selected[1]
        values = dict(zip(graph.find_nodes(op="placeholder"), given, strict=True))
        self.graph(module, graph, values)
        return map_arg(graph.output_node().args[0], lambda node: _value(node, values))

    def _only_graph(self, module: nn.Module) -> Any:
        """Run a module's one graph on inputs of the form that it was recorded with: its guards may read data."""
        capture = capture_of(module)
        if capture is None or len(capture.specializations) != 1:
            raise LookupError("its own forward runs")
        graph, values = capture.specializations[0].graph, dict[fx.Node, Any]()
        self.graph(module, graph, values)
        return map_arg(graph.output_node().args[0], lambda node: _value(node, values))


@contextlib.contextmanager
def _buffers_spared(module: nn.Module) -> Generator[None]:
    """Let a module in training write its statistics elsewhere: a write is seen even where the value is put back."""
    registries = [own_buffers(inner) for inner in all_modules(module)]
    before = [dict(registry) for registry in registries]
    try:
        for registry in registries:
            registry.update({name: buffer if buffer is None else buffer.clone() for name, buffer in registry.items()})
        yield
    finally:
        for registry, buffers in zip(registries, before, strict=True):
            registry.update(buffers)


def _value(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return what a node gives; of what did not run, something of the form that it is known to have."""
    return values[node] if node in values else _of_form(node.meta.get("val"))


def _of_form(meta: Meta) -> Any:
    match meta:
        case TensorMeta():
            return torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
        case tuple():
            return tuple(map(_of_form, meta))
        case list():
            return list(map(_of_form, meta))
        case dict():
            return {key: _of_form(item) for key, item in meta.items()}
        case _:
            return meta
