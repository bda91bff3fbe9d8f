"""One place where a kernel may be swapped in: what it is given there, and whether it can take that."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from ...cuda_ops import Kernel
from ...errors import UsageError
from ...passes.rewriting import Edit, Held, Match, hold_written_out
from ...runtime.graphs import Specialization, required_capture
from ...runtime.guards import Guard, Method, Truth
from ...runtime.values import TensorMeta, meta_of
from ...tracing.program import Program
from .decompositions import is_cast, uncast

__all__ = ["Occurrence"]


@dataclass(frozen=True)
class Occurrence:
    """Operations that compute what a kernel does; `second` result, and what is returned but `unread` by callers."""

    kernel: Kernel
    found: Match
    settings: Mapping[str, Any]
    second: fx.Node | None = None
    unread: fx.Node | None = None

    @property
    def program(self) -> Program:
        return self.found.program

    @property
    def owner(self) -> str:
        return self.found.owner

    @property
    def result(self) -> fx.Node:
        return self.found.root

    @property
    def covered(self) -> set[fx.Node]:
        """Return the operations, without casts of operands."""
        operands = set(self.found.nodes.values())
        return {node for node in self.found.computed if not (is_cast(node) and uncast(node) in operands)}

    def reason_against(self) -> str | None:
        """Return why the kernel cannot be put here, or None."""
        read = self._read_elsewhere()
        if read is not None:
            return f"{read} is read elsewhere too"
        expected = [meta for node in self._results if isinstance(meta := node.meta.get("val"), TensorMeta)]
        if len(expected) < len(self._results) or not all(isinstance(m, TensorMeta) for m in self._tensors.values()):
            return "what it reads is not known to be tensors"
        for node in self.found.nodes.values():
            if self.second is not None and node.op != "get_attr" and self.second < node:
                return f"'{node.name}' is computed after what is read elsewhere"
        try:
            tried = self._tried()
        except UsageError as error:
            return str(error)
        wrong = (tuple(new.shape) for new, old in zip(tried, expected, strict=False) if new.shape != old.shape)
        return next((f"the operator's result has shape {shape}" for shape in wrong), None)

    def computed(self, value_of: Callable[[fx.Node], Any]) -> Any:
        """Return what the kernel makes of operands that nodes of the graph give, as tensors or as proxies of them."""
        given = {name: value_of(node) for name, node in self.found.nodes.items()}
        cast = {name: value.to(self._dtype) if self._is_cast(name) else value for name, value in given.items()}
        return self._made(cast, value_of)[0]

    def write(self, edit: Edit) -> None:
        """Write a call of the kernel, and let it be read in the place of the results."""
        before, tracer = set(edit.graph.nodes), GraphAppendingTracer(edit.graph)
        # A second result may be read before the first is there.
        with edit.graph.inserting_before(self.result if self.second is None else self.second.next):
            tensors = {name: self._written(name, tracer) for name in self._tensors}
            new = self._made(tensors, lambda node: fx.Proxy(node, tracer))
        for node in self.covered.difference(self._results):
            for user in [user for user in node.users if user not in self.covered and self._is_known(user)]:
                with edit.graph.inserting_before(user):  # an operand, too, has the device and dtype asked for
                    edit.replace(user, edit.graph.call_function(getattr, (self._of_that(user), user.args[1])))
        edit.hold_where(list(self._guards(required_capture(edit.owner).specializations[edit.site.specialization])))
        calls = [str(node.target) for node in self.covered if node.op == "call_module"]
        hold_written_out(edit, calls)
        replaced = [*zip(self._results, new, strict=True)]
        for node, proxy in reversed(replaced):  # what only the first result reads is gone once that is replaced
            if node is self.result or not self.covered.issuperset(node.users):
                edit.replace(node, proxy.node)
            else:
                edit.graph.erase_node(proxy.node)
        for node in set(edit.graph.nodes) - before:
            edit.sign(node)

    def _guards(self, specialization: Specialization) -> Iterator[Guard]:
        """Yield what makes a call the original's, where an argument that holds integers holds probabilities, say."""
        for name in self._tensors:
            given = _argument(self.found.nodes[name]) if name in self.found.nodes else None
            if given is not None and not self._tensors[name].dtype.is_floating_point:
                source = Method(specialization.argument(given), "is_floating_point", ())
                yield Guard(source, Truth(False), f"{self.kernel.name} takes integers there")

    # -- results ---------------------------------------------------------------------------------------------------

    @property
    def _results(self) -> tuple[fx.Node, ...]:
        """Return the nodes that are replaced."""
        return (self.result,) if self.second is None else (self.result, self.second)

    def _read_elsewhere(self) -> str | None:
        """Return what is computed on the way and read by something else, so that it would be computed all the same."""
        covered = self.covered
        for node in covered.difference(self._results):
            others = [user for user in node.users if user not in covered and not self._is_known(user)]
            if all(user.op == "output" and node is self.unread for user in others):
                continue
            if isinstance(node.meta.get("val"), TensorMeta):
                return f"'{node.name}'"
            if any(each in covered for each in node.all_input_nodes):
                return f"'{node.name}', which is of '{node.all_input_nodes[0].name}',"
        return None

    def _is_known(self, user: fx.Node) -> bool:
        """Say whether something asks for a device or dtype, which an operand has too."""
        return user.target is getattr and self._of_that(user) is not None

    def _of_that(self, user: fx.Node) -> fx.Node | None:
        """Return an operand with the device or dtype that something asks for; all are on one device."""
        (asked, what), operands = user.args, self.found.nodes.values()
        if what == "dtype" and isinstance(asked, fx.Node) and isinstance(meta := asked.meta.get("val"), TensorMeta):
            return next((each for each in operands if getattr(each.meta.get("val"), "dtype", None) == meta.dtype), None)
        return next(iter(operands)) if what == "device" else None

    # -- operands --------------------------------------------------------------------------------------------------

    @cached_property
    def _held(self) -> dict[str, Any]:
        """Return what called modules hold, by the name in the spelling."""
        module, values = self.program.module(self.owner), self.found.values
        return {k: operator.attrgetter(v.name)(module) for k, v in values.items() if isinstance(v, Held)}

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        """Return the tensors that are given, described."""
        nodes = {name: node.meta.get("val") for name, node in self.found.nodes.items()}
        return nodes | {name: meta_of(held) for name, held in self._held.items() if held is not None}

    def _plain(self, of_node: Callable[[fx.Node], Any]) -> dict[str, Any]:
        """Return what else is given: numbers too that the graph computes."""
        given = {**self.settings, **self.found.values, **dict.fromkeys(self._held)}
        plain = {name: value for name, value in given.items() if name not in self._tensors}
        return {name: of_node(value) if isinstance(value, fx.Node) else value for name, value in plain.items()}

    @cached_property
    def _dtype(self) -> torch.dtype:
        """Return the dtype to compute in: that of all floating-point operands, or the widest."""
        floating = [meta.dtype for meta in self._tensors.values() if meta.dtype.is_floating_point]
        return reduce(torch.promote_types, floating)

    def _is_cast(self, name: str) -> bool:
        dtype: torch.dtype = self._tensors[name].dtype
        return dtype.is_floating_point and dtype != self._dtype

    def _tried(self) -> tuple[Tensor, ...]:
        """Return what the kernel makes of tensors of these shapes, without computing it."""
        empty = {
            name: torch.empty(meta.shape, dtype=self._dtype if self._is_cast(name) else meta.dtype, device="meta")
            for name, meta in self._tensors.items()
        }
        return _several(self.kernel.compute(**self._plain(lambda node: node.meta["val"]), **empty))

    def _made(self, tensors: Mapping[str, Any], of_node: Callable[[fx.Node], Any]) -> list[Any]:
        """Return what the kernel makes of tensors, or of proxies of them, in the dtypes of the results."""
        made = _several(self.kernel.compute(**self._plain(of_node), **tensors))
        dtypes = [node.meta["val"].dtype for node in self._results]
        known = zip(made, self._tried(), dtypes, strict=False)
        return [each if tried.dtype == dtype else each.to(dtype) for each, tried, dtype in known]

    def _written(self, name: str, tracer: GraphAppendingTracer) -> fx.Proxy:
        value = self.found.values.get(name)
        graph = tracer.graph
        node = graph.get_attr(value.name) if isinstance(value, Held) else self._operand(name, graph)
        proxy = fx.Proxy(node, tracer)
        return proxy.to(self._dtype) if self._is_cast(name) else proxy

    def _operand(self, name: str, graph: fx.Graph) -> fx.Node:
        node = self.found.nodes[name]
        moved = node.op == "get_attr" and self.second is not None  # it may come after the place of the call
        return graph.get_attr(str(node.target)) if moved else node


def _argument(node: fx.Node) -> fx.Node | None:
    """Return the argument of a graph that a node is a view, a part or a cast of."""
    while node.op in ("call_function", "call_method") and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node if node.op == "placeholder" and isinstance(node.meta.get("val"), TensorMeta) else None


def _several(results: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", results) if isinstance(results, tuple) else (results,)
