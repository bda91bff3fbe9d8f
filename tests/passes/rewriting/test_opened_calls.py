"""What calls pass to the graphs that take their place, and conditions on it as checks in the graph around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxopt
from fxopt.passes.rewriting import Checks, only_graph, received
from fxopt.runtime.guards import (
    SELF,
    Argument,
    Attribute,
    Condition,
    Constant,
    Equals,
    Guard,
    Item,
    constant,
    length_of,
)

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class OfContainers(nn.Module):
    def forward(self, pair: list[Tensor], named: dict[str, Tensor]) -> Tensor:
        return pair[0] + pair[1] * named["scale"]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return self.inner([x, y], {"scale": F.relu(y)})


def test_what_a_call_passes_in_containers_is_received() -> None:
    program = fxopt.capture(Around(OfContainers()), (X,))
    (call,) = program.graph("").find_nodes(op="call_module")
    graph = only_graph(program.module("inner"), call)
    assert graph is not None
    found = received(*graph, fx.Node)
    assert found is not None
    assert {each.name for each in found} == {"x", "add", "relu"}
    specialization = graph[0]
    assert received(specialization, {"pair": [call], "named": {"scale": call}}, fx.Node) is None
    assert received(specialization, {"pair": call, "named": call}, fx.Node) is None
    assert received(specialization, {"pair": [1, 2], "named": {"scale": call}}, fx.Node) is None


def made(value: object) -> Constant:
    found = constant(value)
    assert found is not None
    return found


def written(guard: Guard, **given: Any) -> tuple[bool, fx.Graph]:
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) if value is ... else value for name, value in given.items()}
    return Checks(graph).write([guard], nodes), graph


def equals(source: Any, value: Any) -> Guard:
    return Guard(source, Equals(made(value)))


SHAPED = Guard(Attribute(Argument("x"), "is_cuda"), Equals(made(False)), "x was on the CPU")


def test_any_condition_on_arguments_is_a_check() -> None:
    done, graph = written(SHAPED, x=...)
    assert done
    graph.output(graph.find_nodes(op="placeholder")[0])
    (asked,) = [node for node in graph.nodes if isinstance(node.target, Condition)]
    assert (asked.target.guard, asked.target.names) == (SHAPED, ("x",))
    module = fx.GraphModule(nn.Module(), graph)
    assert module(X) is X
    with pytest.raises(Exception, match="x was on the CPU"):
        module(_OnCuda())


class _OnCuda:
    is_cuda = True


@pytest.mark.parametrize(
    "guard",
    [
        Guard(Attribute(SELF, "scale"), Equals(made(2))),  # of the module
        Guard(Attribute(Argument("other"), "scale"), Equals(made(2))),  # not passed
    ],
)
def test_conditions_on_anything_else_are_none(guard: Guard) -> None:
    done, graph = written(guard, x=...)
    assert not done
    assert [node.op for node in graph.nodes] == ["placeholder"]


def test_conditions_on_containers_of_computed_values_are_none() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    guard = equals(length_of(Item(Argument("pair"), made(0))), 3)
    assert not Checks(graph).write([guard], {"pair": [x, x]})
    checks = Checks(graph)
    assert checks.write([guard], {"pair": (x, x)}) and checks.write([guard], {"pair": (x, x)})
    assert sum(isinstance(node.target, Condition) for node in graph.nodes) <= 1  # written once


def test_outputs_of_transformers_are_read_by_name_and_number() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return outputs.BaseModelOutputWithPooling(last_hidden_state=x * 2, pooler_output=x.sum(-1))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            found = self.inner(x)
            return found.last_hidden_state + found[0] + found["last_hidden_state"] + found[1].unsqueeze(-1)

    model = Outer().eval()
    fast = fxopt.optimize(model, "flatten_calls", example_inputs=X, measure=False)
    graph = fxopt.graphs(fast)[""]
    assert not graph.find_nodes(op="call_module")
    assert not any(isinstance(node.target, type) for node in graph.nodes)  # nobody reads the output whole
    assert torch.equal(fast(X), model(X))


def test_other_outputs_that_nobody_reads_whole_are_built() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    built = list[Tensor]()

    @dataclass
    class Counted(outputs.BaseModelOutput):  # type: ignore[misc]
        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **named)
            built.append(self.last_hidden_state)

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Counted(last_hidden_state=x * 2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).last_hidden_state + 1

    fast = fxopt.optimize(Outer().eval(), "flatten_calls", example_inputs=X, measure=False)
    before = len(built)
    assert torch.equal(fast(X), X * 2 + 1)
    assert len(built) == before + 1


class _Sized(nn.Module):
    def forward(self, x: Tensor, rows: int) -> Tensor:
        return x * 2 if rows > 3 else x + 1


class _Totals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sized = _Sized()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.relu()
        torch.add(h.sum(0), self.total, out=self.total)  # what it reads is new, what it writes is not
        return self.sized(h, h.shape[0] + 1)


def test_no_check_comes_behind_a_write_into_out() -> None:
    plain = _Totals().eval()
    fast = fxopt.optimize(plain, "flatten_calls", example_inputs=torch.ones(6, 4), measure=False, verify=False)
    with torch.no_grad():
        fast(torch.ones(1, 4))
    torch.testing.assert_close(fast.total, torch.ones(4))
