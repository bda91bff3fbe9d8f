"""Nothing that is remembered between calls keeps a user's models or classes alive, and nothing stays on the models."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from mixtures import IndexAdd
from support.shares import later
from torch import Tensor, distributed, fx, nn

import fxopt
from fxopt.known_passes import own_names
from fxopt.runtime.values import cached_by_class


def fresh_classes() -> tuple[type[nn.Module], type[nn.Module]]:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)).relu()

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(Head() for _ in range(3))
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(x) for head in self.heads], -1) * self.scale

    return Heads, Head


def classes_after_optimizing(**options: bool) -> list[weakref.ref[type[nn.Module]]]:
    whole, part = fresh_classes()
    fast = fxopt.optimize(whole().eval(), "inference", example_inputs=(torch.randn(2, 4),), **options)
    fast(torch.randn(3, 4))
    fxopt.restore(fast)
    return [weakref.ref(whole), weakref.ref(part)]


def collect() -> None:
    for _ in range(5):  # classes made of classes go one after the other
        gc.collect()


@pytest.mark.parametrize(("count", "spare"), [(8, True), (2, False), later((40, True))])
def test_optimize_keeps_no_class_alive(count: int, spare: bool) -> None:
    options = {"verify": False, "measure": False} if spare else {}
    known = [one for _ in range(count) for one in classes_after_optimizing(**options)]
    collect()
    assert not [one() for one in known if one() is not None]


def test_answers_about_classes_are_remembered_as_long_as_they_live() -> None:
    asked: list[str] = []

    def depth(cls: type) -> int:
        asked.append(cls.__name__)
        return len(cls.__mro__)

    cached = cached_by_class(depth)
    whole, part = fresh_classes()
    assert [cached(whole), cached(part), cached(whole)] == [3, 3, 3]
    assert asked == ["Heads", "Head"]
    del whole, part
    collect()
    whole, _part = fresh_classes()
    assert (cached(whole), asked) == (3, ["Heads", "Head", "Heads"])


class Vision(nn.Module):
    """A site for most passes; the backward of `relu`, `sigmoid` and `softmax` needs what they have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.query, self.key, self.mix = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 2.0
        x = self.mix(x + F.softmax(scores, -1) @ x).sigmoid()
        return torch.cat([head(x) for head in self.heads], -1)


class Graphs(nn.Module):
    def __init__(self, *, pooled: bool) -> None:
        super().__init__()
        geometric = pytest.importorskip("torch_geometric.nn")
        self.conv = geometric.GCNConv(4, 4)
        self.pool = geometric.TopKPooling(4) if pooled else None

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        x = self.conv(x, edges).relu()
        return x if self.pool is None else self.pool(x, edges, None, batch)[0]


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


TRAINED = {"autocast", "channels_last", "checkpoint", "ddp", "fsdp", "pipeline", "qat", "sync_batchnorm"}
OPTIONS = {
    "checkpoint": "{budget=0}", "prune": "{method=structured,amount=0.5}", "pipeline": "{stages=1}",
}  # fmt: skip
BEFORE = {"release": "fold_batchnorm,"}


def case(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name in ("graph_pooling", "sparse_message_passing"):
        edges = torch.randint(0, 6, (2, 20))
        return Graphs(pooled=name == "graph_pooling"), (torch.randn(6, 4), edges, torch.zeros(6, dtype=torch.int64))
    if name in ("fsdp", "pipeline", "tensor_parallel"):
        return Stages(), (torch.randn(4, 4),)
    if name == "fuse_experts":
        return IndexAdd(), (torch.randn(2, 8, 16),)
    return Vision(), (torch.randn(2, 1, 6, 6),)


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """Leave what was there before out of collections: 300,000 objects, which each would walk."""
    collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def nothing_stays() -> Iterator[None]:
    """Compare with what was there before, which the collector leaves out from then on."""
    collect()
    gc.freeze()
    yield
    for _ in range(20):  # threads of gloo let go of the last tensors in their own time
        collect()
        if not left_over():
            return
        time.sleep(0.1)
    assert left_over() == []


def left_over() -> list[type]:
    found = [each for each in gc.get_objects() if issubclass(type(each), (nn.Module, Tensor, fx.Graph))]
    # OpenVINO never lets go of plain numbers in the graphs that it has read.
    return [type(each) for each in found if not (isinstance(each, Tensor) and each.numel() == 1)]


def optimize_once(name: str) -> None:
    model, inputs = case(name)
    model.train(name in TRAINED)
    fxopt.optimize(model, BEFORE.get(name, "") + name + OPTIONS.get(name, ""), example_inputs=inputs, measure=False)
    assert not [each for each in (*model.parameters(), *model.buffers()) if weakref.getweakrefs(each)]


@pytest.mark.usefixtures("one_process", "frozen")
@pytest.mark.parametrize("name", own_names())
def test_nothing_of_a_model_outlives_it(name: str) -> None:
    optimize_once(name)  # what torch and its neighbours load once
    with nothing_stays():
        optimize_once(name)


def test_the_original_can_be_converted_whatever_was_made_of_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    fast = fxopt.optimize(model, "inference", example_inputs=(torch.randn(2, 3),), measure=False)
    torch.utils.swap_tensors(model[0].bias, nn.Parameter(torch.ones(3)))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert model.double()(torch.zeros(1, 3, dtype=torch.float64)).tolist() == [[1.0, 1.0, 1.0]]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    optimizer = fxopt.translate_optimizer(torch.optim.SGD(model.parameters(), 0.1), fast)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in fast.parameters()}
