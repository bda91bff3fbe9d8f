"""What is decided together in a search: a preset, or a pass with its options."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import UsageError
from ..passes.contract import Pass, format_value, option_types
from ..passes.pipeline import chosen_passes

__all__ = ["BUDGET", "KEEP", "NOTHING", "Group", "Option", "group_of"]

KEEP, BUDGET = "keep", "budget"
"""Options of lossy passes that a search gives values to: which layers stay, and which error may be made."""
NOTHING = ""


@dataclass(frozen=True)
class Option:
    """The values of an option, as texts: those that have an order, and those that are tried before others."""

    texts: tuple[str, ...]
    is_ordered: bool
    first: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """What is decided together: the preset, or a pass with its options; the first of `texts` is where a search starts.

    Attributes:
        name: "preset", or that of the pass.
        texts: what can be chosen, each as a pipeline has it.
        options: of a pass.
        by_options: values of the options -> the text.
        prepares: the group of the pass that takes over what was trained, with its text.
    """

    name: str
    texts: tuple[str, ...]
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    by_options: Mapping[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])
    prepares: Mapping[str, str] = field(default_factory=dict[str, str])

    def alone(self) -> Sequence[str]:
        """Return what is tried of it before all else."""
        if not self.options:
            return self.texts[1:]
        few = itertools.product(*(option.first for option in self.options.values()))
        return [self.by_options[values] for values in few if values in self.by_options]

    def values_of(self, text: str) -> tuple[str, ...]:
        """Return the values of the options that a text stands for."""
        return next((values for values, other in self.by_options.items() if other == text), ())

    def is_milder(self, one: str, other: str) -> bool:
        """Say whether a text changes no more than another: numbers are no further on, all else is equal."""
        if not self.options or not one or not other:
            return one == other
        pairs = zip(self.options.items(), self.values_of(one), self.values_of(other), strict=True)
        return all(
            first == second or (option.is_ordered and name != KEEP and _before(option, first, second))
            for (name, option), first, second in pairs
        )

    def is_alike(self, one: str, other: str) -> bool:
        """Say whether two texts differ in what has an order only."""
        pairs = zip(self.options.values(), self.values_of(one), self.values_of(other), strict=False)
        return bool(self.options and one and other) and all(
            first == second or option.is_ordered for option, first, second in pairs
        )

    def keeping_more(self, text: str) -> list[str]:
        """Return what leaves more layers alone and is the same otherwise, the least first."""
        return self._beyond(text, KEEP) if KEEP in self.options else []

    def further(self, text: str) -> list[str]:
        """Return what has the next larger number of one option, and is the same otherwise."""
        return [each for name in self._numbers for each in self._beyond(text, name)[:1]]

    def milder(self, text: str) -> list[str]:
        """Return what has the next smaller number of one option, and is the same otherwise."""
        return [each for each in self.texts if text and text in self.further(each)]

    def having(self, values: Mapping[str, str]) -> list[str]:
        """Return what is tried first of the texts that have these values of options."""
        return [
            text
            for text in self.alone()
            if values.items() <= dict(zip(self.options, self.values_of(text), strict=False)).items()
        ]

    @property
    def _numbers(self) -> list[str]:
        return [name for name, option in self.options.items() if option.is_ordered and name != KEEP]

    def _beyond(self, text: str, name: str) -> list[str]:
        """Return what has later values of an option, the next one first."""
        values = self.values_of(text)
        if not values:
            return []
        place, texts = list(self.options).index(name), self.options[name].texts
        found = ((*values[:place], each, *values[place + 1 :]) for each in texts[texts.index(values[place]) + 1 :])
        return [self.by_options[each] for each in found if each in self.by_options]

    def is_less(self, one: str, other: str) -> bool:
        """Say whether a text does a part of what another does: as `is_milder`, and it may leave more layers alone."""
        return one == other or any(self.is_milder(one, each) for each in (other, *self.keeping_more(other)))


def group_of(name: str, kind: type[Pass], values: Mapping[str, Sequence[Any]]) -> Group:
    """Return a pass with each combination of its values that it accepts; UsageError where it accepts none."""
    kinds, made, problem = option_types(kind), dict[tuple[str, ...], str](), None
    unknown = next((option for option in values if option not in kinds), None)
    if unknown is not None:
        raise UsageError(f"pass {name!r}: searched() names {unknown!r}, which is no option of it")
    options = {option: _option(option, each, kinds[option]) for option, each in values.items()}
    texts = itertools.product(*(option.texts for option in options.values()))
    for given, written in zip(itertools.product(*values.values()), texts, strict=True):
        try:
            made[written] = str(cast("Any", kind)(**dict(zip(options, given, strict=True))))
        except UsageError as error:
            problem = error
    if not made:
        raise UsageError(f"pass {name!r}: no values of searched() go together: {problem}")
    prepares = {each.name: str(each) for each in chosen_passes(kind.prepares)} if kind.prepares else {}
    return Group(name, (NOTHING, *dict.fromkeys(made.values())), options, made, prepares)


def _option(name: str, values: Sequence[Any], kind: Any) -> Option:
    """Return an option; of numbers one in the middle is tried first, of budgets the largest."""
    texts = tuple(format_value(each, kind) for each in values)
    are_numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values)
    if name in (KEEP, BUDGET):
        return Option(texts, is_ordered=True, first=texts[:1] if name == KEEP else texts[-1:])
    return Option(texts, are_numbers, texts[len(texts) // 2 :][:1] if are_numbers else texts)


def _before(option: Option, one: str, other: str) -> bool:
    return option.texts.index(one) < option.texts.index(other)
