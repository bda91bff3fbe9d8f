"""delegate: models, values, changes and engines that a careless hand-over would get wrong."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.errors import EngineWarning, UsageError
from fxopt.runtime.graphs import specializations_of
from fxopt.transforms.delegate.delegate import Engine, engine_named
from fxopt.transforms.delegate.find import DelegatedRegion

ENGINES = [each for each in ("openvino", "onnxruntime") if importlib.util.find_spec(each)]
every_engine = pytest.mark.parametrize("engine", ENGINES)
pytestmark = pytest.mark.filterwarnings("ignore::fxopt.errors.GuardWarning")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def regions_of(model: nn.Module) -> list[DelegatedRegion]:
    return [
        node.target
        for module in model.modules()
        for specialization in specializations_of(module)
        for node in specialization.graph.nodes
        if isinstance(node.target, DelegatedRegion)
    ]


def delegated(model: nn.Module, *inputs: Tensor, engine: str = "openvino") -> nn.Module:
    fast = fxopt.optimize(model, f"delegate{{engine={engine}}}", example_inputs=inputs, measure=False)
    assert regions_of(fast)
    return fast


def tensors_of(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def assert_same(plain: nn.Module, fast: nn.Module, *inputs: Tensor) -> None:
    """Compare results and what became of the inputs, twice: the first call with new shapes is a comparison itself."""
    for _ in range(2):
        mine, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
        with torch.no_grad():
            pairs = zip(tensors_of(fast(*mine)), tensors_of(plain(*theirs)), strict=True)
        for found, expected in (*pairs, *zip(mine, theirs, strict=True)):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def are_computed_by_engine(model: nn.Module) -> bool:
    kept = [held.by_shapes for region in regions_of(model) for held in region._converted.values()]
    return bool(kept) and any(session is not None for shapes in kept for session in shapes.values())


class Two(nn.Module):
    """Two linear layers, enough for a region."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def body(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def two(body: Callable[..., Any]) -> nn.Module:
    """Return a model of two linear layers of which `body` is the forward."""
    kind = type("Model", (Two,), {"forward": body})
    return kind().eval()


# -- writes, views, indices ----------------------------------------------------------------------------------------


def writes_into_view_of_input(self: Two, x: Tensor) -> Tensor:
    view = x.view(-1, 8)
    view.relu_()
    return self.body(view)


def writes_columns_of_input(self: Two, x: Tensor) -> Tensor:
    x[:, 0] = 0
    return self.body(x)


@every_engine
@pytest.mark.parametrize("body", [writes_into_view_of_input, writes_columns_of_input])
def test_writes_into_inputs_are_made(body: Any, engine: str) -> None:
    model = two(body)
    fast = delegated(model, random(4, 8), engine=engine)
    assert_same(model, fast, random(4, 8, seed=1))
    assert_same(model, fast, random(3, 8, seed=1))
    assert are_computed_by_engine(fast)


class WrittenBetween(Two):
    """What stays writes into a result of the region, which is read again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        dropped = F.dropout(x, 1.0, True)  # all of it, and nobody knows
        x[:, 0] = dropped[:, 1] + 1
        return self.body(x)


class Counts(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.body(x) * self.count


@pytest.mark.parametrize("kind", [WrittenBetween, Counts])
def test_what_reads_behind_a_write_comes_behind_it(kind: type[nn.Module]) -> None:
    model = kind().eval()
    plain = copy.deepcopy(model)
    assert_same(plain, delegated(model, random(4, 8)), random(4, 8, seed=1))


def test_views_of_inputs_and_parameters_stay_views() -> None:
    def body(self: Two, x: Tensor) -> Any:
        y = self.body(x)
        return y, x, x.view(-1), y, self.first.weight.t(), x[0]

    model, x = two(body), random(4, 8)
    fast = delegated(model, x)
    assert_same(model, fast, x)
    with torch.no_grad():
        found = fast(x)
    assert [found[i].data_ptr() for i in (1, 2, 5)] == [x.data_ptr()] * 3
    assert found[4].data_ptr() == fast.first.weight.data_ptr()
    assert found[0] is found[3]


def looks_up(self: Two, numbers: Tensor) -> Tensor:
    return self.body(F.embedding(numbers, self.first.weight))


def encodes(self: Two, numbers: Tensor) -> Tensor:
    return self.body(F.one_hot(numbers, 8).float())


def gathers(self: Two, numbers: Tensor) -> Tensor:
    return self.body(numbers.float()[:, None] * self.first.bias).gather(1, numbers[:, None])


def selects(self: Two, numbers: Tensor) -> Tensor:
    return self.body(self.first.weight)[numbers]


@every_engine
@pytest.mark.parametrize("body", [looks_up, encodes, gathers, selects])
def test_indices_out_of_range_raise(body: Any, engine: str) -> None:
    model, numbers = two(body), torch.tensor([1, 2, 3])
    fast = delegated(model, numbers, engine=engine)
    assert_same(model, fast, numbers)
    with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
        fast(torch.tensor([1, 2, 8]))
    assert_same(model, fast, numbers)


def test_a_mask_may_choose_other_numbers_of_rows() -> None:
    model = type("Model", (Two,), {"forward": lambda self, x, mask: self.body(x)[mask]})().eval()
    mask = torch.tensor([True, False, True, True])
    fast = delegated(model, random(4, 8), mask)
    for chosen in (mask, ~mask, mask & False):
        assert_same(model, fast, random(4, 8, seed=1), chosen)


@every_engine
@pytest.mark.parametrize("step", [7, 0.3])
def test_quotients_below_zero_are_rounded_down(step: float, engine: str) -> None:
    model = two(lambda self, x: (self.body(x) * 100).to(torch.int32 if step == 7 else x.dtype) // step)
    fast = delegated(model, random(4, 8), engine=engine)
    with torch.no_grad():
        assert int((fast(random(64, 8)) - model(random(64, 8))).abs().max()) <= 1  # at the border


def test_arguments_that_are_not_given_stay_so_after_a_check_that_fails() -> None:
    class Places(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.arange(32.0)[:, None].repeat(1, 8))
            self.inner = Inner()

        def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
            if places is None:
                places = self.places[: x.shape[0]]
            return self.inner(self.body(x) + places)

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 1 else x * 3

    model = Places().eval()
    fast = delegated(model, random(4, 8))
    assert_same(model, fast, random(1, 8))


# -- values ----------------------------------------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 1e-40])
def test_unusual_numbers_give_what_torch_gives(value: float, engine: str) -> None:
    model = two(lambda self, x: torch.softmax(F.layer_norm(self.body(x), (8,)), -1).clamp(0.01, 0.9))
    fast = delegated(model, random(4, 8), engine=engine)
    x = random(4, 8)
    x[1, 2] = value
    assert_same(model, fast, x)
    assert_same(model, fast, torch.full_like(x, value))


@every_engine
@pytest.mark.parametrize("hidden", [False, torch.finfo(torch.float32).min])
def test_rows_of_which_everything_is_masked(hidden: Any, engine: str) -> None:
    class Attention(Two):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.second(F.scaled_dot_product_attention(self.first(x), x, x, attn_mask=mask))

    model, x = Attention().eval(), random(2, 5, 8)
    mask = torch.ones(2, 5, 5, dtype=torch.bool) if hidden is False else torch.zeros(2, 5, 5)
    fast = delegated(model, x, mask, engine=engine)
    mask[0, 1] = hidden
    assert_same(model, fast, x, mask)


def test_inputs_that_require_gradients_without_asking_for_them() -> None:
    model, x = two(Two.forward), random(4, 8)
    fast = delegated(model, x)
    assert_same(model, fast, x.requires_grad_())
    assert are_computed_by_engine(fast)
    assert not regions_of(fast)[0].left


def test_inputs_of_another_type_are_computed_without_the_engine() -> None:
    model = type("Model", (Two,), {"forward": lambda self, x, scale: self.body(x) * scale})().eval()
    fast = delegated(model, random(4, 8), torch.tensor(2.0))
    assert_same(model, fast, random(4, 8), torch.tensor(3))
    assert not regions_of(fast)[0].left


def test_a_model_in_float64_computes_in_float64() -> None:
    model = two(lambda self, numbers: self.body(numbers.to(self.first.weight.dtype)[:, None] * self.first.bias))
    numbers = torch.tensor([1, 2, 3])
    fast = delegated(model, numbers)
    with torch.no_grad():
        torch.testing.assert_close(fast.double()(numbers), model.double()(numbers), rtol=1e-12, atol=1e-12)
    assert_same(model.float(), fast.float(), numbers)
    assert are_computed_by_engine(fast)


def test_a_parameter_with_nan_is_taken_once_it_is_mended() -> None:
    model, x = two(Two.forward), random(4, 8)
    fast = delegated(model, x)
    fast.load_state_dict(model.state_dict())
    for value in (float("nan"), 1.0):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", EngineWarning)
            for each in (model, fast):
                each.first.weight[0, 0] = value
            for _ in range(50):
                fast(x)
        assert_same(model, fast, x)
    region = regions_of(fast)[0]
    assert not region.left
    assert region._converted


# -- life ------------------------------------------------------------------------------------------------------------


@every_engine
def test_a_forked_process_computes(engine: str) -> None:
    model, x = two(Two.forward), random(4, 8)
    fast = delegated(model, x, engine=engine)
    assert_same(model, fast, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the process has threads
        child = os.fork()
    if not child:
        with torch.no_grad():
            os._exit(0 if torch.allclose(fast(x), model(x), atol=1e-4) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_many_lengths_and_copies_are_not_remembered() -> None:
    model = two(Two.forward)
    fast = delegated(model, random(4, 8))
    with torch.no_grad():
        for length in range(1, 1100):
            fast(random(length, 8))
            fast(random(length, 8))
        assert max(len(held.by_shapes) for held in regions_of(fast)[0]._converted.values()) <= 1000
        for _ in range(20):
            fast.first.weight = nn.Parameter(fast.first.weight + 0.1)
            fast(random(4, 8))
    assert len(regions_of(fast)[0]._waiting) <= 8


@every_engine
def test_eight_threads_share_a_model(engine: str) -> None:
    model = two(Two.forward)
    fast = delegated(model, random(4, 8), engine=engine)
    inputs = [random(rows, 8, seed=rows) for rows in range(1, 9)]
    with ThreadPoolExecutor(8) as pool, torch.no_grad():
        found = [list(pool.map(torch.no_grad()(fast), inputs)) for _ in range(20)]
        expected = list(map(model, inputs))
    for results in found:
        torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-4)
    assert are_computed_by_engine(fast)


@every_engine
def test_the_number_of_threads_is_that_of_torch_at_each_call(engine: str) -> None:
    model, before = two(Two.forward), torch.get_num_threads()
    fast = delegated(model, random(4, 8), engine=engine)
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            assert_same(model, fast, random(4, 8))
    finally:
        torch.set_num_threads(before)
    assert any({1, 2} <= set(held.by_threads) for held in regions_of(fast)[0]._converted.values())


def test_ctrl_c_is_heard_though_an_engine_makes_an_error_of_its_own_of_it() -> None:
    model, x = two(Two.forward), random(4, 8)
    engine = wayward(lambda results, calls: results)
    handler = signal.getsignal(signal.SIGINT)

    def deaf(*args: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise RuntimeError(f"conversion failed: {error}") from None

    with table_with(engine):
        engine.compile = deaf  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            fxopt.optimize(model, "delegate{engine=wayward}", example_inputs=x, measure=False)
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupted_conversion_leaves_everything_as_it_was() -> None:
    model, x = two(Two.forward), random(4, 8)
    engine = wayward(lambda results, calls: results)
    compile_ = engine.compile

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with table_with(engine):
        engine.compile = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            fxopt.optimize(model, "delegate{engine=wayward}", example_inputs=x, measure=False, inplace=True)
        assert not regions_of(model)
        engine.compile = compile_  # type: ignore[method-assign]
        fast = delegated(model, x, engine="wayward")
        with torch.no_grad():
            fast.first.weight.mul_(2)
        engine.compile = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            fxopt.refresh(fast)
        engine.compile = compile_  # type: ignore[method-assign]
        plain = copy.deepcopy(model)
        with torch.no_grad():
            plain.first.weight.mul_(2)
        assert_same(plain, fast, x)
        fxopt.refresh(fast)
        assert_same(plain, fast, x)
        assert are_computed_by_engine(fast)


# -- engines that misbehave ------------------------------------------------------------------------------------------


class Wayward(Engine):
    """Compute by the traced function, then do wrong."""

    name: ClassVar[str] = "wayward"
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    wrong: Callable[[list[Tensor], int], Any] = staticmethod(lambda results, calls: results)

    def compile(self, function: Any, example: Sequence[Tensor], dtype: torch.dtype, threads: int) -> Any:
        calls = 0

        def session(inputs: Sequence[Tensor]) -> Any:
            nonlocal calls
            calls += 1
            return self.wrong([each.clone() for each in function(*inputs)], calls)

        return session


@contextmanager
def table_with(engine: Engine) -> Iterator[None]:
    table: Any = sys.modules[engine_named.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_all", lambda: ((engine.name, engine),))
        yield


def wayward(wrong: Callable[[list[Tensor], int], Any]) -> Engine:
    engine = Wayward()
    engine.wrong = wrong
    return engine


def raises_from(number: int) -> Callable[[list[Tensor], int], Any]:
    def wrong(results: list[Tensor], calls: int) -> Any:
        if calls >= number:
            raise ValueError("out of order")
        return results

    return wrong


BUFFER = torch.zeros(1000)


def in_one_buffer(results: list[Tensor], calls: int) -> list[Tensor]:
    return [BUFFER[: each.numel()].view(each.shape).copy_(each) for each in results]


WRONGS = {
    "numbers": lambda results, calls: [each + 1 for each in results],
    "NaN": lambda results, calls: [torch.full_like(each, torch.nan) for each in results],
    "shape": lambda results, calls: [each[None] for each in results],
    "type": lambda results, calls: [each.double() for each in results],
    "count": lambda results, calls: results * 2,
    "nothing": lambda results, calls: None,
    "arrays": lambda results, calls: [each.numpy() for each in results],
    "one buffer": in_one_buffer,
    "raises at once": raises_from(1),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_an_engine_that_is_wrong_is_not_believed(wrong: str) -> None:
    """Neither in `optimize`, nor where it becomes wrong later, at inputs of another shape."""
    model, x = two(Two.forward), random(4, 8)
    engine = wayward(WRONGS[wrong])
    with table_with(engine), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fast = fxopt.optimize(model, "delegate{engine=wayward}", example_inputs=x, measure=False)
        assert_same(model, fast, x)
        assert any("wayward" in str(each.message) or "nothing" in str(each.message) for each in warned)
    engine.wrong = lambda results, calls: results
    with table_with(engine), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fast = delegated(model, x, engine="wayward")
        engine.wrong = WRONGS[wrong]
        for region in regions_of(fast):
            region._converted.clear()  # so that a new session is made
        with torch.no_grad():
            first = fast(random(5, 8))
            kept = first.clone()
            fast(random(5, 8, seed=1))
        torch.testing.assert_close(first, kept)
        assert_same(model, fast, random(5, 8))
        assert any("wayward" in str(each.message) for each in warned)


def test_an_engine_that_fails_later_is_given_up() -> None:
    model, x = two(Two.forward), random(4, 8)
    engine = wayward(lambda results, calls: results)
    with table_with(engine):
        fast = delegated(model, x, engine="wayward")
        assert_same(model, fast, x)
        engine.wrong = raises_from(0)
        with pytest.warns(EngineWarning, match="wayward cannot compute a region.*out of order"):
            assert_same(model, fast, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(model, fast, x)  # named once


def test_an_engine_that_gives_other_shapes_later_is_given_up() -> None:
    model, x = two(Two.forward), random(4, 8)
    engine = wayward(lambda results, calls: results)
    with table_with(engine):
        fast = delegated(model, x, engine="wayward")
        assert_same(model, fast, x)
        engine.wrong = WRONGS["arrays"]
        with pytest.warns(EngineWarning, match="wayward"):
            assert_same(model, fast, x)


def test_a_pickle_without_its_engine_computes_by_itself() -> None:
    model, x = two(Two.forward), random(4, 8)
    engine = wayward(lambda results, calls: results)
    with table_with(engine):
        region = pickle.loads(pickle.dumps(regions_of(delegated(model, x, engine="wayward"))[0]))
    assert isinstance(region, DelegatedRegion)
    with pytest.warns(EngineWarning, match="no engine 'wayward'"), torch.no_grad():
        found = region(x, *model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(found[0], model(x))


def test_an_engine_that_is_not_there_is_named() -> None:
    engine = wayward(lambda results, calls: results)
    engine.packages = ("not-to-be-found",)  # type: ignore[misc]
    with pytest.raises(UsageError, match="there is no engine 'wayword'"):
        fxopt.optimize(two(Two.forward), "delegate{engine=wayword}", example_inputs=random(4, 8), measure=False)
    with table_with(engine), pytest.warns(UserWarning, match="pip install not-to-be-found"):
        fxopt.optimize(two(Two.forward), "delegate{engine=wayward}", example_inputs=random(4, 8), measure=False)
