"""How names and tensors change from the user's model to the rewritten one: composable, and exact in both directions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor

from ...errors import StateError, StateWarning
from .known_steps import step_from_json
from .pieces import Piece
from .state_steps import StateStep

__all__ = ["StateMap"]

SCHEMA_VERSION = 1
_ZEROS = (
    "the state dict has the original shapes, with zeros in the places of what a lossy pass cut away, in {}: the "
    "original computes something else with it; fxopt.save_compact(model, folder) writes the sizes that are left, and "
    "fxopt.save an archive"
)


@dataclass(frozen=True)
class StateMap:
    """Translate dicts of tensors (weights, gradients, moments) between the user's names and the rewritten model's.
    Names that no step mentions pass through both ways.
    """

    steps: tuple[StateStep, ...] = ()  # in the order of the rewrites; each reads the names that those before it left
    aliases: tuple[tuple[str, str], ...] = ()  # (other name, name) of tied tensors, both original
    names: tuple[str, ...] = ()  # the original state dict's names, in its order; empty where the order does not matter

    def __post_init__(self) -> None:
        made: set[str] = set()
        gone: set[str] = set()
        for step in self.steps:
            for name in step.sources:
                if name in gone:
                    raise StateError(f"'{name}' is gone when the step '{step}' reads it")
            made.difference_update(step.sources)
            gone.update(step.sources)
            for name in step.targets:
                if name in made:
                    raise StateError(f"'{name}' exists when the step '{step}' makes it")
            made.update(step.targets)
            gone.difference_update(step.targets)

    # -- translation -----------------------------------------------------------------------------------------------

    def forward(
        self,
        state: Mapping[str, Tensor],
        current: Mapping[str, Tensor] | None = None,
        *,
        strict: bool = True,
        differentiable: bool = False,
    ) -> dict[str, Tensor]:
        """Return `state`, which has original names, under new names: the new tensors to which it contributed.

        Given, `current` (all tensors of the model by new name) supplies absent members, and what comes in is checked
        against it. `strict` refuses absent names, and with `current` unexpected ones. Where `differentiable`, gradients
        flow from merged tensors; else these require none. Raises a StateError that names what is wrong by original
        names.
        """
        given = self.resolve_aliases(state)
        known = {} if current is None else self.backward(current, warn=False)
        if current is not None:
            kept = self.kept_names.intersection(given).intersection(current)
            known |= {name: current[name] for name in kept if current[name].shape == given[name].shape}
            check_fits(given, known, strict=strict, optional=self._optional(given))
        elif strict:
            self._check_complete(given)
        values = self._completed(given, known)
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            for step in self.steps:
                _apply(values, step.sources, step.targets, step.forward, step.is_old if step.keeps_names else None)
        for alias, name in self.aliases:
            if name in values and name in self.kept_names and alias not in self.sources:
                values[alias] = values[name]
        return _in_order(values, current or ())

    def backward(self, state: Mapping[str, Tensor], *, warn: bool = True) -> dict[str, Tensor]:
        """Return `state`, which has new names, under original names in their order, as views where possible.

        What a lossy step has cut away comes back as zeros, which `warn` says. Where a step keeps the name, original
        tensors pass through. Raises a StateError if a tensor does not have the shape that the steps gave it.
        """
        originals, zeros = self.with_zeros(state)
        if warn:
            warn_of_zeros(zeros, stacklevel=3)
        return originals

    def with_zeros(self, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Return what `backward` does, and the original names of what has zeros in the places of what is gone."""
        values = dict(state)
        zeros: frozenset[str] = frozenset()
        for step in reversed(self.steps):
            applied = _apply(
                values, step.targets, step.sources, step.backward, step.is_new if step.keeps_names else None
            )
            if applied and ((step.lossy and not step.idempotent) or not zeros.isdisjoint(step.targets)):
                zeros = zeros.difference(step.targets).union(step.sources)
        for alias, name in self.aliases:
            if name in values and name in self.sources and (alias not in values or name in self.kept_names):
                values[alias] = values[name]
        originals = _in_order(values, self.names)
        return originals, [name for name in originals if name in zeros]

    # -- parts -----------------------------------------------------------------------------------------------------

    def check(self, given: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
        """Raise a StateError that names all of `given` that does not fit `known`; both have original names."""
        check_fits(given, known, strict=True, optional=self._optional(given))

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all original names of the tensor that has the original name `name`, this one first."""
        first = dict(self.aliases).get(name, name)
        return tuple(dict.fromkeys([name, first, *(alias for alias, same in self.aliases if same == first)]))

    def pieces(self, piece: Piece, before: int | None = None) -> list[Piece] | None:
        """Return the parts of original tensors that make up a part of a new one; None where a step needs the whole.
        `before`: of the steps, only so many are undone.
        """
        count = len(self.steps) if before is None else before
        last = next((number for number in reversed(range(count)) if piece.name in self.steps[number].targets), None)
        if last is None:
            return [piece]
        found: list[Piece] = []
        parts = self.steps[last].parts(piece)
        for part in parts or ():
            inside = self.pieces(part, last)
            if inside is None:
                return None
            found += inside
        return None if parts is None else found

    # -- composition -----------------------------------------------------------------------------------------------

    def compose(self, later: StateMap) -> StateMap:
        """Return the map that does what this one does, and then what `later` does."""
        kept = tuple(pair for pair in later.aliases if not self.targets.intersection(pair) and pair not in self.aliases)
        return StateMap(self.steps + later.steps, self.aliases + kept, self.names or later.names)

    def below(self, owner: str) -> StateMap:
        """Return the same map for a model in which this one's is the module called `owner` ("" is the model itself)."""
        if not owner:
            return self
        prefix = f"{owner}."
        return StateMap(
            tuple(step.renamed(lambda name: prefix + name) for step in self.steps),
            tuple((prefix + alias, prefix + name) for alias, name in self.aliases),
            tuple(prefix + name for name in self.names),
        )

    def apart(self) -> dict[str, StateMap]:
        """Return the map of each module that is the innermost one around tensors that moved, by its qualified name."""
        owners = {target: _common_owner((target, *self._all_names(names))) for target, names in self.origins.items()}
        return {owner: self._of_owner(owner, owners) for owner in dict.fromkeys(owners.values())}

    def _all_names(self, names: Sequence[str]) -> list[str]:
        """Return some original names, and those that are tied to them."""
        return [*names, *(alias for alias, name in self.aliases if name in names)]

    def _of_owner(self, owner: str, owners: Mapping[str, str]) -> StateMap:
        """Return the part of the map that is one module's, by the names that it knows."""
        prefix = f"{owner}." if owner else ""
        moved = {name for target, names in self.origins.items() if owners[target] == owner for name in names}
        made: dict[str, tuple[str, ...]] = {}
        steps: list[StateStep] = []
        for step in self.steps:
            roots = tuple(root for name in step.sources for root in made.pop(name, (name,)))
            made.update(dict.fromkeys(step.targets, roots))
            if moved.issuperset(roots):
                steps.append(step.renamed(lambda name: name.removeprefix(prefix)))
        tied = (
            (alias.removeprefix(prefix), name.removeprefix(prefix)) for alias, name in self.aliases if name in moved
        )
        names = (name.removeprefix(prefix) for name in self.names if name.startswith(prefix))
        return StateMap(tuple(steps), tuple(tied), tuple(names))

    def ordered(self, names: Iterable[str], aliases: Iterable[tuple[str, str]] = ()) -> StateMap:
        """Return the same map, with the original model's names in order and its tied tensors."""
        return replace(self, names=tuple(names), aliases=tuple(aliases))

    # -- names -----------------------------------------------------------------------------------------------------

    @cached_property
    def origins(self) -> dict[str, tuple[str, ...]]:
        """Return new name -> the original names it is made of, for the names that the steps made."""
        made: dict[str, tuple[str, ...]] = {}
        for step in self.steps:
            roots = [root for name in step.sources for root in made.pop(name, (name,))]
            made.update(dict.fromkeys(step.targets, tuple(dict.fromkeys(roots))))
        return made

    @cached_property
    def sources(self) -> frozenset[str]:
        """Return the original names that the steps use up."""
        return frozenset(name for names in self.origins.values() for name in names)

    @cached_property
    def kept_names(self) -> frozenset[str]:
        """Return the original names that tensors have again after the steps."""
        return frozenset(self.sources & self.targets)

    @property
    def is_lossy(self) -> bool:
        """Say whether the way back cannot give all that was there."""
        return any(step.lossy for step in self.steps)

    @cached_property
    def targets(self) -> frozenset[str]:
        """Return the new names that the steps make."""
        return frozenset(self.origins)

    def original_names(self, name: str) -> tuple[str, ...]:
        """Return the original names of the tensor that is now called `name`."""
        return self.origins.get(name, (name,))

    # -- forms -----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the map as plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "steps": [step.to_json() for step in self.steps],
            "aliases": dict(self.aliases),
            "names": list(self.names),
        }

    @classmethod
    def from_json(cls, data: object, trust: Sequence[str] | bool = ()) -> StateMap:
        """Return the map that `to_json` described; `trust` as of `step_from_json`.
        Raises a StateError if it is malformed, of a newer version, or a step in it is not trusted.
        """
        fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        version = fields.get("schema_version")
        if version != SCHEMA_VERSION:
            raise StateError(f"a state map of version {version!r}; this fxopt reads version {SCHEMA_VERSION}")
        steps, aliases, names = (fields.get(key) for key in ("steps", "aliases", "names"))
        if not isinstance(steps, list) or not isinstance(aliases, dict) or not isinstance(names, list):
            raise StateError("a state map has a list of steps, an object of aliases and a list of names")
        pairs = cast("dict[str, Any]", aliases).items()
        if not all(isinstance(name, str) for name in (*(name for _, name in pairs), *cast("list[Any]", names))):
            raise StateError("a state map's names and aliases are strings")
        made = (step_from_json(step, trust) for step in cast("list[object]", steps))
        return cls(tuple(made), tuple(pairs), tuple(cast("list[str]", names)))

    def __str__(self) -> str:
        lines = [str(step) for step in self.steps] + [f"tied {alias} = {name}" for alias, name in self.aliases]
        return "\n".join(lines) or "unchanged"

    # -- inside ----------------------------------------------------------------------------------------------------

    def resolve_aliases(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Let either name of a tied tensor stand for both where a step uses one of them up."""
        given = dict(state)
        for alias, name in self.aliases:
            if not self.sources.intersection((alias, name)):
                continue
            if alias in given and name in given and not _same(given[alias], given[name]):
                raise StateError(f"'{alias}' and '{name}' are one tensor in the model, but differ in the state dict")
            for one, other in ((alias, name), (name, alias)):
                if one in given and other not in given and other in self.sources:
                    given[other] = given[one]
            if alias not in self.sources:
                given.pop(alias, None)
        return given

    def _optional(self, given: Mapping[str, Tensor]) -> set[str]:
        """Return the names whose absence is no loss, since the tensor is there under its other name."""
        pairs = [pair for pair in self.aliases if any(name in given for name in pair)]
        return {name for pair in pairs for name in pair}

    def _check_complete(self, given: Mapping[str, Tensor]) -> None:
        missing = [name for names in self.origins.values() for name in names if name not in given]
        if missing:
            raise StateError(f"the state dict does not fit the model; missing: {listing(missing)}")

    def _completed(self, given: dict[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add what is absent of the tensors that `given` has a part of."""
        values = dict(given)
        for target, names in self.origins.items():
            absent = [name for name in names if name not in given]
            if len(absent) == len(names) or not absent:
                continue
            if any(name not in known for name in absent):
                raise StateError(f"{listing(absent)} missing: '{target}' cannot be computed from the others alone")
            given_one = next(given[name] for name in names if name in given)
            values.update({name: known[name].to(given_one) for name in absent})
        return values


def warn_of_zeros(names: Sequence[str], stacklevel: int) -> None:
    """Warn that tensors have zeros in the places of what is gone, if there are any."""
    if names:
        warnings.warn(_ZEROS.format(listing(names)), StateWarning, stacklevel=stacklevel)


def check_fits(
    given: Mapping[str, Tensor], known: Mapping[str, Tensor], *, strict: bool, optional: Iterable[str] = ()
) -> None:
    """Raise a StateError that names all tensors that are missing, unexpected or of another shape than the model's."""
    faults: list[str] = []
    missing = [name for name in known if name not in given and name not in set(optional)]
    unexpected = [name for name in given if name not in known]
    if strict and missing:
        faults.append(f"missing: {listing(missing)}")
    if strict and unexpected:
        faults.append(f"unexpected: {listing(unexpected)}")
    faults.extend(
        f"'{name}' has shape {list(given[name].shape)}, the model's has {list(tensor.shape)}"
        for name, tensor in known.items()
        if name in given and given[name].shape != tensor.shape
    )
    if faults:
        raise StateError("the state dict does not fit the model; " + "; ".join(faults))


_MOST_NAMES = 4
"""So many names are written out in a message."""


def listing(names: Sequence[str]) -> str:
    """Return names for a message, the first few of many."""
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _common_owner(names: Sequence[str]) -> str:
    """Return the module in which all of some tensors are, as far inside as possible."""
    paths = [name.split(".")[:-1] for name in names]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common)


def _apply(
    values: dict[str, Tensor],
    sources: Sequence[str],
    targets: Sequence[str],
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    is_due: Callable[[Sequence[Tensor]], bool] | None,
) -> bool:
    """Put results in the places of what they are made of; say whether that was all there, and not done already."""
    if any(name not in values for name in sources):
        return False
    given = [values[name] for name in sources]
    if is_due is not None and not is_due(given):
        return False
    results = function(given)
    for name in sources:
        del values[name]
    for name, tensor in zip(targets, results, strict=True):
        if name in values:
            raise StateError(f"'{name}' comes from the rewrite and cannot be given as well")
        values[name] = tensor
    return True


def _in_order(values: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    known = {name: values[name] for name in names if name in values}
    return known | values


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other or (one.device != other.device and "meta" in (one.device.type, other.device.type)):
        return True
    return one.shape == other.shape and bool(torch.equal(one, other.to(one.device)))
