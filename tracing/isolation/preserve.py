"""Run a model and leave no trace on it: buffers, attributes, flags and random state are put back."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import BORROWED, REGIONS, all_modules, own_buffers, own_parameters
from ...errors import InputError
from ...runtime.graphs import FOUND, context_regions
from ...runtime.values import INTERNAL, ChangeCounts, RandomState, plain_tensors, put_members_back, same_members
from .numbers import KnownNumbers
from .parameter_data import ParameterData, data_of, storage_of

__all__ = ["AttributeState", "Contents", "ModelState", "in_phase", "memory_of", "preserved", "restoring"]

_REGISTRIES = (
    "_parameters", "_buffers", "_modules",
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_registries_of = operator.itemgetter(*_REGISTRIES)
_RENORMALISING = (nn.Embedding, nn.EmbeddingBag)
"""With `max_norm` these rescale their weight whenever they are called."""
_INSTALLED = ("_fxopt_capture", FOUND)
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 3
"""Containers within containers are kept down to this depth."""
_NOTHING: dict[str, Any] = {}


def memory_of(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from others'; sparse tensors have none of their own."""
    storage = storage_of(tensor)
    return id(tensor) if storage is None else storage


class AttributeState:
    """Hold a module's attributes, registries and plain containers, to put back or to compare. What `install` keeps on a
    module (`_fxopt_capture`, and regions) is left alone, and children that a region borrows.
    """

    __slots__ = ("_kept", "copy", "namespace", "registered")

    def __init__(self, module: nn.Module) -> None:
        self.namespace = attributes = module.__dict__
        self.copy = attributes.copy()
        held = {**attributes, "_modules": _NOTHING} if BORROWED in attributes else attributes
        registries: tuple[dict[str, Any], ...] = _registries_of(held)
        copies = [registry.copy() if registry else _NOTHING for registry in registries]
        self.registered = copies[:2]
        """What the parameters and the buffers were."""
        self._kept: list[tuple[str, Any, Any]] = list(zip(_REGISTRIES, registries, copies, strict=True))
        for name, value in attributes.items():
            if name not in INTERNAL and isinstance(value, _CONTAINERS):
                self._keep(name, value, _DEPTH)

    def _keep(self, name: str, container: Any, depth: int) -> None:
        self._kept.append((name, container, container.copy()))
        if depth > 1 and not isinstance(container, set):
            items = cast("Iterable[Any]", container.values() if isinstance(container, dict) else container)
            for item in list(items):
                if isinstance(item, _CONTAINERS):
                    self._keep(name, item, depth - 1)

    @property
    def containers(self) -> list[Any]:
        """Return the registries and containers themselves."""
        return [container for _, container, _ in self._kept]

    def is_same(self) -> bool:
        """Say whether nothing has changed."""
        return same_members(self.namespace, self.copy) and all(same_members(held, copy) for _, held, copy in self._kept)

    def changed(self) -> str | None:
        """Return the name of an attribute that is no longer what it was, or None."""
        return next((where or name for where, name in self.differences()), None)

    def assigned(self) -> frozenset[str]:
        """Return the names of the user's attributes that are no longer what they were, or hold something else."""
        names = (where or name for where, name in self.differences())
        return frozenset(name for name in names if name not in INTERNAL and name != "forward")

    def differences(self) -> Iterator[tuple[str, str]]:
        """Yield what is no longer what it was: "" and the name of an attribute, or a container and the name in it."""
        of_capture = context_regions(self.namespace)
        for name in _changed_names(self.namespace, self.copy):
            if not name.startswith("_fxopt") and name not in of_capture:
                yield "", name
        for name, container, copy in self._kept:
            if isinstance(container, dict):
                yield from ((name, str(key)) for key in _changed_names(cast("dict[Any, Any]", container), copy))
            elif not same_members(container, copy):
                yield name, ""

    def restore(self, *, exact: bool = False) -> None:
        """Put attributes, registries and containers back as they were; if `exact`, without regions that came since."""
        self.restore_attributes(exact=exact)
        self.restore_containers()

    def restore_attributes(self, *, exact: bool = False) -> None:
        """Put back which objects the attributes are; regions of captured forwards that came since stay."""
        now = self.namespace
        if not same_members(now, self.copy):
            kept = {name: value for name, value in self.copy.items() if name not in _INSTALLED}
            kept |= {name: now[name] for name in _INSTALLED if name in now}
            came = {} if exact else {n: r for n, r in context_regions(now).items() if n not in kept}
            if came:
                kept |= {**came, REGIONS: (*kept.get(REGIONS, ()), *came)}
            # One by one: another thread may be running the module, and must never find it empty.
            for name in now.keys() - kept.keys():
                del now[name]
            now.update(kept)

    def restore_containers(self) -> None:
        """Put back what is in the registries and containers."""
        for _, container, copy in self._kept:
            if (copy or container) and not same_members(container, copy):  # most registries are empty
                put_members_back(container, copy)


def _changed_names(now: dict[Any, Any], before: dict[Any, Any]) -> list[Any]:
    return [name for name in {**before, **now} if now.get(name, _NOTHING) is not before.get(name, _NOTHING)]


class Contents:
    """Hold what is in many containers, to see in one go that none has changed; `named` ones have texts for keys."""

    def __init__(self, containers: list[Any], *, named: bool = False) -> None:
        self._containers = containers
        self._lengths = list(map(len, containers))
        # Most are empty: once the lengths agree, there is nothing in them to compare.
        self._filled = [held for held, length in zip(containers, self._lengths, strict=True) if length]
        self._dictionaries = cast("list[dict[Any, Any]]", [held for held in self._filled if isinstance(held, dict)])
        self._named = named
        self._keys = self._keys_now()
        self._values = list(self._values_now())

    def _keys_now(self) -> list[Any]:
        return list(chain.from_iterable(self._filled))

    def _values_now(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict[Any, Any].values, self._dictionaries))

    def are_same(self) -> bool:
        """Tell whether every container holds the same objects, in the same order."""
        if list(map(len, self._containers)) != self._lengths:
            return False
        keys = self._keys_now()
        same = keys == self._keys if self._named else all(map(operator.is_, keys, self._keys))
        return same and all(map(operator.is_, self._values_now(), self._values))


class ModelState:
    """Hold what running a model may change, to put it back any number of times: buffers, attributes with the containers
    and tensors in them, registries, flags, `.grad` and the random state of torch, Python and numpy. Parameters are
    copied only where their `data` is reached for while it is watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules = all_modules(model)
        self._attributes = [AttributeState(module) for module in modules]
        self._namespaces = Contents([state.namespace for state in self._attributes], named=True)
        self._containers = Contents([held for state in self._attributes for held in state.containers])
        self._parameters = {id(p): p for module in modules for p in own_parameters(module).values() if p is not None}
        held = [b for module in modules for b in own_buffers(module).values() if b is not None]
        held += [m.weight for m in modules if isinstance(m, _RENORMALISING) and m.max_norm is not None]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in held]
        self._counts = ChangeCounts(self._parameters.values())
        plain = list({id(tensor): tensor for module in modules for tensor in plain_tensors(module)}.values())
        self.tensors = (*self._parameters.values(), *held, *plain)
        plain = [tensor for tensor in plain if not tensor.is_inference()]
        self._plain, self._plain_copies = ChangeCounts(plain), {id(tensor): tensor.detach().clone() for tensor in plain}
        self.data = ParameterData((*self._parameters.values(), *plain))
        self.is_meta = bool(self._parameters) and all(p.is_meta for p in self._parameters.values())
        self._gradients = [(p, p.grad) for p in self._parameters.values()]
        self._generators = RandomState()

    def accept_graphs(self) -> None:
        """Take graphs that were installed since as what is there; they are left alone anyhow, but looked for."""
        self._namespaces = Contents([state.namespace for state in self._attributes], named=True)

    def restore(self, assigned: dict[nn.Module, frozenset[str]] | None = None) -> None:
        """Put everything back; `assigned` is given what `assigning` would have returned."""
        same_attributes, same_contents = self._namespaces.are_same(), self._containers.are_same()
        if assigned is not None and not (same_attributes and same_contents):
            pairs = zip(self.modules, self._attributes, strict=True)
            assigned.update({module: names for module, state in pairs if (names := state.assigned())})
        for state in () if same_attributes else self._attributes:
            state.restore_attributes()
        for state in () if same_contents else self._attributes:
            state.restore_containers()
        with torch.no_grad():
            for tensor, copy in self._copies:
                # Past the count of changes: a caller may still want gradients through what the buffer was.
                data_of(tensor).copy_(copy)
            for tensor in self._plain.changed():
                data_of(tensor).copy_(self._plain_copies[id(tensor)])
        self.data.restore()
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        self._generators.restore()

    def check_parameters(self, model: nn.Module) -> None:
        """Raise InputError if a parameter was changed in place, for that cannot be taken back."""
        kept = {id(tensor) for tensor, _ in self._copies}
        for parameter in self._counts.changed():
            if id(parameter) not in kept:
                name = next((name for name, p in model.named_parameters() if p is parameter), "?")
                raise InputError(
                    f"the model changes its parameter {name!r} in place when it is called; running it on example "
                    "inputs would change the weights, so make it a buffer, or move the change out of forward"
                )


@contextmanager
def preserved(model: nn.Module) -> Generator[None]:
    """Put back, on leaving, what running `model` changes (see `ModelState`); InputError if it changed parameters."""
    state = ModelState(model)
    with restoring(state):
        yield
        state.check_parameters(model)


@contextmanager
def restoring(state: ModelState, assigned: dict[nn.Module, frozenset[str]] | None = None) -> Generator[None]:
    """Put `state` back on leaving, and fill in which attributes were `assigned`, by module. On the meta device, what is
    made without a device is made there meanwhile, and what forwards decide by is known as far as can be.
    """
    try:
        on_meta = (torch.device("meta"), KnownNumbers()) if state.is_meta else (nullcontext(), nullcontext())
        with on_meta[0], on_meta[1], state.data.watched():
            yield
    finally:
        state.restore(assigned)


@contextmanager
def in_phase(model: nn.Module, training: bool) -> Generator[None]:
    """Put the model in training or evaluation mode for a while; if the root is in it, mixed flags stay as they are."""
    flags = {module: module.training for module in all_modules(model)}
    if model.training != training:
        for module in flags:
            module.training = training
    try:
        yield
    finally:
        for module in dict.fromkeys((*flags, *all_modules(model))):
            flag = flags.get(module, flags[model])  # what came meanwhile follows the root
            if module.training != flag:
                module.training = flag
