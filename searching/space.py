"""What a search may choose: a preset, and passes with the options that they say are worth trying."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..errors import FxoptError, UsageError
from ..known_passes import PRESET_OPTIONS, has_engines, pass_names
from ..passes.contract import Pass, format_value, option_types
from ..passes.pipeline import chosen_passes, find_pass
from ..passes.sites import Goal, Phase

__all__ = ["Choice", "Group", "Space", "are_numbers", "key_of", "passes_of", "pipeline_of"]

PRESET = "preset"
_PRESETS = {Phase.EVAL: ("inference", "compress"), Phase.TRAIN: ("training",)}
_NOTHING = ""

Choice = Mapping[str, str]
"""Name of a group -> what is chosen of it, as text; "" leaves its pass out."""


@dataclass(frozen=True)
class Group:
    """What is decided together: the preset, or a pass with its options; the first of `texts` is where a search starts.

    Attributes:
        name: "preset", or that of the pass.
        texts: what can be chosen, each as a pipeline has it.
        options: option -> its values, each as text, for a pass; the texts are their products.
    """

    name: str
    texts: tuple[str, ...]
    options: Mapping[str, Sequence[str]]
    by_options: Mapping[tuple[str, ...], str]

    def alone(self) -> Sequence[str]:
        """Return what is tried of it first: of options that are numbers one in the middle, all of the others."""
        if not self.options:
            return self.texts[1:]
        few = [
            values if not are_numbers(values) else values[len(values) // 2 :][:1] for values in self.options.values()
        ]
        return [self.by_options[each] for each in itertools.product(*few) if each in self.by_options]


class Space:
    """All pipelines that a search may try.

    Args:
        phase: whether models are optimized for evaluation or for training.
        goals: what is asked for: speed, memory or size.
    """

    def __init__(self, phase: Phase, goals: Collection[Goal]) -> None:
        self.groups = {group.name: group for group in (_presets(phase, goals), *_passes(phase, goals))}

    @property
    def start(self) -> Choice:
        """Return where a search starts: the first preset, and nothing else."""
        return {name: group.texts[0] for name, group in self.groups.items()}

    def singles(self) -> list[Choice]:
        """Return the pipelines that are tried before all others: each preset, then each pass beside the first one."""
        alone = [(name, text) for name, group in self.groups.items() for text in group.alone()]
        return [self.start, *({**self.start, name: text} for name, text in alone)]

    def all(self) -> Iterator[Choice]:
        """Yield every choice, whether or not its passes go together."""
        for texts in itertools.product(*(group.texts for group in self.groups.values())):
            yield dict(zip(self.groups, texts, strict=True))


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
    return passes


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
    return Group(PRESET, (*texts, *([] if set(goals) <= {Goal.SPEED} else [_NOTHING])), {}, {})


def _passes(phase: Phase, goals: Collection[Goal]) -> Iterator[Group]:
    """Yield the passes that take part, fxopt's own and others."""
    for name in pass_names():
        try:
            kind = find_pass(name)
        except (FxoptError, ImportError):  # `list_passes` tells of it
            continue
        options = kind.searched(phase, goals)
        if options is not None and kind.phase in (phase, Phase.BOTH):
            yield _group(name, kind, options)


def _group(name: str, kind: type[Pass], options: Mapping[str, Sequence[Any]]) -> Group:
    """Return a pass with each combination of its values that it accepts; UsageError where it accepts none."""
    kinds, made, problem = option_types(kind), dict[tuple[str, ...], str](), None
    unknown = next((option for option in options if option not in kinds), None)
    if unknown is not None:
        raise UsageError(f"pass {name!r}: searched() names {unknown!r}, which is no option of it")
    words = {option: tuple(format_value(each, kinds[option]) for each in values) for option, values in options.items()}
    for values in itertools.product(*options.values()):
        try:
            pass_ = cast("Any", kind)(**dict(zip(options, values, strict=True)))
        except UsageError as error:
            problem = error
            continue
        texts = tuple(format_value(each, kinds[option]) for option, each in zip(options, values, strict=True))
        made[texts] = str(pass_)
    if not made:
        raise UsageError(f"pass {name!r}: no values of searched() go together: {problem}")
    return Group(name, (_NOTHING, *dict.fromkeys(made.values())), words, made)


def are_numbers(values: Sequence[str]) -> bool:
    """Say whether the values of an option have an order."""
    try:
        return bool([float(each) for each in values])
    except ValueError:
        return False
