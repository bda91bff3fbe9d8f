"""Run the graph of a module node by node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import fx, nn

__all__ = ["GraphRunner", "function_of_node"]


def function_of_node(node: fx.Node, module: nn.Module) -> Callable[..., Any]:
    """Return what computes a node's value from its arguments.

    Args:
        node: neither a placeholder nor the output.
        module: holds the modules and tensors that the node names. Tensors are looked up at each call.
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
