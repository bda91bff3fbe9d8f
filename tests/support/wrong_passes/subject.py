"""A small model with one example, the rewrite of it that is right, and those that are wrong."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Goal, Site
from fxopt.runtime.values import map_leaves
from fxopt.tracing.program import Program

Function = Callable[..., Any]
REGION = "region"


@dataclass(frozen=True)
class Subject:
    """What a pass is tried on.

    Attributes:
        model: makes the model.
        inputs: makes the one example.
        tensors: attributes of the model that the rewritten code takes behind the inputs.
        honest: what the model computes, as one function of the inputs and the tensors.
        wrong: (family, what is wrong) -> the same with a mistake.
        training: the mode of the model.
        dtype: of the model and the example.
        node: the name of the one function to replace; by default the whole forward is. With `REGION` all that the
            forward does becomes a region, and the function is given it to call, and what comes in.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    tensors: tuple[str, ...]
    honest: Function
    wrong: Mapping[tuple[str, str], Function] = field(default_factory=dict[tuple[str, str], Function])
    training: bool = False
    dtype: torch.dtype = torch.float32
    node: str = ""

    def example(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return the model and its example."""
        torch.manual_seed(0)
        model = self.model().to(self.dtype).train(self.training)
        inputs = tuple(x.to(self.dtype) if x.is_floating_point() else x for x in self.inputs())
        return model, inputs


@dataclass(frozen=True)
class Replace(Pass):
    """Replace a forward, or one node of it, by a call of a function.

    Before: any graph        After: a call of the function
    Refuses: nothing.
    """

    function: Function
    tensors: tuple[str, ...]
    node: str = ""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site]:
        for number, specialization in enumerate(program.captures[""].specializations):
            for node in specialization.graph.nodes:
                if self._is_wanted(node):
                    yield Site(program, "", {"node": node.name}, number)

    def _is_wanted(self, node: fx.Node) -> bool:
        if self.node in ("", REGION):
            return node.op == "output"
        return getattr(node.target, "__name__", "") == self.node

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("node")
        new = named(self.function)
        if self.node == REGION:
            call_region(edit, new)
        elif self.node:
            node.meta["origin"] = node.meta.get("origin", node.name)
            node.target = new
        else:
            replace_forward(node, new, self.tensors)


def named(function: Function) -> Function:
    """Return a function under a name that generated code can call it by."""
    function.__name__ = re.sub(r"\W", "_", function.__name__).strip("_")
    return function


def call_region(edit: Edit, function: Function) -> None:
    """Make a region of the whole forward, and let a function call it."""
    call = edit.outline([n for n in edit.graph.nodes if n.op not in ("placeholder", "output")], name="region")
    with edit.graph.inserting_before(call):
        region = edit.graph.get_attr(str(call.target))
        again = edit.graph.call_function(function, (region, *call.args))
    call.replace_all_uses_with(again)
    edit.graph.erase_node(call)


def replace_forward(output: fx.Node, function: Function, tensors: tuple[str, ...]) -> None:
    graph = output.graph
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_before(output):
        call = graph.call_function(function, (*inputs, *(graph.get_attr(name) for name in tensors)))
        if isinstance(output.args[0], fx.Node):
            result: Any = call
        else:
            count = iter(range(100))
            result = map_leaves(lambda leaf: part(graph, call, next(count)), output.args[0])
    output.args = (result,)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def part(graph: fx.Graph, call: fx.Node, number: int) -> fx.Node:
    return graph.call_function(operator.getitem, (call, number))


def outcome(subject: Subject, function: Function) -> str:
    """Return why a rewrite of a subject was not kept, or "" where it was."""
    model, inputs = subject.example()
    one = Replace(function, subject.tensors, subject.node)
    fast = fxopt.optimize(model, passes=[one], example_inputs=inputs, measure=False)
    decisions = fxopt.plan(fast).decisions
    reasons = [decision.reason for decision in decisions if decision.status != "applied"]
    return "; ".join(reasons) if reasons or decisions else "nothing was found to rewrite"
