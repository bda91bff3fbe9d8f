"""Cutting by hand: what the analysis says, done to a model without any of the machinery that uses it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxopt
from fxopt.runtime.graphs import capture_of, own, recompile
from fxopt.transforms.prune.dependency_groups import Coupling, Group, ResizedAttention, coupling


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of another, under all its names."""
    old = _tensor(model, name)
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is old:
                    registry[key] = nn.Parameter(value) if isinstance(old, nn.Parameter) else value


def _kept(units: Collection[int], removed: Collection[int]) -> list[int]:
    return [index for index, unit in enumerate(units) if unit not in removed]


def cut(model: nn.Module, group: Group, removed: Collection[int]) -> nn.Module:
    """Take units out of a model's tensors and attributes, in place."""
    for name in group.replaced:
        model.set_submodule(name, ResizedAttention.of(model.get_submodule(name)))
    for each in group.cuts:
        tensor = _tensor(model, each.tensor).detach()
        _put(model, each.tensor, tensor.index_select(each.dim, torch.tensor(_kept(each.units, removed))))
    for each in group.attributes:
        module = model.get_submodule(each.module)
        before = getattr(module, each.name)
        gone = len(each.units) - len(_kept(each.units, removed))
        if each.index is None:
            object.__setattr__(module, each.name, before - gone)
        else:
            items = [n - gone if i == each.index else n for i, n in enumerate(before)]
            object.__setattr__(module, each.name, type(before)(items))
    return model


def cut_graphs(model: nn.Module, group: Group, removed: Collection[int]) -> nn.Module:
    """Take units out of a captured model; it then runs from its graphs, past their guards."""
    for each in group.numbers:
        graph = own(model.get_submodule(each.owner)).specializations[each.specialization].graph
        node = next(node for node in graph.nodes if node.name == each.node)
        changed = _replaced((node.args, dict(node.kwargs)), each.path, len(_kept(each.units, removed)))
        node.args, node.kwargs = changed
    for module in model.modules():
        capture = capture_of(module)
        if capture is not None and capture.specializations:
            first = own(module).specializations[0]
            own(module).specializations[:] = [dataclasses.replace(first, guards=())]
            recompile(module)
    return cut(model, group, removed)


def _replaced(value: Any, path: tuple[str | int, ...], new: int) -> Any:
    if not path:
        return new
    first, *rest = path
    if isinstance(value, slice):
        ends = {end: getattr(value, end) for end in ("start", "stop", "step")}
        return slice(*(new if end == first else old for end, old in ends.items()))
    if isinstance(value, dict):
        return {k: _replaced(v, tuple(rest), new) if k == first else v for k, v in value.items()}
    return tuple(_replaced(v, tuple(rest), new) if i == first else v for i, v in enumerate(value))


def zeroed(model: nn.Module, group: Group, removed: Collection[int], *, keep: Collection[str] = ()) -> nn.Module:
    """Put zeros in the place of units, in place; not in the tensors that are named in `keep`."""
    for each in group.cuts:
        if f"{each.tensor}:{each.dim}" not in keep:
            indices = [i for i, unit in enumerate(each.units) if unit in removed]
            _tensor(model, each.tensor).data.index_fill_(each.dim, torch.tensor(indices, dtype=torch.long), 0)
    return model


class _KeptOnly(TorchFunctionMode):
    def __init__(self, group: Group, removed: Collection[int], stack: list[str]) -> None:
        super().__init__()
        self.norms = {norm.module: (norm.kind, _kept(norm.units, removed), len(norm.units)) for norm in group.norms}
        self.stack = stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, kept, size = self.norms.get(self.stack[-1] if self.stack else "", ("", [], 0))
        name = getattr(func, "__name__", "")
        if (kind, name) in (("layer", "layer_norm"), ("group", "group_norm")):
            given = dict(zip(("input", "shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
            dim = -1 if kind == "layer" else 1
            short = {k: v[kept] for k, v in given.items() if k in ("weight", "bias") and v is not None}
            x = given["input"].index_select(dim, torch.tensor(kept))
            shape = (len(kept),) if kind == "layer" else given["shape"]
            normed = func(x, shape, **short, **{k: v for k, v in given.items() if k == "eps"})
            return torch.zeros_like(given["input"]).index_copy(dim, torch.tensor(kept), normed)
        out = func(*args, **kwargs)
        return out * (size / len(kept)) if kind == "mean" and name == "mean" else out


@contextmanager
def kept_only(model: nn.Module, group: Group, removed: Collection[int]) -> Generator[None]:
    """Let norms take their statistics over what is kept."""
    stack: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(lambda *_: (stack.pop(), None)[1]))
    try:
        with _KeptOnly(group, removed, stack):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _flat(item)] if isinstance(value, (tuple, list)) else []


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check_group(
    model: nn.Module, captured: nn.Module, inputs: tuple[Any, ...], group: Group, removed: Collection[int]
) -> None:
    """Compare a model cut by hand with the original that has zeros in the place of what is gone."""
    reference = zeroed(copy.deepcopy(model), group, removed)
    with torch.no_grad(), kept_only(reference, group, removed):
        expected = _flat(reference(*inputs))
    assert expected
    results = [_flat(cut_graphs(copy.deepcopy(captured), group, removed)(*inputs))]
    if not group.hard_coded:
        results.append(_flat(cut(copy.deepcopy(model), group, removed)(*inputs)))
    for result in results:
        for a, b in zip(expected, result, strict=True):
            scale = 1e-7 * (1 + a.abs().max().item())  # some norms compute in float32 inside
            assert a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=scale), (a - b).abs().max()


def check_cuts_of(model: nn.Module, inputs: tuple[Any, ...], found: Coupling) -> None:
    """Cut each group of a model by hand; where there are many, some of them."""
    model = copy.deepcopy(model).double()
    inputs = tuple(map(_double, inputs))
    captured = fxopt.capture(copy.deepcopy(model), inputs).model
    for group in found.groups[:: 1 + len(found.groups) // 6]:
        with torch.no_grad():
            check_group(model, captured, inputs, group, {0} if group.size == 2 else {0, group.size - 2})


def _analysed(model: nn.Module, *inputs: Any) -> Coupling:
    return coupling(fxopt.capture(copy.deepcopy(model), inputs))


@pytest.fixture
def analysed() -> Callable[..., Coupling]:
    """Return the coupling of a model on its inputs."""
    return _analysed


@pytest.fixture
def check_cuts() -> Callable[..., Coupling]:
    """Return a function that cuts each group of a model by hand, once, and compares; it returns the coupling."""

    def check(model: nn.Module, *inputs: Any) -> Coupling:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) / 2 + 0.1 if tensor.dim() == 1 else tensor)
        found = _analysed(model, *inputs)
        check_cuts_of(model, inputs, found)
        return found

    return check


def _reads(model: nn.Module, name: str, dim: int) -> bool:
    """Say whether a dimension of a weight is what it reads, as its layer's documentation has it."""
    module = model.get_submodule(name.rpartition(".")[0])
    if not name.endswith("weight") or not isinstance(module, (nn.Linear, nn.Conv2d)):
        return type(module).__name__ == "Conv1D" and name.endswith("weight") and dim == 0
    return dim == 1


@pytest.fixture
def reading_gradients() -> Callable[..., list[Tensor]]:
    """Return the gradients of what reads a group's first unit, where what makes it is zero."""

    def gradients(model: nn.Module, inputs: Any, group: Group) -> list[Tensor]:
        torch.manual_seed(0)
        reading = [each for each in group.cuts if _reads(model, each.tensor, each.dim)]
        keep = [f"{each.tensor}:{each.dim}" for each in reading]
        made = zeroed(copy.deepcopy(model).double(), group, {0}, keep=keep)
        with kept_only(made, group, {0}):
            sum(value.square().sum() for value in _flat(made(_double(inputs)))).backward()
        found = []
        for each in reading:
            indices = torch.tensor([i for i, unit in enumerate(each.units) if unit == 0])
            found.append(_tensor(made, each.tensor).grad.index_select(each.dim, indices))
        return found

    return gradients
