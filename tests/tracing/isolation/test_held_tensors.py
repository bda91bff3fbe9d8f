"""Tensors that a module keeps in its own lists and dictionaries (a cache by device, say): looked up at every call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.tracing.program import capture_program

X = torch.randn(3, 4)


class Biased(nn.Module):
    """Attention biases of vision models: worked out once for each device in evaluation, and forgotten in training."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.randn(2, 4))
        self.register_buffer("places", torch.tensor([0, 3, 1, 2]))
        self.cache: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def train(self, mode: bool = True) -> Biased:
        super().train(mode)
        if mode and self.cache:
            self.cache = {}
        return self

    def bias(self, device: torch.device) -> torch.Tensor:
        if self.training:
            return self.biases[:, self.places]
        key = str(device)
        if key not in self.cache:
            self.cache[key] = self.biases[:, self.places]
        return self.cache[key]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.bias(x.device).sum(0)


def _filled() -> Biased:
    model = Biased().eval()
    with torch.no_grad():
        model(X)
    return model


class Doubling(dict[str, torch.Tensor]):
    """A dictionary that gives more than it holds."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return 2 * super().__getitem__(key)


def _fill(model: Any) -> None:
    model.cache["cpu"] = torch.full((2, 4), 5.0)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "cleared": lambda model: model.cache.clear(),
    "another": _fill,
    "replaced": lambda model: setattr(model, "cache", {"cpu": torch.ones(2, 4)}),
    "emptied": lambda model: setattr(model, "cache", {}),
    "another kind": lambda model: setattr(model, "cache", Doubling(cpu=torch.ones(2, 4))),
    "of another device": lambda model: (model.cache.clear(), model.cache.update(cuda=torch.ones(2, 4))),
    "weights": lambda model: model.biases.data.add_(1),
    "in place": lambda model: model.cache["cpu"].mul_(3),
    "trained": lambda model: (model.train(), model.biases.data.mul_(2), model.eval()),
    "no gradients": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("optimized", [False, True], ids=["captured", "optimized"])
def test_a_cache_of_the_module_is_never_remembered(change: str, optimized: bool):
    model = _filled()
    if optimized:
        passes = ["eliminate_common_subexpressions", "fold_constants", "eliminate_dead_code"]
        fast: Any = fxopt.optimize(model, passes, example_inputs=(X,), measure=False)
    else:
        program = capture_program(copy.deepcopy(model), (X,))
        assert program.opaque == {}
        fast = program.model
    for each in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fast):
        mine = copy.deepcopy(model)
        for _ in range(3):
            torch.testing.assert_close(each(X), mine(X))
            CHANGES[change](each)
            CHANGES[change](mine)
            x = torch.randn(5, 4)
            torch.testing.assert_close(each(x), mine(x))
            torch.testing.assert_close(each.cache, mine.cache)
    if optimized:
        torch.testing.assert_close(fxopt.restore(fast)(X), mine(X))


def test_a_cache_that_is_made_anew_costs_no_graph(misses: Callable[[Any], int]):
    model = _filled()
    program = capture_program(copy.deepcopy(model), (X,))
    fast: Any = program.model
    graphs = list(program.graphs)
    fast.cache = {"cpu": torch.ones(2, 4)}
    torch.testing.assert_close(fast(X), X * 2 + 2)
    assert misses(program) == 0
    fast.train()
    fast.eval()
    for _ in range(3):
        torch.testing.assert_close(fast(X), model(X))
    assert misses(program) == 1, "the forward fills the cache"
    assert list(program.graphs) == graphs


def test_a_cache_that_is_gone_is_missed():
    fast: Any = capture_program(_filled(), (X,)).model
    del fast.cache
    with pytest.raises(AttributeError, match="cache"):
        fast(X)


def test_an_empty_cache_stays_with_the_forward():
    program = capture_program(Biased().eval(), (X,))
    assert "changes self.cache" in program.opaque[""].reason
    assert program.model.cache == {}
    _ = program.model(X)
    assert type(program.model.cache["cpu"]) is torch.Tensor


class Holds(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(4))
        self.held: Any = [torch.randn(4), {"a": torch.randn(4), 3: torch.randn(4)}, (torch.randn(4),)]
        self.known: Any = [self.weight, {"count": self.count}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.kind)(x)

    def nested(self, x):
        return x * self.held[0] + self.held[1]["a"] + self.held[1][3] + self.held[2][0]

    def loop(self, x):
        for name in ("a", 3):
            x = x + self.held[1][name]
        return x

    def shared(self, x):
        return x * self.known[0] + self.known[1]["count"]

    def in_place(self, x):
        self.known[1]["count"].add_(x[0])
        return x + self.count


KINDS = ["nested", "loop", "shared", "in_place"]
MORE: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "item": lambda model: model.held.__setitem__(0, torch.ones(4)),
    "inner": lambda model: model.held[1].update(a=torch.ones(4)),
    "grown": lambda model: model.held.append(torch.ones(4)),
    "weight": lambda model: setattr(model, "weight", nn.Parameter(torch.ones(4))),
    "held weight": lambda model: model.known.__setitem__(0, torch.ones(4)),
    "held buffer": lambda model: model.known[1].update(count=torch.ones(4)),
    "buffer": lambda model: model.register_buffer("count", torch.ones(4)),
    "double": lambda model: model.double().float(),
    "another list": lambda model: setattr(model, "known", [torch.ones(4), {"count": torch.ones(4)}]),
}


@pytest.mark.parametrize("change", MORE)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_put_in_the_place_of_a_tensor_is_used(kind: str, change: str):
    model = Holds(kind)
    program = capture_program(copy.deepcopy(model), (X,))
    assert program.opaque == {}
    fast: Any = program.model
    for _ in range(2):
        torch.testing.assert_close(fast(X), model(X))
        MORE[change](fast)
        MORE[change](model)
        torch.testing.assert_close(fast(X), model(X))
        torch.testing.assert_close(fast.count, model.count)
        torch.testing.assert_close(fast.held, model.held)


def test_what_only_a_closure_or_another_file_holds_stays_opaque():
    outside = torch.randn(4)
    kept = [torch.randn(4)]

    class Closes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + outside

    class Reaches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + kept[0]

    for model in (Closes(), Reaches()):
        assert "not a parameter, buffer or attribute" in capture_program(model, (X,)).opaque[""].reason
