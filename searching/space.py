"""What a search may choose: a preset, and passes with the options that they say are worth trying."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import FxoptError, UsageError
from ..known_passes import PRESET_OPTIONS, has_engines, pass_names
from ..passes.contract import Pass, format_value, option_types
from ..passes.pipeline import chosen_passes, find_pass
from ..passes.sites import Goal, Numerics, Phase
from .sensitivity import Sensitivities

__all__ = ["PRESET", "Choice", "Group", "Option", "Space", "can_be", "key_of", "passes_of", "pipeline_of"]

PRESET = "preset"
_PRESETS = {Phase.EVAL: ("inference", "compress"), Phase.TRAIN: ("training",)}
_KEEP = "keep"
_KEPT_SHARES = (0.0, 0.125, 0.25, 0.5)
"""Of the layers so many are left alone by a lossy pass, those first that matter most."""
_NOTHING = ""

Choice = Mapping[str, str]
"""Name of a group -> what is chosen of it, as text; "" leaves its pass out."""


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
            first == second or (option.is_ordered and name != _KEEP and _before(option, first, second))
            for (name, option), first, second in pairs
        )

    def keeping_more(self, text: str) -> list[str]:
        """Return what leaves more layers alone and is the same otherwise, the least first."""
        return self._beyond(text, _KEEP) if _KEEP in self.options else []

    def further(self, text: str) -> list[str]:
        """Return what has the next larger number of one option, and is the same otherwise."""
        numbers = [name for name, option in self.options.items() if option.is_ordered and name != _KEEP]
        return [each for name in numbers for each in self._beyond(text, name)[:1]]

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


class Space:
    """All pipelines that a search may try.

    Args:
        phase: whether models are optimized for evaluation or for training.
        goals: what is asked for: speed, memory or size.
        sensitivities: which layers lossy passes had better leave alone.
        trains: whether models can be trained: then passes that `prepare` training take part.
    """

    def __init__(
        self,
        phase: Phase,
        goals: Collection[Goal],
        sensitivities: Sensitivities | None = None,
        *,
        trains: bool = False,
    ) -> None:
        passes = _passes(phase, goals, sensitivities or Sensitivities({}, {}), trains=trains)
        groups = (_presets(phase, goals), *passes)
        self.groups = {group.name: group for group in groups}

    @property
    def start(self) -> Choice:
        """Return where a search starts: the first preset, and nothing else."""
        return {name: group.texts[0] for name, group in self.groups.items()}

    def singles(self) -> list[Choice]:
        """Return the pipelines that are tried before all others: each preset, then each pass beside the first one, with
        what it prepares.
        """
        alone = [{**group.prepares, name: text} for name, group in self.groups.items() for text in group.alone()]
        return [self.start, *({**self.start, **each} for each in alone)]

    def all(self) -> Iterator[Choice]:
        """Yield every choice, whether or not its passes go together."""
        for texts in itertools.product(*(group.texts for group in self.groups.values())):
            yield dict(zip(self.groups, texts, strict=True))

    def near(self, choices: Iterable[Choice]) -> Iterator[Choice]:
        """Yield what differs from one of some choices in one group."""
        for choice in choices:
            for name, group in self.groups.items():
                yield from ({**choice, name: text} for text in group.texts)

    def keeping_more(self, choice: Choice) -> list[Choice]:
        """Return what leaves more layers alone than a choice does, in one pass, and is the same otherwise."""
        return [
            {**choice, name: text} for name, group in self.groups.items() for text in group.keeping_more(choice[name])
        ]

    def further(self, choice: Choice) -> list[Choice]:
        """Return what has the next larger number of one option of one pass, and is the same otherwise."""
        return [{**choice, name: text} for name, group in self.groups.items() for text in group.further(choice[name])]


def key_of(choice: Choice) -> tuple[str, ...]:
    """Return a choice as what can be looked up."""
    return tuple(f"{name}={text}" for name, text in sorted(choice.items()) if text)


def pipeline_of(choice: Choice) -> str:
    """Return a choice as the text of a pipeline; "" is the model as it is."""
    return ",".join(_listed(choice))


def passes_of(choice: Choice) -> tuple[Pass, ...]:
    """Return the passes of a choice in an order that can be; UsageError where they do not go together."""
    passes = chosen_passes(list(_listed(choice))) if any(choice.values()) else ()
    names = [each.name for each in passes]
    for name, text in choice.items():
        if text and names.count(name) > 1:
            raise UsageError(f"the preset has {name!r} with other options already")
    for each in passes:
        if each.prepares and not any(_has(other, each.prepares) for other in passes):
            raise UsageError(f"{each.name!r} prepares {each.prepares!r}, which is not there")
    return passes


def _has(given: Pass, text: str) -> bool:
    """Say whether a pass is the one that a text names, with the options that the text gives."""
    (wanted,) = chosen_passes(text)
    plain = type(wanted)()
    options = {name for name in option_types(type(wanted)) if getattr(wanted, name) != getattr(plain, name)}
    return type(given) is type(wanted) and all(getattr(given, name) == getattr(wanted, name) for name in options)


def can_be(choice: Choice) -> bool:
    """Say whether the passes of a choice go together."""
    try:
        passes_of(choice)
    except UsageError:
        return False
    return True


def _listed(choice: Choice) -> Iterator[str]:
    """Yield what is chosen: passes that change numbers, each behind those it needs, the preset, and the others."""
    left = {name: find_pass(name) for name, text in choice.items() if name != PRESET and text}
    last = [name for name, kind in left.items() if kind.numerics.keeps_function]
    first = [name for name in left if name not in last]
    while first:
        ready = (
            name for name in first
            if not any(name in left[other].before or other in left[name].after for other in first if other != name)
        )  # fmt: skip
        name = next(ready, first[0])
        first.remove(name)
        yield choice[name]
    yield from filter(None, [choice[PRESET], *(choice[name] for name in last)])


def _presets(phase: Phase, goals: Collection[Goal]) -> Group:
    """Return the presets of a phase, with each of their options; where bytes count, also none of them."""
    texts: list[str] = []
    for name in _PRESETS[phase]:
        options = dict(PRESET_OPTIONS.get(name, {}))
        if not has_engines():
            options.pop("engine", None)
        for values in itertools.product(*options.values()):
            chosen = ",".join(f"{option}={value}" for option, value in zip(options, values, strict=True))
            texts.append(f"{name}{{{chosen}}}" if chosen else name)
    return Group(PRESET, (*texts, *([] if set(goals) <= {Goal.SPEED} else [_NOTHING])))


def _passes(phase: Phase, goals: Collection[Goal], sensitivities: Sensitivities, *, trains: bool) -> Iterator[Group]:
    """Yield the passes that take part, fxopt's own and others."""
    for name in pass_names():
        try:
            kind = find_pass(name)
        except (FxoptError, ImportError):  # `list_passes` tells of it
            continue
        options = kind.searched(phase, goals)
        if options is None or kind.phase not in (phase, Phase.BOTH) or (kind.prepares and not trains):
            continue
        removes = kind.numerics is Numerics.SEMANTIC and not kind.prepares
        layers = sensitivities.units if removes else sensitivities.bits
        if _KEEP in option_types(kind) and layers and not kind.numerics.keeps_function:
            options = {**options, _KEEP: _most_sensitive(layers)}
        yield _group(name, kind, options)


def _before(option: Option, one: str, other: str) -> bool:
    return option.texts.index(one) < option.texts.index(other)


def _most_sensitive(layers: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return which layers are left alone: none, and some shares of those that matter most."""
    order = sorted(layers, key=lambda name: layers[name], reverse=True)
    counts = dict.fromkeys(math.ceil(share * len(order)) for share in _KEPT_SHARES)
    return [tuple(order[:count]) for count in counts if count < len(order)]


def _group(name: str, kind: type[Pass], values: Mapping[str, Sequence[Any]]) -> Group:
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
    return Group(name, (_NOTHING, *dict.fromkeys(made.values())), options, made, prepares)


def _option(name: str, values: Sequence[Any], kind: Any) -> Option:
    """Return an option; of numbers one in the middle is tried first."""
    texts = tuple(format_value(each, kind) for each in values)
    are_numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values)
    if name == _KEEP:
        return Option(texts, is_ordered=True, first=texts[:1])
    return Option(texts, are_numbers, texts[len(texts) // 2 :][:1] if are_numbers else texts)
