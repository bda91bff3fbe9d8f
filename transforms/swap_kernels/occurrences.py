"""One place where a kernel may be swapped in: what it is given there, and whether it can take that."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from ...cuda_ops import Kernel
from ...errors import UsageError
from ...layers.members import seal, written_out
from ...passes.rewriting import Edit, Found, Held, Place
from ...tracing.program import Program
from ...tracing.values import TensorMeta, meta_of
from .spelled import is_cast, spelled, uncast

__all__ = ["Occurrence", "occurrence"]


def occurrence(program: Program, owner: str, node: fx.Node, kernel: Kernel) -> Occurrence | str | None:
    """Return what a node computes as a kernel does; None if it computes something else, or why it stays as it is."""
    problem: str | None = None
    for found in _found(program, owner, node, kernel):
        reason = found.problem()
        if reason is None:
            return found
        problem = problem or reason
    return problem


def _found(program: Program, owner: str, node: fx.Node, kernel: Kernel) -> Iterator[Occurrence]:
    place = Place(program, owner)
    for spelling in kernel.spellings:
        known = spelled(spelling)
        for found in known.pattern.fits(node, place, Found()):
            if place.is_undisturbed(found):
                yield Occurrence(program, owner, node, kernel, found, known.settings)


@dataclass(frozen=True)
class Occurrence:
    """A place where operations compute what a kernel does.

    Attributes:
        program, owner: where it is.
        result: the node that has the result.
        kernel: what may be put there.
        found: the operations, and their operands by name.
        settings: what the spelling says besides.
    """

    program: Program
    owner: str
    result: fx.Node
    kernel: Kernel
    found: Found
    settings: Mapping[str, Any]

    @property
    def covered(self) -> set[fx.Node]:
        """Return the operations, without casts of operands."""
        operands = set(self.found.names.values())
        return {node for node in self.found.computed if not (is_cast(node) and uncast(node) in operands)}

    def problem(self) -> str | None:
        """Return why the kernel cannot be put here, or None."""
        covered = self.covered
        for node in covered - {self.result}:
            if isinstance(node.meta.get("val"), TensorMeta) and not covered.issuperset(node.users):
                return f"'{node.name}' is read elsewhere too"
        expected = self.result.meta.get("val")
        if not isinstance(expected, TensorMeta) or not all(isinstance(m, TensorMeta) for m in self._tensors.values()):
            return "what it reads is not known to be tensors"
        try:
            result = self._tried()
        except UsageError as error:
            return str(error)
        return None if result.shape == expected.shape else f"the operator's result has shape {tuple(result.shape)}"

    def write(self, edit: Edit) -> None:
        """Write a call of the kernel, and let it be read in the place of the result."""
        before, dtype = set(edit.graph.nodes), self.result.meta["val"].dtype
        tracer = GraphAppendingTracer(edit.graph)
        with edit.graph.inserting_before(self.result):
            tensors = {name: self._written(name, tracer) for name in self._tensors}
            new = self.kernel.compute(**self._plain, **tensors)
            new = new if self._tried().dtype == dtype else new.to(dtype)
        for node in set(edit.graph.nodes) - before:
            edit.sign(node)
        calls = [str(node.target) for node in self.covered if node.op == "call_module"]
        for path, names in written_out(edit.owner, calls).items():
            module = edit.owner.get_submodule(path)
            edit.on_undo(seal(module, names), module)
        edit.replace(self.result, new.node)

    # -- operands --------------------------------------------------------------------------------------------------

    @cached_property
    def _held(self) -> dict[str, Any]:
        """Return what called modules hold, by the name in the spelling."""
        module, values = self.program.module(self.owner), self.found.values
        return {k: operator.attrgetter(v.name)(module) for k, v in values.items() if isinstance(v, Held)}

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        """Return the tensors that are given, described."""
        nodes = {name: node.meta.get("val") for name, node in self.found.names.items()}
        return nodes | {name: meta_of(held) for name, held in self._held.items() if held is not None}

    @cached_property
    def _plain(self) -> dict[str, Any]:
        """Return what else is given."""
        given = {**self.settings, **self.found.values, **dict.fromkeys(self._held)}
        return {name: value for name, value in given.items() if name not in self._tensors}

    @cached_property
    def _dtype(self) -> torch.dtype:
        """Return the dtype to compute in: that of all floating-point operands, or the widest."""
        floating = [meta.dtype for meta in self._tensors.values() if meta.dtype.is_floating_point]
        return reduce(torch.promote_types, floating)

    def _is_cast(self, name: str) -> bool:
        dtype: torch.dtype = self._tensors[name].dtype
        return dtype.is_floating_point and dtype != self._dtype

    def _tried(self) -> Tensor:
        """Return what the kernel makes of tensors of these shapes, without computing it."""
        empty = {
            name: torch.empty(meta.shape, dtype=self._dtype if self._is_cast(name) else meta.dtype, device="meta")
            for name, meta in self._tensors.items()
        }
        return self.kernel.compute(**self._plain, **empty)

    def _written(self, name: str, tracer: GraphAppendingTracer) -> fx.Proxy:
        value = self.found.values.get(name)
        graph = tracer.graph
        node = graph.get_attr(value.name) if isinstance(value, Held) else self.found.names[name]
        proxy = fx.Proxy(node, tracer)
        return proxy.to(self._dtype) if self._is_cast(name) else proxy
