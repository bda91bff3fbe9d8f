"""The whole model is compared under draws that are the same in every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.operators import derived
from fxopt.passes.verification import Original, allowances, demands
from fxopt.passes.verification.whole_model import original
from fxopt.runtime.graphs import attach, drop_specializations
from fxopt.tracing.examples import Inputs

SEEN: list[Tensor] = []
"""What the model computed; what it holds itself is put back."""


class Dropping(nn.Module):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        dropped = torch.dropout(x.sin(), self.chance, train=True)
        SEEN.append(dropped)
        return dropped


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_dropout_keeps_and_scales_all(chance: float) -> None:
    model, x = Dropping(chance), torch.linspace(0.1, 1.0, 5)
    assert Original(model, [Inputs(x)]).repeats()
    torch.testing.assert_close(SEEN[-1], x.sin() / (1 - chance))


class Sized(nn.Module):
    """Note the sizes that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        return self.linear(x)


@pytest.mark.parametrize(("is_usual", "expected"), [(True, [(1, 32, 8), (2, 9, 8)]), (False, [(2, 9, 8)])])
def test_another_mode_is_compared_on_a_smaller_call(is_usual: bool, expected: list[tuple[int, ...]]) -> None:
    SEEN.clear()
    Original(Sized(), [Inputs(torch.randn(1, 32, 8))], is_usual=is_usual)
    assert [tuple(x.shape) for x in SEEN] == expected


def test_a_model_that_takes_one_size_is_compared_on_it_in_every_mode() -> None:
    class OneSize(Sized):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(1, 32, 8))

    SEEN.clear()
    Original(OneSize(), [Inputs(torch.randn(1, 32, 8))], is_usual=False)
    assert [tuple(x.shape) for x in SEEN] == [(1, 32, 8)]


class Rounding(Sized):
    """The same but for rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e4 - 1e4


class Wrong(Sized):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


@pytest.mark.parametrize("drowns", [False, True])
@pytest.mark.parametrize(("kind", "looks_further"), [(Rounding, True), (Wrong, False)])
def test_of_a_smaller_call_that_drowns_in_rounding_float64_tells_and_then_the_examples_do(
    kind: type[Sized], looks_further: bool, drowns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(original, "_drowns", lambda _: drowns)
    model, other = Sized(), kind()
    other.load_state_dict(model.state_dict())
    runs = Original(model, [Inputs(torch.randn(1, 32, 8))], is_usual=False, gradients=True)
    SEEN.clear()
    assert not runs.verdict(other).ok
    assert any(tuple(seen.shape) == (1, 32, 8) for seen in SEEN) == (drowns and looks_further)


def test_a_gradient_drowns_where_rounding_is_more_than_half_of_it() -> None:
    exact = {"gradient of a.weight": torch.tensor([1.0, -2.0]).double(), "output": torch.ones(2).double()}
    for move, drowned in ((0.9, False), (1.1, True)):
        native = {"gradient of a.weight": torch.tensor([1.0, -2.0 + move]), "output": torch.zeros(2)}
        assert allowances.is_drowned(exact, native) is drowned


def test_no_more_is_learned_of_rounding_than_is_enough() -> None:
    learned: list[int] = []

    def judge() -> float:
        if len(learned) < 3:
            raise demands.TooFar("too far", 0.5)
        return 0.1

    def learn(count: int):
        for number in range(count):
            yield learned.append(number)

    assert demands.judged(judge, lambda: learn(8)) == (0.1, None) and learned == [0, 1, 2]
    learned.clear()
    error, objection = demands.judged(judge, lambda: learn(2))
    assert error == 0.5 and str(objection) == "too far" and learned == [0, 1]


class WrongWithMany(Sized):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.1 if len(x) > 31 else 1.0)


def test_a_model_that_errs_only_with_many_rows_is_found() -> None:
    model, other = Sized(), WrongWithMany()
    other.load_state_dict(model.state_dict())
    runs = Original(model, [Inputs(torch.randn(8, 8))], gradients=True)
    assert runs.verdict(model).ok
    assert not runs.verdict(other).ok


class OfTwoModes(nn.Module):
    """Decide by the mode and by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result = self.linear(x)
        if x.shape[1] == 32:
            result = result.sin()
        return result if self.training else result.cos()


class Noting(OfTwoModes):
    """Note what it is called with, too; such a forward has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        return super().forward(x)


@pytest.mark.parametrize("with_graph_in_training", [False, True])
def test_full_size_calls_are_made_where_a_graph_is_for_the_mode(with_graph_in_training: bool) -> None:
    """A smaller call misses every graph; where none is for the mode, a full-size one would, too."""
    example, model = Inputs(torch.randn(1, 32, 8)), Noting()
    captured = OfTwoModes().eval()
    captured.load_state_dict(model.state_dict())
    captured = fxopt.capture(captured, example).model
    attach(captured)  # as while it is worked on
    if not with_graph_in_training:
        drop_specializations(captured, lambda graph: graph.runs_in_mode(captured, flipped=True), "as passes do")
    SEEN.clear()
    before = Original(model, [example], training=True, is_usual=False)
    assert before.verdict(captured).ok
    assert ((1, 32, 8) in [tuple(x.shape) for x in SEEN]) is with_graph_in_training


class Steep(nn.Module):
    """Gradients of some outputs jump where sums are rounded otherwise; those of many rows are off by a factor."""

    def __init__(self, order: list[int], factor: float = 1.0, *, steepness: float = 3e4, steep: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 2048).sin().mul(0.2).view(64, 32))
        self.order, self.factor, self.steepness, self.steep = order, factor, steepness, steep

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x)
        h = nn.functional.linear(x[:, self.order], self.weight[:, self.order])
        few = h[:, : self.steep]
        steep = torch.cat([few + torch.sin(self.steepness * few) / self.steepness, h[:, self.steep :]], 1)
        return steep if len(x) < 5 else steep.detach() + self.factor * (steep - steep.detach())


IN_ORDER = list(range(32))
REVERSED = IN_ORDER[::-1]


def rows_in(dtype: torch.dtype) -> list[int]:
    return [len(each) for each in SEEN if each.dtype is dtype]


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_where_gradients_jump_float64_looks_at_a_few_rows_and_no_gradient_goes_astray(factor: float) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    kept = Original(Steep(IN_ORDER), [Inputs(x)], training=True, gradients=True)
    SEEN.clear()
    verdict = kept.verdict(Steep(REVERSED, factor))
    assert verdict.ok == (factor == 1.0), verdict.reason
    assert (3 in rows_in(torch.float64)) == (factor == 1.0)
    assert (16 in rows_in(torch.float64)) == (factor != 1.0)


def test_where_a_gradient_jumps_far_in_few_places_a_few_rows_are_enough() -> None:
    """The more so the steeper: a tenth of its scale, as those of a ResNet do, and little in the mean."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    kept = Original(Steep(IN_ORDER, steepness=4e6, steep=1), [Inputs(x)], training=True, gradients=True)
    SEEN.clear()
    verdict = kept.verdict(Steep(REVERSED, steepness=4e6, steep=1))
    assert verdict.ok and verdict.precision_error > 0.1, verdict
    assert set(rows_in(torch.float64)) == {3}
    assert rows_in(torch.float32).count(16) == 1


class Careless(torch.autograd.Function):
    """Give gradients that are off by a thousandth in float32 alone."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, upstream: Tensor) -> Tensor:
        return upstream if upstream.dtype is torch.float64 else upstream * 1.001


def test_where_gradients_of_the_original_do_not_jump_they_must_not() -> None:
    class Sloppy(Sized):
        def forward(self, x: Tensor) -> Tensor:
            return Careless.apply(super().forward(x))

    model, other = Sized(), Sloppy()
    other.load_state_dict(model.state_dict())
    runs = Original(model, [Inputs(torch.randn(16, 8))], training=True, gradients=True)
    assert runs.verdict(model).ok
    SEEN.clear()
    assert "gradient of" in runs.verdict(other).reason
    assert {3, 16} <= set(rows_in(torch.float64))


DOUBLED: list[int] = []


def doubled(weight: Tensor) -> Tensor:
    DOUBLED.append(1)
    return weight + weight


class Deriving(nn.Module):
    """Compute with a tensor that is kept as long as the weight is the same, and perhaps write to a buffer."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("calls", torch.zeros(()))
        self.double, self.counts = derived(doubled, 1), counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return x @ self.double(self.weight)


def test_what_a_rewritten_model_derives_from_its_weights_is_not_made_again() -> None:
    model, x = Deriving().eval(), torch.randn(2, 8)
    with torch.no_grad():
        model(x)
    known = Original(Deriving().eval(), [Inputs(x)])
    DOUBLED.clear()
    assert known.verdict(model).ok
    assert not DOUBLED


@pytest.mark.parametrize("original_counts", [True, False])
def test_buffers_that_a_comparison_writes_to_are_put_back(original_counts: bool) -> None:
    model, x = Deriving(counts=True).eval(), torch.randn(2, 8)
    known = Original(Deriving(counts=original_counts).eval(), [Inputs(x)])
    assert known.verdict(model).ok is original_counts
    assert model.calls == 0
    assert known.model.calls == 0
