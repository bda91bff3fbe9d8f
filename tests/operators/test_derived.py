"""Derived tensors: kept while their originals stay as they are, anew after any change, and never in the way."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.concurrency import run_in_threads
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt.operators import Derived, derived


@dataclass(frozen=True)
class Scale:
    """Scale a weight, [out, in], by the square root of another tensor, [out]; the calls are counted."""

    factor: float = 2.0

    def __call__(self, weight: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            CALLS.append(self.factor)
        scale = by.square() * self.factor
        return weight * scale[:, None], scale


CALLS: list[float] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


@pytest.fixture
def weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(3, 4), requires_grad=False)


@pytest.fixture
def by() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0])


def right(made: tuple[Tensor, Tensor], weight: Tensor, by: Tensor) -> bool:
    expected = Scale()(weight, by)
    CALLS.pop()
    return all(map(torch.equal, made, expected))


def test_the_same_tensors_come_again(weight: Tensor, by: Tensor) -> None:
    target = derived(Scale(), 2)
    first, again = target(weight, by), target(weight, by)
    assert first[0] is again[0] and first[1] is again[1] and len(CALLS) == 1
    assert right(first, weight, by)


@pytest.mark.parametrize(
    "change",
    [
        lambda w, b: w.add_(1),
        lambda w, b: b.mul_(2),
        lambda w, b: w[0].zero_(),
        lambda w, b: w.detach().fill_(3.0),
        lambda w, b: setattr(w, "data", torch.ones(3, 4)),
        lambda w, b: setattr(b, "data", b.data.double()),
        lambda w, b: (w.data.mul_(2), torch.autograd.graph.increment_version(w)),
    ],
)
def test_changes_are_seen(change: Callable[[Tensor, Tensor], object], weight: Tensor, by: Tensor) -> None:
    target = derived(Scale(), 2)
    target(weight, by)
    change(weight, by)
    assert right(target(weight, by), weight, by)
    assert len(CALLS) == 2


def test_memory_that_comes_to_lie_in_the_old_place_is_not_mistaken(weight: Tensor, by: Tensor) -> None:
    target = derived(Scale(), 2)
    for number in range(20):
        target(weight, by)
        weight.data = torch.full((3, 4), float(number))  # the memory of two calls ago is free again
        assert right(target(weight, by), weight, by)


def test_other_tensors_are_another_result(weight: Tensor, by: Tensor) -> None:
    target = derived(Scale(), 2)
    other = weight + 1
    for _ in range(3):
        assert right(target(weight, by), weight, by) and right(target(other, by), other, by)
    assert len(CALLS) == 2
    twin = by.clone()
    twin += 1
    assert right(target(weight, twin), weight, twin)


def test_nothing_is_kept_for_tensors_that_are_gone_or_moved(weight: Tensor, by: Tensor) -> None:
    target, others = derived(Scale(), 2), [torch.randn(3, 4) for _ in range(5)]
    for other in others:
        target(other, by)
    assert len(target._kept) == 5
    others[0].data = torch.randn(3, 4)
    del other, others[1:]
    gc.collect()
    target(weight, by)
    assert set(target._kept) == {id(weight)}


def test_a_tensor_in_the_place_of_one_that_is_gone_is_not_mistaken(by: Tensor) -> None:
    target = derived(Scale(), 2)
    for mode in (torch.no_grad, torch.inference_mode, FakeTensorMode):
        for _ in range(5):
            target(torch.randn(3, 4), by)  # the next one often has its identity
            with mode():
                other = torch.randn(3, 4)
                if mode is FakeTensorMode:
                    assert target(other, torch.randn(3))[0].shape == (3, 4)
                else:
                    assert right(target(other, by), other, by)
            del other


UNCOUNTED: dict[str, Callable[[Tensor], object]] = {
    "data": lambda w: w.data.copy_(w.data + 1),
    "numpy": lambda w: w.detach().numpy().__imul__(2),
    "lent": lambda w: SHARED[w.dtype].mul_(2),
    "row": lambda w: w.data[1].add_(1),
    "column": lambda w: w.data[:, 2].add_(1),
}
SHARED: dict[torch.dtype, Tensor] = {}


@pytest.mark.parametrize("layout", ["rows", "columns", "slice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("write", sorted(UNCOUNTED))
def test_writes_that_torch_does_not_count_are_seen(write: str, dtype: torch.dtype, layout: str) -> None:
    if write == "numpy" and dtype is torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    whole = torch.arange(1, 97).to(dtype).view(8, 12)
    shared = {
        "rows": whole[:, :].view(12, 8)[:8],
        "columns": whole.t()[:8, :8].contiguous().t(),
        "slice": whole[:, 2:10],
    }
    SHARED[dtype] = shared[layout]
    weight, by = torch.empty(0, dtype=dtype), torch.arange(1, 9).to(dtype)
    weight.data = SHARED[dtype]
    target = derived(Scale(), 2)
    target(weight, by)
    version = weight._version
    UNCOUNTED[write](weight)
    assert weight._version == version
    assert right(target(weight, by), weight, by)
    assert len(CALLS) == 2


def test_nan_is_the_same_as_itself(by: Tensor) -> None:
    target, weight = derived(Scale(), 2), torch.full((3, 4), float("nan"))
    assert target(weight, by)[0] is target(weight, by)[0]
    complex_weight = torch.randn(3, 4, dtype=torch.complex128)
    assert target(complex_weight, by)[0] is target(complex_weight, by)[0]
    for odd in (torch.randn(3, 0), torch.randn(3, 1).expand(3, 4), torch.randn(3, 4, dtype=torch.complex64).conj()):
        assert target(odd, by)[0] is target(odd, by)[0]


@pytest.mark.parametrize("change", [torch.t, lambda w: w[:2], lambda w: w[:, :2]], ids=["turned", "rows", "columns"])
def test_other_strides_and_sizes_in_the_same_memory_are_seen(change: Callable[[Tensor], Tensor]) -> None:
    target, weight = derived(Scale(), 2), torch.randn(3, 3)
    target(weight, torch.ones(3))
    weight.data = change(weight.data)
    by = torch.ones(len(weight))
    assert right(target(weight, by), weight, by)


def test_tensors_can_be_swapped(weight: nn.Parameter, by: Tensor) -> None:
    target, other = derived(Scale(), 2), nn.Parameter(torch.randn(3, 4))
    with torch.no_grad():
        target(weight, by)
        torch.utils.swap_tensors(weight, other)
        assert right(target(weight, by), weight, by) and right(target(other, by), other, by)


def test_memory_that_becomes_shared_is_read_in_its_new_place(weight: Tensor, by: Tensor) -> None:
    target = derived(Scale(), 2)
    for write in (weight.share_memory_, lambda: weight.data.mul_(2)):
        target(weight, by)
        write()
        assert right(target(weight, by), weight, by)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("then", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_do_not_poison_each_other(first: Callable, then: Callable, weight: nn.Parameter, by: Tensor) -> None:
    weight.requires_grad_(True)
    target, x = derived(Scale(), 2), torch.randn(2, 4, requires_grad=True)
    for mode in (first, then):
        with mode():
            made, _ = target(weight, by)
            assert torch.equal(made, (weight * by.square()[:, None] * 2))
    CALLS.clear()
    made, _ = target(weight, by)
    assert CALLS == []
    (x @ made.t()).sum().backward()
    torch.testing.assert_close(x.grad, made.detach().sum(0).expand(2, 4))
    torch.testing.assert_close(weight.grad, x.detach().sum(0) * by.square()[:, None] * 2)


def test_tensors_of_inference_mode_are_computed_anew(by: Tensor) -> None:
    target = derived(Scale(), 2)
    with torch.inference_mode():
        weight = torch.ones(3, 4)
        target(weight, by)
        weight.add_(1)
        assert right(target(weight, by), weight, by)


def test_gradients_of_gradients(weight: nn.Parameter, by: Tensor) -> None:
    weight.requires_grad_(True)
    by.requires_grad_(True)

    def gradients(function: Callable) -> list[Tensor]:
        made, scale = function(weight, by)
        first = torch.autograd.grad(made.sin().sum() + scale.cos().sum(), (weight, by), create_graph=True)
        return [*first, *torch.autograd.grad(sum(grad.square().sum() for grad in first), (weight, by))]

    for found, expected in zip(gradients(derived(Scale(), 2)), gradients(Scale()), strict=True):
        torch.testing.assert_close(found, expected)


def test_steps_of_fused_optimizers_are_seen(weight: nn.Parameter, by: Tensor) -> None:
    weight.requires_grad_(True)
    target, optimizer = derived(Scale(), 2), torch.optim.Adam([weight], 0.1, fused=True)
    for _ in range(3):
        target(weight, by)[0].sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert right(target(weight, by), weight, by)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_transforms_see_the_function(weight: Tensor, by: Tensor) -> None:
    target, plain = derived(Scale(), 2), Scale()
    target(weight, by)
    batch = torch.randn(5, 3, 4)
    torch.testing.assert_close(torch.vmap(target, (0, None))(batch, by), torch.vmap(plain, (0, None))(batch, by))

    def loss(function: Callable, weight: Tensor) -> Tensor:
        return function(weight, by)[0].square().sum()

    x = torch.randn(2, 4)
    for wants in (False, True):
        weight.requires_grad_(wants)
        found, expected = (torch.func.grad(lambda x, f=f: (x @ f(weight, by)[0].t()).sum())(x) for f in (target, plain))
        torch.testing.assert_close(found, expected)
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        found, expected = (transform(lambda w, f=f: loss(f, w))(weight) for f in (target, plain))
        torch.testing.assert_close(found, expected)
    assert right(target(weight, by), weight, by)


def test_fake_and_meta_tensors(weight: Tensor, by: Tensor) -> None:
    target = derived(Scale(), 2)
    with FakeTensorMode() as mode:
        fake = target(mode.from_tensor(weight), mode.from_tensor(by))
    assert fake[0].shape == (3, 4) and not target._kept
    assert target(weight.to("meta"), by.to("meta"))[0].is_meta
    assert right(target(weight, by), weight, by)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.target = nn.Parameter(torch.randn(3, 4)), derived(Scale(), 2)
        self.register_buffer("by", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        made, scale = self.target(self.weight, self.by)
        return x @ made.t() + scale


@pytest.mark.parametrize("way", ["compile", "export"])
def test_compiled_and_exported_code_follows_the_originals(way: str) -> None:
    model, x = Scaled().eval(), torch.randn(2, 4)
    with torch.no_grad():
        model(x)
        if way == "compile":
            other, own = torch.compile(model, backend="eager", fullgraph=True), model
        else:
            own = other = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(other(x), model(x))
        own.load_state_dict({"weight": torch.ones(3, 4), "by": torch.ones(3)})
        torch.testing.assert_close(other(x), x.sum(1, keepdim=True).expand(2, 3) * 2 + 2)


def test_memory_can_be_freed_and_taken_again_as_fsdp_does(weight: nn.Parameter, by: Tensor) -> None:
    target, storage = derived(Scale(), 2), weight.untyped_storage()
    with torch.no_grad():
        target(weight, by)
        size = storage.size()
        storage.resize_(0)
        storage.resize_(size)
        weight.fill_(3.0)
        assert torch.equal(target(weight, by)[0], Scale()(weight, by)[0])


def test_copies_and_pickles_compute_the_same(weight: Tensor, by: Tensor) -> None:
    target = derived(Scale(3.0), 2)
    target(weight, by)
    for other in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert isinstance(other, Derived) and other == target and hash(other) == hash(target)
        assert all(map(torch.equal, other(weight, by), target(weight, by)))
    assert derived(Scale(2.0), 2) != target


def test_members_at_once(weight: Tensor, by: Tensor) -> None:
    target = derived(Scale(), 2).for_members((True, False))
    stacked = torch.stack([weight, weight * 2])
    made, scale = target(stacked, by)
    assert made.shape == (2, 3, 4) and scale.shape == (2, 3)
    torch.testing.assert_close(made[1], Scale()(weight * 2, by)[0])


def test_threads(weight: nn.Parameter, by: Tensor) -> None:
    target, wrong = derived(Scale(), 2), []

    def work(own: Tensor) -> None:
        with torch.no_grad():  # of this thread
            for _ in range(300):
                if not torch.equal(target(weight, by)[0], weight * by.square()[:, None] * 2):
                    wrong.append("shared")
                own.add_(1)
                if not torch.equal(target(own, by)[0], own * by.square()[:, None] * 2):
                    wrong.append("own")

    run_in_threads(work, [torch.zeros(3, 4) for _ in range(4)])
    assert not wrong


@pytest.mark.parametrize("create_graph", [False, True])
def test_one_tensor_in_two_places_has_its_gradient_once(create_graph: bool) -> None:
    both = nn.Parameter(torch.rand(3, 3))

    def slope(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(product(both, both).sin().sum(), both, create_graph=create_graph)
        return torch.autograd.grad(first.square().sum(), both)[0] if create_graph else first

    torch.testing.assert_close(slope(derived(torch.matmul, 2)), slope(torch.matmul))
