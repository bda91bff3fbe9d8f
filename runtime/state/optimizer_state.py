"""Move an optimizer, state and all, from the parameters of one form of a model to those of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import StateError
from .sharding import sharded_like
from .state_map import StateMap, listing

__all__ = ["ELEMENT_WISE", "check_type", "element_wise", "is_element_wise", "steps_by_element", "translate_optimizer"]

SomeOptimizer = TypeVar("SomeOptimizer", bound=Optimizer)
Direction = Literal["forward", "backward"]

ELEMENT_WISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
        torch.optim.Adadelta, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.ASGD,
        torch.optim.Rprop,
    }
)  # fmt: skip
"""Optimizers that update each element by itself, so that one step on merged tensors is one step on each part.

Others look at a whole tensor or at all of them (LBFGS, Muon, Adafactor), and a subclass may do anything.
"""

_BY_ELEMENT = "_fxopt_element_wise"


def element_wise(kind: type[SomeOptimizer]) -> type[SomeOptimizer]:
    """Say that an optimizer class updates each element by itself, as Adam does, so that it may step merged parameters.

    Subclasses are not meant. It returns the class, and may be written above it as a decorator.
    """
    setattr(kind, _BY_ELEMENT, kind)
    return kind


def is_element_wise(kind: type[Optimizer]) -> bool:
    """Say whether an optimizer class is known to update each element by itself."""
    return kind in ELEMENT_WISE or vars(kind).get(_BY_ELEMENT) is kind


def steps_by_element(kind: type[Optimizer]) -> bool:
    """Say whether steps of merged parameters are those of their parts: LBFGS takes all parameters for one vector."""
    return is_element_wise(kind) or kind is torch.optim.LBFGS


PER_TENSOR = frozenset({"step", "eta", "mu", "mu_product"})
"""State that is one number for a tensor, whatever the tensor's shape."""


def translate_optimizer(
    optimizer: SomeOptimizer,
    names: Mapping[int, str],
    state_map: StateMap,
    parameters: Mapping[str, nn.Parameter],
    *,
    direction: Direction = "forward",
) -> SomeOptimizer:
    """Let an optimizer go on with the other form of a model's parameters: groups, options and moments, in place.

    The optimizer stays the same object. Parameters that are not the model's, or are among `parameters` already, stay.
    Gradients that wait for a step are copied. `names` is by the id of a parameter; a group's `param_names` come next.
    `forward` goes from original to new parameters. Raises a StateError, by name and with nothing changed: the optimizer
    is not element-wise or has no parameter of the model, members are incomplete or unequal, or tensors were folded.
    """
    check_type(optimizer)
    families = _families(state_map, direction)
    places = _Places(optimizer, names, parameters, _other_names(state_map, families), frozenset(families))
    move = _Move(places, families, parameters, _translation(state_map, direction))
    groups = [move.group(number) for number in range(len(optimizer.param_groups))]
    move.commit(groups)
    return optimizer


def check_type(optimizer: Optimizer) -> None:
    """Raise a StateError for optimizers that may look at a whole tensor."""
    kind = type(optimizer)
    if is_element_wise(kind):
        return
    known = ", ".join(sorted(known.__name__ for known in ELEMENT_WISE))
    why = "is not known to update each element by itself"
    if issubclass(kind, tuple(ELEMENT_WISE)):
        why = "is a subclass, which may treat tensors as a whole"
    raise StateError(f"{kind.__name__} {why}, so its state cannot be moved to merged parameters; known are {known}")


Family = tuple[tuple[str, ...], tuple[str, ...]]
"""The names of tensors that belong together, before and after."""


def _families(state_map: StateMap, direction: Direction) -> dict[str, Family]:
    """Return the name of each tensor that a rewrite changed, before the move -> its family."""
    families: dict[str, Family] = {}
    for target, originals in state_map.origins.items():
        family = (originals, (target,)) if direction == "forward" else ((target,), originals)
        families.update(dict.fromkeys(family[0], family))
    return families


def _other_names(state_map: StateMap, families: Mapping[str, Family]) -> dict[str, str]:
    """Return the names of tied tensors that the families know by their other name."""
    pairs = [*state_map.aliases, *((name, alias) for alias, name in state_map.aliases)]
    return {one: other for one, other in pairs if one not in families and other in families}


def _translation(state_map: StateMap, direction: Direction) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    if direction == "forward":
        return lambda tensors: state_map.forward(tensors, strict=False)
    return lambda tensors: {name: tensor.clone() for name, tensor in state_map.backward(tensors).items()}


# -- where the optimizer holds what --------------------------------------------------------------------------------


@dataclass
class _Places:
    """The names of the parameters that must move, and where they are: number of the group, position in it."""

    optimizer: Optimizer
    names: Mapping[int, str]
    parameters: Mapping[str, nn.Parameter]
    other_names: Mapping[str, str]
    changed: frozenset[str]
    by_name: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def __post_init__(self) -> None:
        settled = {id(parameter) for parameter in self.parameters.values()}
        in_place = False
        for number, group in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(cast("list[Tensor]", group["params"])):
                if id(parameter) in settled:
                    in_place = True
                    continue
                name = self._name(parameter, group.get("param_names", ()), position)
                if name is not None:
                    self.by_name[name] = (number, position)
        if not self.by_name and not in_place:
            raise StateError(
                "none of the optimizer's parameters are the model's; build the optimizer on the model that was given "
                "to optimize, or with names: Adam(model.named_parameters())"
            )
        self.by_place = {place: name for name, place in self.by_name.items()}

    def _name(self, parameter: Tensor, group_names: Sequence[str], position: int) -> str | None:
        name = self.names.get(id(parameter))
        if name is None and group_names:
            name = group_names[position]
            known = name in self.parameters or name in self.changed or name in self.other_names
            name = name if known else None
        return None if name is None else self.other_names.get(name, name)

    def parameter(self, name: str) -> Tensor:
        number, position = self.by_name[name]
        return self.optimizer.param_groups[number]["params"][position]

    def state(self, name: str) -> dict[str, Any]:
        return self.optimizer.state.get(self.parameter(name), {})


# -- the move ------------------------------------------------------------------------------------------------------


Entry = tuple[Tensor, str | None]
"""A parameter in a group, and its name if the optimizer knows it."""


@dataclass
class _Move:
    """Everything that will change, worked out before anything does."""

    places: _Places
    families: Mapping[str, Family]
    parameters: Mapping[str, nn.Parameter]
    translate: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict[Tensor, dict[str, Any]])
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict[nn.Parameter, Tensor])

    def group(self, number: int) -> list[Entry]:
        """Return what a group will hold, in the model's order: saved states know parameters by position."""
        entries: list[Entry] = []
        group = self.places.optimizer.param_groups[number]
        names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
        for position, (parameter, given_name) in enumerate(zip(group["params"], names, strict=True)):
            name = self.places.by_place.get((number, position))
            if name is None:
                entries.append((parameter, given_name))
                continue
            sources, targets = self.families.get(name, ((name,), (name,)))
            self._check_members(sources, targets)
            if self._is_first(sources, number, position):
                self._translate(sources, targets)
                self._translate_gradients(sources, targets)
                entries.extend((self.parameters[target], target) for target in targets)
        return self._in_model_order(entries)

    def _in_model_order(self, entries: Sequence[Entry]) -> list[Entry]:
        rank = {id(parameter): rank for rank, parameter in enumerate(self.parameters.values())}
        ordered = iter(sorted((e for e in entries if id(e[0]) in rank), key=lambda entry: rank[id(entry[0])]))
        return [next(ordered) if id(entry[0]) in rank else entry for entry in entries]

    def _is_first(self, sources: Sequence[str], number: int, position: int) -> bool:
        return min(self.places.by_name[name] for name in sources) == (number, position)

    def _check_members(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        held = [name for name in sources if name in self.places.by_name]
        absent = [name for name in sources if name not in self.places.by_name]
        if absent:
            raise StateError(
                f"the optimizer has '{held[0]}' but not {listing(absent)}, and they are now one tensor '{targets[0]}'"
            )
        unknown = [name for name in targets if name not in self.parameters]
        if unknown:
            raise StateError(f"'{sources[0]}' would become {listing(unknown)}, but the model has no such parameter")
        for name in held:
            if self.places.by_name[name][0] != self.places.by_name[held[0]][0]:
                raise StateError(
                    f"'{held[0]}' and '{name}' are in different parameter groups, but they are now "
                    f"one tensor '{targets[0]}'"
                )

    def _translate(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Work out the state of a family's new parameters."""
        states = {name: self.places.state(name) for name in sources}
        first = states[sources[0]]
        for name, state in states.items():
            _check_same_kind(sources[0], first, name, state)
        for key in first:
            values = {name: state[key] for name, state in states.items()}
            for target, value in self._translated(key, values, targets).items():
                self.states.setdefault(self.parameters[target], {})[key] = value

    def _translate_gradients(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Work out the gradients of a family's new parameters; a member without one has one of zeros then."""
        held = {name: self.places.parameter(name) for name in sources}
        if all(parameter.grad is None for parameter in held.values()):
            return
        given = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in held.items()}
        for target, gradient in self._translated("gradient", given, targets).items():
            parameter = self.parameters[target]
            if parameter.grad is None:
                self.gradients[parameter] = gradient.to(parameter, copy=True)

    def _translated(self, key: str, values: Mapping[str, Any], targets: Sequence[str]) -> dict[str, Any]:
        if key in PER_TENSOR or not all(isinstance(value, Tensor) for value in values.values()):
            value = _equal_value(key, values)
            return {target: value.clone() if isinstance(value, Tensor) else value for target in targets}
        moved = self.translate(values)
        for target in targets:
            if moved[target].shape != self.parameters[target].shape:
                shapes = f"{list(moved[target].shape)}, the parameter {list(self.parameters[target].shape)}"
                raise StateError(f"the optimizer's '{key}' of '{target}' would have shape {shapes}")
        return {target: sharded_like(moved[target], self.parameters[target]) for target in targets}

    def commit(self, groups: Sequence[Sequence[Entry]]) -> None:
        """Put everything in place."""
        optimizer = self.places.optimizer
        for name in self.places.by_name:
            optimizer.state.pop(self.places.parameter(name), None)
        for group, entries in zip(optimizer.param_groups, groups, strict=True):
            group["params"][:] = [parameter for parameter, _ in entries]
            if "param_names" in group:
                group["param_names"][:] = [name for _, name in entries]
        optimizer.state.update(self.states)
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient


def _check_same_kind(first: str, first_state: Mapping[str, Any], name: str, state: Mapping[str, Any]) -> None:
    if first_state.keys() == state.keys():
        return
    key = next(iter(first_state.keys() ^ state.keys()))
    having, lacking = (first, name) if key in first_state else (name, first)
    raise StateError(f"the optimizer has '{key}' for '{having}' but not for '{lacking}', and they are now one tensor")


def _equal_value(key: str, values: Mapping[str, Any]) -> Any:
    (first, value), *rest = values.items()
    for name, other in rest:
        if type(other) is not type(value) or not bool(other == value):
            shown, others = (v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in (value, other))
            raise StateError(
                f"the optimizer's '{key}' of '{first}' is {shown} and that of '{name}' is {others}; they are now "
                "one tensor, so they must be equal"
            )
    return value
