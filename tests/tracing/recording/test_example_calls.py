"""The calls of a real run, noted to be given as example inputs."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
from support.concurrency import run_in_threads
from torch import nn

import fxopt
from fxopt.errors import UsageError
from fxopt.runtime.graphs import misses_in

X = torch.randn(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any, mask: Any = None, *, flag: bool = False, times: int = 1) -> torch.Tensor:
        y = self.linear(x) if mask is None else self.linear(x) * mask
        return torch.relu(y) * times if flag else y * times


class Cache:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.length = 0


class Grows(nn.Module):
    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.kept = [torch.cat([*cache.kept, x])]
        cache.length += 1
        return cache.kept[0].sum(0)


def state(model: nn.Module) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in vars(model).items()}


def test_one_call_of_each_kind_is_kept_as_it_was() -> None:
    model, x = Net(), X.clone()
    with fxopt.recording(model) as calls:
        model(x)
        x.zero_()
        model(x)
        model(torch.randn(9, 6))
        model(X, torch.ones(6), flag=True)
        model(X[:1])
        model(X, times=3)
        model(X, mask=torch.ones(6))
        model(X.double().float())
    assert [type(call) for call in calls] == [fxopt.Inputs] * 5
    assert torch.equal(calls[0].args[0], X)
    assert calls[1].kwargs == {"flag": True}
    assert torch.equal(calls[1].args[1], torch.ones(6))
    assert calls[2].args[0].shape == (1, 6)
    assert calls[3].kwargs == {"times": 3}
    assert list(calls[4].kwargs) == ["mask"]


def test_the_kinds_of_tensors_and_containers() -> None:
    model = nn.Identity()
    values: list[Any] = [
        X, X.double(), X[0], X[:1], X[:0], (X, X), [X, X], {"a": X}, {"b": X}, {"a": X, "b": 1}, {"a": X, "b": 2},
        None, "text", "other", 1.5, True,
    ]  # fmt: skip
    with fxopt.recording(model, limit=100) as calls:
        for _ in range(2):
            for value in values:
                model(value)
    assert len(calls) == len(values)


def test_objects_are_copied_and_their_numbers_make_no_kinds() -> None:
    model, cache = Grows(), Cache()
    with fxopt.recording(model) as calls:
        for _ in range(5):
            model(X, cache)
    assert len(calls) == 2
    assert [call.args[1].length for call in calls] == [0, 1]
    assert calls[0].args[1].kept == []
    assert calls[1].args[1].kept[0].shape == (4, 6)


def test_a_tensor_given_twice_stays_one() -> None:
    model = Net()
    with fxopt.recording(model) as calls:
        model(X, X)
    assert calls[0].args[0] is calls[0].args[1]


def test_the_model_is_as_before_whatever_happens() -> None:
    model = Net()
    before = state(model)
    for x in (X, torch.randn(4, 7)):
        with contextlib.suppress(RuntimeError), fxopt.recording(model):
            model(x)
            raise RuntimeError
    assert state(model) == before


def test_nested_recordings_and_other_models() -> None:
    model, other = Net(), Net()
    with fxopt.recording(model) as outer:
        model(X)
        with fxopt.recording(model) as inner, fxopt.recording(other) as others:
            model(X, flag=True)
            other(X)
        model(X, times=2)
    assert [len(calls) for calls in (outer, inner, others)] == [3, 1, 1]


def test_threads() -> None:
    model = Net()

    def work(number: int) -> None:
        for times in range(1, 5):
            model(X, times=times, flag=number % 2 == 0)

    with fxopt.recording(model) as calls:
        run_in_threads(work, range(6))
    assert len(calls) == 8


def test_no_more_kinds_than_the_limit() -> None:
    model = Net()

    def run() -> list[fxopt.Inputs]:
        with fxopt.recording(model, limit=2) as calls:
            for times in range(5):
                model(X, times=times)
        return calls

    with pytest.warns(UserWarning, match="the Net was called in 5 ways; the first 2 were kept"):
        calls = run()
    assert [call.kwargs["times"] for call in calls] == [0, 1]


@pytest.mark.parametrize(("model", "limit"), [(torch.relu, 16), (Net(), 0)])
def test_what_cannot_be_recorded(model: Any, limit: int) -> None:
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module and a limit"), fxopt.recording(model, limit):
        pass


def test_copies_made_meanwhile_note_nothing() -> None:
    model = Net()
    with fxopt.recording(model) as calls:
        model(X)
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            clone(X, flag=True)
        fast = fxopt.optimize(model, example_inputs=calls, measure=False)
    assert len(calls) == 1
    assert torch.allclose(fast(X), model(X))


def test_inference_mode_gives_calls_that_train() -> None:
    model = Net()
    with torch.inference_mode(), fxopt.recording(model) as calls:
        model(X.clone())
    assert not calls[0].args[0].is_inference()


def test_recorded_calls_are_example_inputs() -> None:
    model = Net().eval()
    with fxopt.recording(model) as calls:
        model(X)
        model(X, flag=True)
        model(X, torch.ones(6))
    for fast in (fxopt.capture(model, calls).model, fxopt.optimize(model, example_inputs=calls, measure=False)):
        for args, kwargs in calls:
            assert torch.equal(fast(*args, **kwargs), model(*args, **kwargs))
        assert misses_in(fast.modules()) == []


def test_a_call_that_raised_is_not_kept():
    class Refuses(nn.Module):
        def forward(self, x):
            if x.dtype is torch.int64:
                raise ValueError("no whole numbers")
            return x + 1

    model = Refuses()
    with fxopt.recording(model) as calls:
        with pytest.raises(ValueError, match="no whole numbers"):
            model(torch.arange(3))
        model(torch.ones(3))
    assert [call.args[0].dtype for call in calls] == [torch.float32]
    assert not model._forward_hooks


class Pipeline(nn.Module):
    """A model with a method that calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Net(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.encoder(x, times=3)) + self.head(x)


def test_parts_that_are_called_around_the_model_are_noted_and_get_graphs() -> None:
    model = Pipeline()
    with fxopt.recording(model) as calls:
        model.generate(X)
    assert [(call.module, call.kwargs) for call in calls] == [("encoder", {"times": 3}), ("", {})]
    assert repr(calls[0]).startswith("Inputs.of_part('encoder', tensor(")
    fast: Any = fxopt.capture(model, calls).model
    assert torch.equal(fast.generate(X), model.generate(X))
    assert misses_in(fast.modules()) == []
    done: Any = fxopt.optimize(model, "training", example_inputs=calls, measure=False)
    assert torch.equal(done.generate(X), model.generate(X))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_part_that_raises_hides_no_later_call() -> None:
    model = Pipeline()
    with fxopt.recording(model) as calls:
        for call in (model.encoder, model):
            with pytest.raises(RuntimeError):
                call(torch.ones(2, 5))
        model.generate(X)
    assert [call.module for call in calls] == ["encoder", ""]


def test_calls_of_parts_alone_and_of_no_part_are_refused() -> None:
    part = fxopt.Inputs.of_part("encoder", X)
    with pytest.raises(UsageError, match="calls of parts of the model only; give a call of the model itself, too"):
        fxopt.optimize(Pipeline(), "training", example_inputs=part)
    with pytest.raises(UsageError, match="has a call of 'encodr', which is no part of the model"):
        fxopt.optimize(Pipeline(), "training", example_inputs=[(X,), fxopt.Inputs.of_part("encodr", X)])
    with pytest.raises(UsageError, match="example call 0 is one of 'encoder'; give calls of the model itself"):
        fxopt.export(Pipeline(), "never.pt2", part)


def test_a_model_with_fused_members_is_recorded_too() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(Net() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([head(x) for head in self.heads], -1)

    fast = fxopt.optimize(Heads(), "fuse_ensembles{lowering=bmm}", example_inputs=(X,), measure=False)
    with fxopt.recording(fast) as calls:
        fast(X)
    assert [call.module for call in calls] == [""]
