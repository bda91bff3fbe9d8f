"""A region by itself: what the engine computes, and when the region's own operations run."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxopt.errors import EngineWarning
from fxopt.layers.delegated import DelegatedRegion, Engine, OtherSizes
from fxopt.layers.delegated import region as region_module
from fxopt.layers.quantized import Range, StaticLinear

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Fake(Engine):
    """Computes by torch what it was given, notes what it does, and takes as long as it is told."""

    name = "fake"
    packages = ("torch",)
    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, clock: Clock) -> None:
        self.clock, self.compiled, self.calls = clock, 0, 0
        self.off, self.error, self.rows, self.reads_memory = 0.0, "", 0, False

    def compile(self, function: Any, example: Sequence[Tensor], dtype: torch.dtype, threads: int) -> Any:
        self.compiled += 1
        self.clock.now += 10.0
        if not self.reads_memory:
            function = copy.deepcopy(function)  # the numbers of now

        def session(inputs: Sequence[Tensor]) -> list[Tensor]:
            self.calls += 1
            if self.error:
                raise RuntimeError(self.error)
            if self.rows not in (0, len(inputs[0])):
                raise OtherSizes("it is compiled for other rows")
            with torch.no_grad():
                return [each.clone() + self.off for each in function(*inputs)]

        return session


class Clock:
    """A clock that goes on by one second at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    clock = Clock()
    fake = Fake(clock)
    monkeypatch.setattr(region_module, "engine_named", lambda name: fake)
    monkeypatch.setattr(region_module.time, "perf_counter", clock)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield fake


def made() -> DelegatedRegion:
    graph = fx.Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    y = graph.call_function(F.linear, (x, weight, bias))
    graph.output((graph.call_function(torch.relu, (y,)), y))
    return DelegatedRegion("fake", graph, 1)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 5)


def call(region: DelegatedRegion, of: nn.Linear, x: Tensor = X) -> None:
    """Call a region with the tensors of a layer, and compare."""
    with torch.no_grad():
        found, y = region(x, of.weight, of.bias), F.linear(x, of.weight, of.bias)
    torch.testing.assert_close(tuple(found), (y.relu(), y))


def calls_of_engine(engine: Fake, run: Callable[[], object]) -> int:
    before = engine.calls
    run()
    return engine.calls - before


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_a_region_may_be_prepared_with_what_lies_in_any_order(name: str) -> None:
    pytest.importorskip(name)
    graph = fx.Graph()
    given, *tensors = map(graph.placeholder, ("x", "v", "w"))
    inner = graph.call_function(F.linear, (given, tensors[0]))
    graph.output((graph.call_function(F.linear, (inner, tensors[1])),))
    region, x, v, w = DelegatedRegion(name, graph, 1), torch.randn(8, 4).t(), torch.randn(6, 8), torch.randn(3, 6)
    region.prepare([x], [v, w])
    with torch.no_grad():
        torch.testing.assert_close(region(x, v, w)[0], x @ v.t() @ w.t(), atol=1e-5, rtol=1e-4)


def test_new_shapes_are_compared_once(engine: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    region, of, own = made(), layer(), list[int]()
    original = region._own
    monkeypatch.setattr(region, "_own", lambda *operands: own.append(len(operands[0])) or original(*operands))
    for rows in (3, 3, 7, 7, 3):
        call(region, of, torch.randn(rows, 4))
    assert (own, engine.calls, engine.compiled) == (
        [3, 7],
        6,
        1,
    )  # the first call twice: do its results lie in memory of their own?


def test_sizes_that_a_session_does_not_take_are_left_to_the_own_operations(engine: Fake) -> None:
    region, of = made(), layer()
    engine.rows = 3
    other = torch.randn(7, 4)
    assert calls_of_engine(engine, lambda: call(region, of, other)) == 1  # asked once
    assert calls_of_engine(engine, lambda: call(region, of, other)) == 0
    assert calls_of_engine(engine, lambda: call(region, of)) == 2  # do its results lie in memory of their own?
    assert calls_of_engine(engine, lambda: call(region, of)) == 1
    assert not region.left


def test_results_have_memory_of_their_own(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    with torch.no_grad():
        first, second = region(X, of.weight, of.bias), region(X, of.weight, of.bias)
    expected = second[0].clone()
    first[0].fill_(7)
    assert torch.equal(second[0], expected)
    call(region, of, X.t().contiguous().t())  # inputs in another order


def test_a_wrong_session_is_not_used_and_warned_about_once(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    engine.off = 1.0
    with pytest.warns(EngineWarning, match=r"something else for inputs of shape \(7, 4\)"):
        call(region, of, torch.randn(7, 4))
    assert calls_of_engine(engine, lambda: call(region, of, torch.randn(7, 4))) == 0
    engine.off = 0.0
    assert calls_of_engine(engine, lambda: call(region, of)) == 1  # the other shape is still right


def test_results_that_tell_nothing_are_compared_again(engine: Fake) -> None:
    region, of = made(), layer()
    nn.init.constant_(of.weight, 2.0)
    huge = torch.full((2, 4), 3e38)
    for _ in range(2):
        with torch.no_grad():
            found = region(huge, of.weight, of.bias)
        assert torch.equal(found[1], F.linear(huge, of.weight, of.bias))
    assert not region._converted


# -- where the region's own operations run ---------------------------------------------------------------------------


def test_what_is_no_call_for_an_engine(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    cases: dict[str, Callable[[], object]] = {
        "gradients": lambda: region(X, of.weight, of.bias),
        "float64": lambda: call(region, copy.deepcopy(of).double(), X.double()),
        "nothing": lambda: call(region, of, torch.empty(0, 4)),
        "autocast": lambda: torch.autocast("cpu")(lambda: region(X, of.weight, of.bias))(),
    }
    for name, run in cases.items():
        assert calls_of_engine(engine, run) == 0, name
    with torch.no_grad():
        found = region(torch.full((1, 4), float("nan")), of.weight, of.bias)
    assert found[0].isnan().all()


def test_an_engine_that_raises_is_given_up(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    engine.error = "out of memory"
    with pytest.warns(EngineWarning, match="cannot compute a region, and the model's own operations do: .*memory"):
        call(region, of)
    assert calls_of_engine(engine, lambda: call(region, of)) == 0
    engine.error = ""
    region.forget_all()
    call(region, of)
    assert calls_of_engine(engine, lambda: call(region, of)) == 1


# -- parameters that change ------------------------------------------------------------------------------------------


def _written(of: nn.Linear) -> None:
    with torch.no_grad():
        of.weight.mul_(2)


def _replaced(of: nn.Linear) -> None:
    of.weight = nn.Parameter(torch.ones(5, 4))


def _by_data(of: nn.Linear) -> None:
    of.weight.data = torch.ones(5, 4)


def _into_data(of: nn.Linear) -> None:
    of.bias.data.add_(1)


@pytest.mark.parametrize("change", [_written, _by_data, _into_data])
def test_changed_numbers_are_converted_when_that_pays(change: Callable[[nn.Linear], None], engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    call(region, of)
    change(of)
    for _ in range(11):  # by this clock a conversion takes 11 seconds, and the region by itself 1 second
        assert engine.compiled == 1
        assert calls_of_engine(engine, lambda: call(region, of)) == 0
    call(region, of)
    assert engine.compiled == 2
    assert calls_of_engine(engine, lambda: call(region, of)) == 1


def test_equal_numbers_are_not_converted_anew_after_eval(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    for _ in range(3):
        region.forget_all()  # as `eval()` does
        assert calls_of_engine(engine, lambda: call(region, of)) == 1
    assert engine.compiled == 1
    with torch.no_grad():
        of.weight.data.view(-1)[-1] += 1  # between the places that are sampled
    region.forget_all()
    call(region, of)
    assert engine.compiled == 2
    _written(of)
    region.forget_all()
    call(region, of)
    assert engine.compiled == 2  # it has to pay first, as without `eval()`


def test_numbers_that_change_at_each_call_are_never_converted(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    for _ in range(30):
        _written(of)
        call(region, of)
    assert engine.compiled == 1


def test_another_parameter_is_another_conversion(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    _replaced(of)
    call(region, of)
    assert calls_of_engine(engine, lambda: call(region, of)) == 1


def test_a_copy_with_equal_numbers_shares_the_conversion(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    other = copy.deepcopy(of)
    for _ in range(2):
        call(region, other)
    assert engine.compiled == 1
    _written(other)
    for _ in range(20):
        call(region, other)
        call(region, of)
    assert engine.compiled == 2


def test_parameters_that_an_engine_cannot_take(engine: Fake) -> None:
    of = layer()
    with torch.no_grad():
        of.weight[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="a parameter holds NaN or infinities"):
        made().prepare([X], [of.weight, of.bias])
    with torch.inference_mode():
        weight = torch.ones(5, 4)
    with pytest.raises(RuntimeError, match="a parameter was made in inference_mode"):
        made().prepare([X], [weight, of.bias.detach()])


# -- threads, copies -------------------------------------------------------------------------------------------------


def test_threads(engine: Fake) -> None:
    region, of = made(), layer()
    failed: list[BaseException] = []

    def run(rows: int) -> None:
        try:
            for _ in range(20):
                call(region, of, torch.randn(rows, 4))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rows,)) for rows in (1, 2, 3, 4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed


def test_what_is_written_while_results_are_compared_is_no_reason_to_do_without(
    engine: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, of = made(), layer()
    own, values = region._own, iter([2.0])

    def written(*operands: Any) -> Any:
        for value in values:  # once, as by another thread
            nn.init.constant_(of.weight, value)
        return own(*operands)

    monkeypatch.setattr(region, "_own", written)
    for _ in range(12):
        call(region, of)
    assert calls_of_engine(engine, lambda: call(region, of))


@pytest.mark.parametrize(
    ("copied", "compiled"), [(copy.deepcopy, 1), (lambda region: pickle.loads(pickle.dumps(region)), 2)]
)
def test_copies_take_what_was_converted_of_the_same_numbers(
    copied: Callable[[DelegatedRegion], DelegatedRegion], compiled: int, engine: Fake
) -> None:
    region, of = made(), layer()
    call(region, of)
    other, another = copied(region), copy.deepcopy(of)
    assert (other.engine, other.inputs, other.dtype) == (region.engine, region.inputs, region.dtype)
    call(other, another)
    assert engine.compiled == compiled
    nn.init.constant_(another.weight, 2.0)  # each goes on by itself
    other.refresh([another.weight, another.bias])
    call(other, another)
    call(region, of)
    assert engine.compiled == compiled + 1


def test_a_copy_has_its_own_numbers_where_the_engine_reads_the_memory_of_the_first(engine: Fake) -> None:
    region, of = made(), layer()
    engine.reads_memory = True
    call(region, of)
    other, another = copy.deepcopy(region), copy.deepcopy(of)
    assert calls_of_engine(engine, lambda: call(other, another)) and engine.compiled == 1
    nn.init.constant_(of.weight, 2.0)
    for _ in range(12):
        call(other, another)
    assert engine.compiled == 2  # in the time of a conversion its own operations ran
    assert calls_of_engine(engine, lambda: call(other, another)) == 1


def test_refresh_converts_at_once_and_copies_that_are_gone_are_let_go(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    nn.init.constant_(of.weight, 2.0)
    region.refresh([of.weight, of.bias])
    assert engine.compiled == 2
    region.refresh([of.weight, of.bias])
    assert engine.compiled == 2
    other = copy.deepcopy(of)
    call(region, other)
    assert (engine.compiled, len(region._converted)) == (2, 2)
    del other
    gc.collect()
    region.forget_gone()
    assert len(region._converted) == 1


def test_a_forked_process_hands_nothing_to_an_engine(engine: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    region, of = made(), layer()
    call(region, of)
    monkeypatch.setattr("fxopt.layers.delegated.conversion._users", {-1})
    assert calls_of_engine(engine, lambda: call(region, of)) == 0
    nn.init.constant_(of.weight, 2.0)
    region.refresh([of.weight, of.bias])
    call(region, of)
    with pytest.raises(RuntimeError, match="forked process"):
        region.prepare([X], [of.weight, of.bias])
    assert engine.compiled == 1


class _Wrapped(Tensor):
    """A parameter in a class of its own, as those of quantized weights."""


def test_parameters_of_other_kinds_are_computed_with_as_they_are(engine: Fake) -> None:
    region, of = made(), layer()
    call(region, of)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for weight in (of.weight.detach().to_sparse_csr(), of.weight.detach().as_subclass(_Wrapped)):
            for _ in range(2):
                found, expected = region(X, weight, of.bias), F.linear(X, weight, of.bias)
                torch.testing.assert_close(found[1], expected)


def test_an_engine_that_is_too_far_off_is_not_prepared(engine: Fake) -> None:
    region, of = made(), layer()
    engine.off = 0.5
    with pytest.raises(RuntimeError, match="something else"):
        region.prepare([X], [of.weight, of.bias])


def test_layers_in_8_bits_are_refused_where_sums_overflow(engine: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = StaticLinear(torch.ones(4, 4, dtype=torch.int8), torch.ones(4), None, torch.float32, Range(0.1, 0))
    graph = fx.Graph()
    graph.output((graph.call_function(linear.computation, tuple(graph.placeholder(name) for name in "xwsb")),))
    values = torch.full((4, 4), 64, dtype=torch.int8)
    region, tensors = DelegatedRegion("fake", graph, 1), [values, torch.ones(4), torch.zeros(4)]
    monkeypatch.setattr("fxopt.compat.quantized.static_format", lambda: "int7")
    with pytest.raises(RuntimeError, match="a layer of 8 bits: its weight has 8 bits, whose sums overflow"):
        region.prepare([X.abs()], tensors)
    assert not engine.compiled
