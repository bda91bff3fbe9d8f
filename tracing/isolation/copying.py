"""Copies of module trees: with their numbers, as structure alone, on the same tensors; scripted children in them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...compat import all_modules, own_buffers, own_parameters, transient_buffers
from ...runtime.graphs import capture_of
from ...runtime.values import all_tensors, is_scripted, plain_tensors
from .held import held_in

__all__ = ["copied_module", "plain_registries", "shallow_clone", "skeleton_of"]

M = TypeVar("M", bound=nn.Module)


def copied_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """Return `copy.deepcopy(module, memo)`.

    Tensors that a forward left in attributes or buffers are copied without their history, where `deepcopy` raises.
    """
    memo = {} if memo is None else memo
    for tensor in _left_behind(module):
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
    with warnings.catch_warnings():  # what `torch.export` wrote is copied by a class of torch that warns of itself
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        made = copy.deepcopy(module, memo)
    for inner, before in zip(all_modules(made), all_modules(module), strict=False):
        if is_scripted(inner):  # torch copies its parameters with a history
            for parameter, old in zip(inner.parameters(), before.parameters(), strict=True):
                parameter.detach_().requires_grad_(old.requires_grad)
    return made


def _left_behind(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that still have the graph that they come from."""
    for inner in all_modules(module):
        for tensor in (*own_buffers(inner).values(), *plain_tensors(inner)):
            if tensor is not None and not tensor.is_leaf:
                yield tensor


def shallow_clone(module: M) -> M:
    """Return a copy of the module tree as it runs now, on the same parameters and buffers.

    Later rewrites of `module` do not reach the copy; writes into its parameters do.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in all_tensors(all_modules(module))}
    memo |= {id(optimizer): optimizer for optimizer in _held_optimizers(module)}
    for submodule in all_modules(module):
        capture = capture_of(submodule)
        if capture is not None:
            memo[id(capture)] = capture
    made = copied_module(module, memo)
    _make_registries_plain(made)
    return made


def skeleton_of(module: M) -> M:
    """Return the structure of a module: a copy in which what state dicts hold is on the meta device."""
    return copied_module(module, {id(tensor): _on_meta(tensor) for tensor in (*_saved(module), *_moments(module))})


def _saved(module: nn.Module) -> Iterator[Tensor]:
    for inner in all_modules(module):
        transient = transient_buffers(inner)
        for registry, left_out in ((own_parameters(inner), ()), (own_buffers(inner), transient)):
            yield from (tensor for name, tensor in registry.items() if tensor is not None and name not in left_out)


def _moments(module: nn.Module) -> Iterator[Tensor]:
    """Yield what the optimizers that a model holds know of its parameters."""
    for optimizer in _held_optimizers(module):
        for known in optimizer.state.values():
            yield from (value for value in known.values() if isinstance(value, Tensor))


def _held_optimizers(module: nn.Module) -> list[Optimizer]:
    return [each.one for each in held_in(module, module) if isinstance(each.one, Optimizer)]


def _on_meta(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor.to("meta")  # a quantized one, say, which makes no empty one like itself
    skeleton = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(skeleton, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else skeleton


_REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextmanager
def plain_registries(model: nn.Module) -> Generator[None]:
    """Let scripted modules inside `model` show their tensors and children as plain dictionaries for a while."""
    scripted = [module for module in all_modules(model) if is_scripted(module)]
    kept = [(vars(module), {name: vars(module)[name] for name in _REGISTRIES}) for module in scripted]
    try:
        _make_registries_plain(model)
        yield
    finally:
        for attributes, registries in kept:
            attributes.update(registries)


def _make_registries_plain(model: nn.Module) -> None:
    """Let scripted modules inside a copy that no user gets show their tensors and children as plain dictionaries."""
    for module in filter(is_scripted, all_modules(model)):
        vars(module).update({name: _plain_registry(vars(module)[name]) for name in _REGISTRIES})


def _plain_registry(registry: Any) -> dict[str, Any]:
    return dict(registry.items())
