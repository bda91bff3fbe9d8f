"""Random draws follow the node they belong to, whatever the order, the type and the layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt.passes.verification import Tape, reference, verify
from fxopt.runtime.graphs import capture_of, own, recompile
from fxopt.tracing.program import capture_program

SHAPE = (4, 5)


def normal_(x: Tensor) -> Tensor:
    return torch.empty_like(x).normal_(1.0, 2.0)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x + 3, 0.4, True),
    "native_dropout": lambda x: torch.native_dropout(x + 3, 0.4, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli p": lambda x: x.bernoulli(0.3),
    "bernoulli_ tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "normal": lambda x: torch.normal(x, 2.0),
    "normal with std": lambda x: torch.normal(1.0, x.abs()),
    "normal_": normal_,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-3, 5),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "randint": lambda x: torch.randint(2, 9, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 9),
}
ORDERED_ONLY: dict[str, Callable[[Tensor], Tensor]] = {
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "randperm": lambda x: torch.randperm(len(x)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
}


def played(function: Callable[[Tensor], Tensor], x: Tensor, key: str | tuple[str, ...] = "a", seed: int = 1) -> Tensor:
    with Tape(seed) as tape:
        tape.at(key)
        return function(x)


@pytest.mark.parametrize("name", [*DRAWS, *ORDERED_ONLY])
def test_draws_repeat_by_seed_key_and_count(name: str) -> None:
    function = {**DRAWS, **ORDERED_ONLY}[name]
    x = torch.randn(40, 50)
    torch.manual_seed(5)
    first = played(function, x)
    torch.manual_seed(6)
    assert torch.equal(played(function, x), first)
    assert not torch.equal(played(function, x, key="b"), first)
    assert not torch.equal(played(function, x, seed=2), first)
    with Tape(1) as tape:
        tape.at("a")
        assert torch.equal(function(x), first)
        assert not torch.equal(function(x), first)


@pytest.mark.parametrize("name", [*DRAWS, *ORDERED_ONLY])
def test_the_generator_is_left_alone(name: str) -> None:
    x = torch.randn(SHAPE)
    before = torch.get_rng_state()
    played({**DRAWS, **ORDERED_ONLY}[name], x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_do_not_depend_on_the_type(name: str) -> None:
    x = torch.randn(SHAPE, dtype=torch.float64)
    wide, narrow = played(DRAWS[name], x), played(DRAWS[name], x.float())
    torch.testing.assert_close(wide.float(), narrow.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_fused_draw_is_the_stack_of_its_members(name: str, dim: int) -> None:
    members = [torch.randn(SHAPE) for _ in range(3)]
    single = [played(DRAWS[name], x, key=f"member_{i}") for i, x in enumerate(members)]
    fused = played(DRAWS[name], torch.stack(members, dim), key=("member_0", "member_1", "member_2"))
    torch.testing.assert_close(fused, torch.stack(single, dim), rtol=1e-6, atol=1e-6)


def test_a_wide_draw_is_the_concatenation_of_its_members() -> None:
    members = [torch.randn(SHAPE) for _ in range(2)]
    single = [played(DRAWS["dropout"], x, key=f"member_{i}") for i, x in enumerate(members)]
    fused = played(DRAWS["dropout"], torch.cat(members, 0), key=("member_0", "member_1"))
    assert torch.equal(fused, torch.cat(single, 0))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_distribution_of_the_operator(name: str) -> None:
    x = torch.full((300, 300), 0.5)
    taped, plain = played(DRAWS[name], x).double(), DRAWS[name](x).double()
    assert float(taped.mean()) == pytest.approx(float(plain.mean()), abs=0.05)
    assert float(taped.std()) == pytest.approx(float(plain.std()), abs=0.05)
    assert played(DRAWS[name], x).dtype == DRAWS[name](x).dtype


def test_a_draw_from_a_generator_of_ones_own_is_not_taped() -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.rand(3, generator=torch.Generator().manual_seed(7))

    assert torch.equal(played(draw, torch.zeros(1)), draw(torch.zeros(1)))


def test_native_dropout_outside_training_keeps_everything() -> None:
    x = torch.randn(SHAPE)
    assert torch.equal(played(lambda y: torch.native_dropout(y, 0.5, False)[0], x), x)


# -- in graphs ---------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Heads(nn.Module):
    """Two dropouts in each member and one around it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3), nn.Dropout(0.2)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.dropout(head(x), 0.3, self.training) for head in self.heads], 1)


def captured() -> tuple[nn.Module, Tensor]:
    model, x = Heads(), torch.randn(5, 4)
    capture_program(model, (x,))
    assert capture_of(model) is not None
    return model, x


def test_members_run_in_another_order_draw_the_same() -> None:
    model, x = captured()
    before = reference(model, [Call((x,))], training=True)
    graph = own(model).specializations[0].graph
    start = graph.find_nodes(op="placeholder")[0]
    for node in graph.find_nodes(op="call_module"):
        start.append(node)
    recompile(model)
    assert before.conditions.random
    verdict = verify(before, model)
    assert verdict.ok, verdict.reason


def fuse(model: nn.Module, layers: list[Callable[..., Tensor]]) -> None:
    """Replace the whole graph of `Heads` by batched operations, whose random nodes say what they stand for."""
    graph = own(model).specializations[0].graph
    inner_origin = tuple(node.name for node in graph.find_nodes(op="call_module"))
    outer_origin = tuple(node.name for node in graph.find_nodes(op="call_function", target=F.dropout))
    (x,) = graph.find_nodes(op="placeholder")
    output = graph.output_node()
    with graph.inserting_before(output):
        training = graph.get_attr("training")
        value = graph.call_function(first, (x, *parameters(graph, 0)))
        for chance, origin, then in ((0.5, inner_origin, 2), (0.2, inner_origin, None), (0.3, outer_origin, None)):
            value = graph.call_function(F.dropout, (value, chance, training))
            value.meta["origin"] = origin
            if then is not None:
                value = graph.call_function(second, (value, *parameters(graph, then)))
        for step in layers:
            value = graph.call_function(step, (value,))
        output.args = (graph.call_method("transpose", (value, 0, 1)),)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_module", "call_function", "call_method") and not node.users:
            graph.erase_node(node)
    recompile(model)


def parameters(graph: Any, layer: int) -> list[Any]:
    return [[graph.get_attr(f"heads.{member}.{layer}.{name}") for member in range(3)] for name in ("weight", "bias")]


def first(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return x @ torch.stack(weights).mT + torch.stack(biases)[:, None]


second = first


@pytest.mark.parametrize("training", [True, False])
def test_a_fused_graph_draws_what_its_members_drew(training: bool) -> None:
    model, x = captured()
    before = reference(model, [Call((x,))], training=training)
    fuse(model, [])
    verdict = verify(before, model)
    assert verdict.ok, verdict.reason
    assert verdict.meaning_error < 1e-12


def test_a_fused_graph_with_its_members_exchanged_is_found() -> None:
    model, x = captured()
    before = reference(copy.deepcopy(model), [Call((x,))], training=True)
    fuse(model, [lambda value: value.flip(0)])
    assert not verify(before, model).ok
