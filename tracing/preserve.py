"""Run a model and leave no trace on it: buffers, attributes, flags and random state are put back."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..compat import version_of
from ..errors import InputError

__all__ = ["AttributeState", "RandomState", "change_count", "host_random_state", "in_phase", "preserved"]

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_INTERNAL = frozenset(nn.Module().__dict__)
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 3
"""Containers within containers are kept down to this depth."""


def change_count(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else version_of(tensor)


class RandomState:
    """Hold the state of every random generator that a forward may draw from."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.cuda = torch.cuda.get_rng_state_all() if cuda else None
        self.host = host_random_state()

    def restore(self) -> None:
        """Put every generator back."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        python, numpy = self.host
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


def host_random_state() -> tuple[Any, Any]:
    """Return the state of Python's generator and, where it is loaded, of numpy's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


class AttributeState:
    """Hold a module's attributes, registries and plain containers, to put back or to compare."""

    __slots__ = ("_containers", "_dict", "_module", "_registries")

    def __init__(self, module: nn.Module) -> None:
        attributes = module.__dict__
        self._module = module
        self._dict = dict(attributes)
        self._registries = tuple((attributes[name], dict(attributes[name])) for name in _REGISTRIES)
        self._containers: list[tuple[Any, Any]] = []
        for name, value in attributes.items():
            if name not in _INTERNAL and isinstance(value, _CONTAINERS):
                self._keep(value, _DEPTH)

    def _keep(self, container: Any, depth: int) -> None:
        self._containers.append((container, container.copy()))
        if depth == 1 or isinstance(container, set):
            return
        for item in container.values() if isinstance(container, dict) else container:
            if isinstance(item, _CONTAINERS):
                self._keep(item, depth - 1)

    def changed(self) -> str | None:
        """Return the name of an attribute that is no longer what it was, or None."""
        now = self._module.__dict__
        for name in self._dict.keys() | now.keys():
            if now.get(name, self) is not self._dict.get(name, self):
                return name
        for name, (registry, copy) in zip(_REGISTRIES, self._registries, strict=True):
            if not _same(registry, copy):
                return name
        for container, copy in self._containers:
            if not _same(container, copy):
                return next((n for n, v in self._dict.items() if v is container), "a container")
        return None

    def restore(self) -> None:
        """Put attributes, registries and containers back as they were."""
        attributes = self._module.__dict__
        if not _same(attributes, self._dict):
            attributes.clear()
            attributes.update(self._dict)
        for container, copy in (*self._registries, *self._containers):
            if not _same(container, copy):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(copy)


def _same(container: Any, copy: Any) -> bool:
    """Compare members by identity: they may be tensors, whose `==` is no answer."""
    if len(container) != len(copy):
        return False
    if isinstance(container, MutableMapping):
        pairs = zip(cast("dict[Any, Any]", container).items(), copy.items(), strict=True)
        return all(key is other or key == other for (key, _), (other, _) in pairs) and all(
            value is copy[key] for key, value in cast("dict[Any, Any]", container).items()
        )
    if isinstance(container, set):
        return {id(item) for item in cast("set[Any]", container)} == {id(item) for item in copy}
    return all(item is other for item, other in zip(container, copy, strict=True))


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back, on leaving, what running `model` changes, also when it raises.

    Buffers (in place), attributes of every module with the plain containers in them, registries, training flags,
    `.grad` and the random state of torch (CPU, CUDA), Python and numpy. Parameters are not copied.

    Raises:
        InputError: if a parameter was changed in place, which cannot be undone.
    """
    states = [AttributeState(module) for module in model.modules()]
    parameters = dict(model.named_parameters())
    copied = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *_renormalised(model))]
    versions = {name: change_count(tensor) for name, tensor in parameters.items()}
    gradients = [(tensor, tensor.grad) for tensor in parameters.values()]
    generators = RandomState()
    try:
        yield
        _check_parameters(parameters, versions, {id(tensor) for tensor, _ in copied})
    finally:
        for state in states:
            state.restore()
        with torch.no_grad():
            for tensor, copy in copied:
                tensor.copy_(copy)
        for tensor, gradient in gradients:
            tensor.grad = gradient
        generators.restore()


def _renormalised(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights that an embedding with `max_norm` rescales whenever it is called."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            yield module.weight


def _check_parameters(parameters: dict[str, nn.Parameter], versions: dict[str, int | None], kept: set[int]) -> None:
    for name, tensor in parameters.items():
        if change_count(tensor) != versions[name] and id(tensor) not in kept:
            raise InputError(
                f"the model changes its parameter {name!r} in place when it is called; running it on example inputs "
                "would change the weights, so make it a buffer, or move the change out of forward"
            )


@contextmanager
def in_phase(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the whole model in training or evaluation mode, and every flag back afterwards; none if it is in it."""
    if model.training == training:
        yield
        return
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = training
        yield
    finally:
        for module, flag in flags:
            module.training = flag
