"""Copies of module trees, with their numbers or without."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.tracing.isolation import copied_module, skeleton_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.also = [self.first]
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.also[0](x)) * self.scale


class CopiesItself(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        return CopiesItself(copy.deepcopy(self.inner, memo))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def shape_of(module: nn.Module) -> list[tuple[str, type[nn.Module], set[str]]]:
    return [(name, type(inner), set(vars(inner))) for name, inner in module.named_modules(remove_duplicate=False)]


def mixed() -> nn.Module:
    block = Block()
    return nn.Sequential(block, CopiesItself(block), nn.Tanh())


@pytest.mark.parametrize("make", [Block, mixed])
@pytest.mark.parametrize("way", [copied_module, skeleton_of])
def test_copies_have_the_structure_of_the_original(make: Any, way: Any) -> None:
    original = make()
    handle = original.register_forward_hook(lambda *_: None)
    other = way(original)
    assert shape_of(other) == shape_of(original)
    assert list(other.state_dict()) == list(original.state_dict())
    assert len(other._forward_hooks) == 1
    handle.remove()
    assert len(other._forward_hooks) == 1
    repr(other)


@pytest.mark.parametrize("make", [Block, mixed])
def test_an_outline_keeps_what_is_shared_and_no_numbers(make: Any) -> None:
    original = make()
    module = skeleton_of(original)
    block = module if make is Block else module[0]
    assert block.also[0] is block.first
    assert block.first.weight.is_meta
    torch.testing.assert_close(block.scale, torch.ones(4))  # a state dict does not hold it
    if make is mixed:
        assert module[1].inner is block


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.last: Tensor | None = None
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.last, self.kept = y, y.sum(0)
        return y.tanh()


def test_a_model_that_remembers_its_last_output_is_copied_without_the_history() -> None:
    model, x = Remembers(), torch.randn(2, 3)
    model(x)
    assert model.last is not None and model.last.grad_fn is not None
    with pytest.raises(RuntimeError):
        copy.deepcopy(model)
    other = copied_module(model)
    assert other.last is not None and other.last.grad_fn is None and other.kept.grad_fn is None
    torch.testing.assert_close(other.last, model.last.detach())
    fast = fxopt.optimize(model, "inference", example_inputs=(x,), measure=False)
    torch.testing.assert_close(fast(x), model(x))
    assert model.last.grad_fn is not None


def test_optimize_lets_go_of_what_it_replaced() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(x) for head in self.heads], -1)

    model, x = Heads().eval(), torch.randn(2, 8)
    options: dict[str, Any] = {"example_inputs": (x,), "verify": False, "measure": False}
    fxopt.optimize(model, "fuse_ensembles", **options)  # first uses leave things behind
    gc.collect()
    known: weakref.WeakSet[Tensor] = weakref.WeakSet()
    copies: list[int] = []
    clone = nn.Parameter.__deepcopy__

    def noting(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        new = clone(self, memo)
        if not new.is_meta:
            known.add(new)
            copies.append(id(new))
        return new

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Parameter, "__deepcopy__", noting)
            fast = fxopt.optimize(model, "fuse_ensembles", **options)
        assert len(list(fast.parameters())) == 2
        assert len(copies) == 12
        assert not known
    finally:
        gc.enable()


class Average:
    """A running average of a parameter, which looks at it while it is copied."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.count = tensor, tensor.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> Average:
        return Average(copy.deepcopy(self.tensor, memo))


class Piped:
    """Something that copies itself by pickle."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> Piped:
        return pickle.loads(pickle.dumps(self))


def test_objects_that_copy_themselves_are_handed_tensors() -> None:
    model = Block()
    model.average = Average(model.first.weight)  # pyright: ignore[reportAttributeAccessIssue]
    module: Any = skeleton_of(model)
    assert module.average.tensor is module.first.weight
    assert module.average.count == 16
    assert module.first.weight.is_meta


def test_parameters_as_keys_stay_apart() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.rates = {layer.weight: 0.1 for layer in model}
    model.held = [model[0].weight, model[1].weight]
    module: Any = skeleton_of(model)
    assert list(module.rates) == [module[0].weight, module[1].weight] == module.held


def test_strides_flags_and_names_in_outlines() -> None:
    model: Any = nn.Linear(3, 3)
    model.weight = nn.Parameter(model.weight.detach().t(), requires_grad=False)
    model.sizes, model.parts, model.kept = (3, 3), [1, [2]], {"a", "b"}
    module: Any = skeleton_of(model)
    assert (module.weight.stride(), module.weight.requires_grad) == ((1, 3), False)
    assert (module.sizes, module.parts, module.kept) == ((3, 3), [1, [2]], {"a", "b"})
    assert module.parts[1] is not model.parts[1]


def test_an_outline_in_an_outline_that_copies_itself() -> None:
    teacher = fxopt.optimize(nn.Linear(2, 2).eval(), [], example_inputs=(torch.ones(1, 2),))
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model.teacher = Piped(teacher)
    fast = fxopt.optimize(model.eval(), [], example_inputs=(torch.ones(1, 2),))
    assert isinstance(fxopt.restore(fast)[0], nn.Linear)
