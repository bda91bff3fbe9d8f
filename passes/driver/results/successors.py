"""Which parameters of one form of a model take the places of which of the other, wherever the model holds these."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ....compat import modules_by_name
from ....errors import StateError
from ....runtime.state import StateMap
from ....runtime.values import INTERNAL
from ....tracing.isolation import Holding, parts_of

__all__ = ["ADVICE", "Change", "Successors", "moved_holdings", "refuse_averages"]

Names = frozenset[str]
Translation = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Successors:
    """What has become of the parameters of a given model in the other one."""

    names: Mapping[int, str]  # id of a parameter of the given model -> its name there
    originals: Mapping[int, Names]  # id of such a parameter -> names in the unoptimized model
    shapes: Mapping[str, tuple[int, ...]]
    named: Mapping[str, nn.Parameter]  # the other model's
    whole: Mapping[str, Names]  # name of such a parameter -> names in the unoptimized model
    translate: Translation  # tensors by name in the given model -> in the other one
    _by_original: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self._by_original.update((name, target) for target, names in self.whole.items() for name in names)

    @classmethod
    def between(
        cls,
        one: nn.Module,
        one_map: StateMap | None,
        other: nn.Module,
        other_map: StateMap | None,
        translate: Translation,
    ) -> Successors:
        """Return the successors, in `other`, of the parameters of `one`; each map starts at the unoptimized model."""
        given = dict(one.named_parameters(remove_duplicate=False))
        aliases = dict((one_map or other_map or StateMap()).aliases)
        originals: dict[int, Names] = {}
        for name, parameter in given.items():
            known = _originals(name, one_map, aliases)
            originals[id(parameter)] = originals.get(id(parameter), frozenset()) | known
        named = dict(other.named_parameters())
        names = {id(parameter): name for name, parameter in reversed(given.items())}
        shapes = {name: tuple(parameter.shape) for name, parameter in one.named_parameters()}
        whole = {name: _originals(name, other_map, aliases) for name in named}
        return cls(names, originals, shapes, named, whole, translate)

    def of(self, parameter: Tensor) -> list[str]:
        """Return the names of the parameters that take the place of one; none where it is none any more."""
        found = (self._by_original.get(name) for name in sorted(self.originals[id(parameter)]))
        return list(dict.fromkeys(name for name in found if name is not None))

    def only_one(self, parameter: Tensor) -> nn.Parameter | None:
        """Return the one parameter that takes the place of another, if it is one, and made of nothing else."""
        targets = self.of(parameter)
        alone = len(targets) == 1 and self.whole[targets[0]] <= self.originals[id(parameter)]
        return self.named[targets[0]] if alone else None

    def is_unchanged(self, parameter: Tensor) -> bool:
        """Say whether what takes the place of a parameter has its name and its shape."""
        now = self.only_one(parameter)
        return now is not None and now.shape == parameter.shape and now is self.named.get(self.names[id(parameter)])


def _originals(name: str, state_map: StateMap | None, aliases: Mapping[str, str]) -> Names:
    names = (name,) if state_map is None else state_map.original_names(name)
    return frozenset(aliases.get(each, each) for each in names)


def refuse_averages(model: nn.Module, fast: nn.Module) -> None:
    """Raise StateError for a child that averages a model by places (`AveragedModel`) where parameters changed."""
    modules, rewritten = modules_by_name(model), modules_by_name(fast)
    averages = {path: module.module for path, module in modules.items() if isinstance(module, AveragedModel)}
    for path, average in averages.items():
        inside = f"{path}.module"
        for name, source in modules.items():
            if name.startswith(path) or path.startswith(f"{name}.") or _forms(source) != _forms(average):
                continue
            if name in rewritten and _forms(rewritten[name]) != _forms(rewritten[inside]):
                raise StateError(
                    f"the model's '{path}' averages its '{name}' by the places of the parameters, and some of these "
                    f"are one tensor now. {ADVICE}"
                )


def _forms(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in module.parameters()]


Change = Callable[[Callable[[nn.Parameter], nn.Parameter]], None]
"""Puts parameters into their places; it is given what says who a parameter is in the end."""


def moved_holdings(holdings: Iterable[Holding], successors: Successors) -> list[Change]:
    """Return the changes that let containers and objects hold the successors of the parameters that they hold.

    Raises StateError where one holds a part of what is one tensor now, or goes by places or keys.
    """
    changes: list[Change] = []
    for holding in holdings:
        move = _Move(holding, successors)
        if isinstance(holding.one, MutableMapping) and move.has_them_as_keys():
            changes.append(move.by_key())
        elif isinstance(holding.one, dict) and move.is_by_name():
            changes.append(move.by_name())
        elif next(move.held(), None) is not None:
            changes.append(move.in_sequence() if isinstance(holding.one, _SEQUENCES) else move.one_by_one())
        elif isinstance(holding.one, (list, tuple)):
            move.refuse_copies_in_order()
    return changes


@dataclass(frozen=True)
class _Move:
    """What is to become of one container."""

    holding: Holding
    successors: Successors

    def held(self) -> Iterator[Tensor]:
        """Yield the parameters of the model that are in it."""
        return (meant for meant in map(_meant, _values(self.holding.one)) if id(meant) in self.successors.names)

    # -- lists, tuples, sets ---------------------------------------------------------------------------------------

    def in_sequence(self) -> Change:
        """Return the change of a sequence: each parameter's successors, each once, the rest as it is."""
        one, other = self._in_order()
        covered = frozenset[str]().union(*(self.successors.originals[id(each)] for each in self.held()))
        items: list[Any] = []
        first: dict[str, int] = {}
        for mine, theirs in zip(one, other, strict=True):
            meant = _meant(mine)
            if id(meant) not in self.successors.names:
                items.append(theirs)
                continue
            for target in self._targets(meant):
                self._check_whole(meant, target, covered)
                if first.setdefault(target, id(meant)) == id(meant):
                    items.append(_Successor(target, isinstance(mine, weakref.ref)))
        if len(items) < len(one):
            self._check_free_of_places(len(one))
        return lambda final: self._refill([self._final(item, final) for item in items])

    def _in_order(self) -> tuple[list[Any], list[Any]]:
        """Return what is in both, so that what is in one place of both is the same; sets have no order of their own."""
        one, other = list(self.holding.one), list(self.holding.other)
        if isinstance(self.holding.one, (set, frozenset)):
            for items in (one, other):
                items.sort(key=lambda item: not isinstance(_meant(item), nn.Parameter))
        return one, other

    def _refill(self, items: list[Any]) -> None:
        other = self.holding.other
        if isinstance(other, (list, deque)):
            cast("list[Any]", other).clear()
            cast("list[Any]", other).extend(items)
        elif isinstance(other, set):
            cast("set[Any]", other).clear()
            cast("set[Any]", other).update(items)
        elif len(items) != len(other) or any(one is not two for one, two in zip(items, other, strict=True)):
            if self.holding.put is None or type(other) not in (tuple, frozenset):
                raise StateError(f"the model holds parameters in '{self.holding.path}', which cannot be changed")
            self.holding.put(type(other)(items))

    def _check_whole(self, held: Tensor, target: str, covered: Names) -> None:
        absent = sorted(self.successors.whole[target] - covered)
        if absent:
            raise StateError(
                f"the model's '{self.holding.path}' holds '{self._name(held)}' but not '{absent[0]}', and they are "
                f"now one tensor '{target}'. {ADVICE}"
            )

    def _check_free_of_places(self, length: int) -> None:
        """Refuse to shorten a sequence beside one that is as long: `zip` may go through both."""
        for name, sibling in _items(self.holding.around):
            if sibling is not self.holding.one and name not in INTERNAL and isinstance(sibling, (list, tuple, dict)):
                items = list(_values(sibling))
                if len(items) == length and not all(id(_meant(item)) in self.successors.names for item in items):
                    raise StateError(
                        f"the model's '{self.holding.path}' holds parameters of which some are one tensor now, and "
                        f"another attribute has as many items, so that places may count. {ADVICE}"
                    )

    def refuse_copies_in_order(self) -> None:
        """Refuse tensors that have the shapes of all parameters in their order: averages, say, that go by places."""
        values = list(self.holding.one)
        if len(values) < 2 or not all(isinstance(value, Tensor) for value in values):
            return
        now = [tuple(parameter.shape) for parameter in self.successors.named.values()]
        if [tuple(value.shape) for value in values] == [*self.successors.shapes.values()] != now:
            raise StateError(
                f"the model's '{self.holding.path}' holds a tensor for each parameter, in their order, and some of "
                f"the parameters are one tensor now. {ADVICE}"
            )

    # -- dictionaries and objects ----------------------------------------------------------------------------------

    def one_by_one(self) -> Change:
        """Return the change of a dictionary or an object that has parameters under keys of its own."""
        kept = [(key, value) for key, value in _items(self.holding.one) if id(_meant(value)) in self.successors.names]
        places = [(key, self._alone(value, repr(key))) for key, value in kept]
        other: Any = self.holding.other
        is_mapping = isinstance(other, MutableMapping)
        put: Any = cast("Any", other).__setitem__ if is_mapping else partial(object.__setattr__, other)

        def change(final: Callable[[nn.Parameter], nn.Parameter]) -> None:
            for key, item in places:
                put(key, self._final(item, final))

        return change

    def has_them_as_keys(self) -> bool:
        return any(id(key) in self.successors.names for key in cast("Mapping[Any, Any]", self.holding.one))

    def by_key(self) -> Change:
        """Return the change of a dictionary whose keys are parameters: what it says of each, it says of one still."""
        one, other = self.holding.one, cast("MutableMapping[Any, Any]", self.holding.other)
        pairs: list[tuple[Any, Any]] = []
        for mine, theirs in zip(one.items(), other.items(), strict=True):
            are_held = (id(_meant(each)) in self.successors.names for each in mine)
            moved = zip(mine, theirs, are_held, ("a key", "a value"), strict=True)
            key, value = (self._alone(m, role) if is_held else t for m, t, is_held, role in moved)
            pairs.append((key, value))

        def change(final: Callable[[nn.Parameter], nn.Parameter]) -> None:
            now = [(self._final(key, final), self._final(value, final)) for key, value in pairs]
            other.clear()
            for key, value in now:
                other[key] = value

        return change

    def _alone(self, value: Any, role: str) -> _Successor:
        """Return what stands for a parameter's only successor."""
        meant = _meant(value)
        target = self._targets(meant)[0]
        if self.successors.only_one(meant) is None:
            raise StateError(
                f"the model's '{self.holding.path}' holds '{self._name(meant)}' as {role}, and it is a part of "
                f"'{target}' now. {ADVICE}"
            )
        return _Successor(target, isinstance(value, weakref.ref))

    def is_by_name(self) -> bool:
        """Say whether a dictionary has tensors under the names of parameters, and some have other names now."""
        values, shapes = cast("dict[Any, Any]", self.holding.one), self.successors.shapes
        if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in values.items()):
            return False
        known = {self._full(key): value for key, value in values.items()}
        if any(tuple(value.shape) != shapes.get(name, tuple(value.shape)) for name, value in known.items()):
            return False
        return not self.successors.named.keys() >= known.keys() & shapes.keys()

    def by_name(self) -> Change:
        """Return the change of a dictionary by name: of the parameters, or of others of their shapes (averages)."""
        one, other = self.holding.one, cast("dict[str, Any]", self.holding.other)
        kept = {key: value for key, value in other.items() if self._full(key) not in self.successors.shapes}
        named = {self._full(key): value for key, value in one.items() if key not in kept}
        try:
            moved = self.successors.translate({name: value.detach() for name, value in named.items()})
        except StateError as error:
            raise StateError(f"the model's '{self.holding.path}' cannot move: {error}. {ADVICE}") from error
        if not all(name.startswith(self._prefix) for name in moved):
            raise StateError(f"the model's '{self.holding.path}' has tensors by names that are gone. {ADVICE}")
        places = {name.removeprefix(self._prefix): self._named(name, tensor, named) for name, tensor in moved.items()}

        def change(final: Callable[[nn.Parameter], nn.Parameter]) -> None:
            now = {key: self._final(item, final) for key, item in places.items()}
            other.clear()
            other.update({**now, **kept})

        return change

    def _named(self, name: str, tensor: Tensor, given: Mapping[str, Tensor]) -> Any:
        """Return what stands for a parameter under its new name: itself, where the parameters were given."""
        are_parameters = all(id(each) in self.successors.names for each in given.values())
        return _Successor(name) if are_parameters else tensor.clone()

    @cached_property
    def _prefix(self) -> str:
        """What stands before the keys of a dictionary in the model's names: the owner's name, or that of a child."""
        own = f"{self.holding.owner}." if self.holding.owner else ""
        keys, shapes = list(cast("dict[str, Any]", self.holding.one)), self.successors.shapes
        if any(own + key in shapes for key in keys):
            return own
        ends = (name.removesuffix(keys[0]) for name in shapes if keys and name.endswith(f".{keys[0]}"))
        inner = [each for each in ends if each.startswith(own) and all(each + key in shapes for key in keys)]
        return inner[0] if len(inner) == 1 else own

    def _full(self, key: str) -> str:
        return self._prefix + key

    # -- inside ----------------------------------------------------------------------------------------------------

    def _targets(self, held: Tensor) -> list[str]:
        targets = self.successors.of(held)
        if not targets:
            raise StateError(
                f"the model's '{self.holding.path}' holds '{self._name(held)}', which is no parameter any more. "
                f"{ADVICE}"
            )
        return targets

    def _name(self, held: Tensor) -> str:
        return self.successors.names[id(held)]

    def _final(self, item: Any, final: Callable[[nn.Parameter], nn.Parameter]) -> Any:
        if not isinstance(item, _Successor):
            return item
        parameter = final(self.successors.named[item.name])
        return weakref.ref(parameter) if item.is_weak else parameter


@dataclass(frozen=True)
class _Successor:
    """Stands for a parameter until it is known who that is."""

    name: str
    is_weak: bool = False


_SEQUENCES = (list, tuple, deque, set, frozenset)
ADVICE = (
    "Delete it before (del model.NAME) and build it anew on the result, or leave out the pass that merges parameters"
)


def _meant(value: Any) -> Any:
    """Return what a weak reference refers to, and anything else itself."""
    return cast("weakref.ref[Any]", value)() if isinstance(value, weakref.ref) else value


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what is in a container or an object itself, by key or name."""
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Any]", value).items()
    return parts_of(value)


def _values(value: Any) -> list[Any]:
    return [item for _, item in _items(value)]
