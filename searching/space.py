"""What a search may choose: a preset, and passes with the options that they say are worth trying."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from ..compat.packed import why_no_packing
from ..errors import FxoptError, UsageError
from ..known_passes import PRESET_OPTIONS, has_engines, pass_names
from ..passes.contract import Pass, option_types
from ..passes.pipeline import chosen_passes, find_pass
from ..passes.sites import Goal, Numerics, Phase
from .groups import BUDGET, KEEP, NOTHING, Group, group_of
from .sensitivity import Sensitivities

__all__ = ["PRESET", "Choice", "Space", "can_be", "key_of", "passes_of", "pipeline_of"]

PRESET = "preset"
_FOR_BYTES = "compress"
_PRESETS = {Phase.EVAL: ("inference", _FOR_BYTES), Phase.TRAIN: ("training",)}
_ENGINE = "delegate{dtype=int8}"
"""What an engine computes by itself, layers of `int8_static` in 8 bits: a preset has other passes, too."""
_KEPT_SHARES = (0.0, 0.125, 0.25, 0.5)
"""Of the layers so many are left alone by a lossy pass, those first that matter most."""
_STRONG = ((_ENGINE, "quantize", {"scheme": "int8_static"}),)
"""Presets with passes, by their options, that are tried at once: alone, each says little of both together. ResNet-18 is
3.1x as fast so without VNNI, 1.5x by `inference` and 2.1x by the pass alone (docs/benchmarks.md)."""
_PARTS = (0.5, 1.0)
"""Budgets of lossy passes, as parts of the error that is allowed."""

Choice = Mapping[str, str]
"""Name of a group -> what is chosen of it, as text; "" leaves its pass out."""


class Space:
    """All pipelines that a search may try.

    Args:
        phase: whether models are optimized for evaluation or for training.
        goals: what is asked for: speed, memory or size.
        sensitivities: which layers lossy passes had better leave alone.
        error: what results may be off by; infinity where nothing says.
        trains: whether models can be trained: then passes that `prepare` training take part.
    """

    def __init__(
        self,
        phase: Phase,
        goals: Collection[Goal],
        sensitivities: Sensitivities | None = None,
        *,
        error: float = math.inf,
        trains: bool = False,
    ) -> None:
        passes = _passes(phase, goals, sensitivities or Sensitivities({}, {}), error=error, trains=trains)
        groups = (_presets(phase, goals), *passes)
        self.groups = {group.name: group for group in groups}
        self._is_exact = error < math.inf and not trains

    @property
    def start(self) -> Choice:
        """Return where a search starts: the first preset, and nothing else."""
        return {name: group.texts[0] for name, group in self.groups.items()}

    def singles(self) -> list[Choice]:
        """Return the pipelines that are tried before all others: the first preset, what is known to be strong together,
        then one of each group in turn: presets, and passes beside the first one, with what they prepare. Where results
        are to stay as they are, passes that change the function come last.
        """
        strong = [
            {**self.start, PRESET: preset, name: text}
            for preset, name, values in _STRONG if preset in self.groups[PRESET].texts and name in self.groups
            for text in self.groups[name].having(values)
        ]  # fmt: skip
        late = [name for name in self.groups if self._is_exact and _changes_function(name)]
        in_turn = itertools.zip_longest(*(self._alone(name) for name in self.groups if name not in late))
        last = (self._alone(name) for name in late)
        return [self.start, *strong, *filter(None, itertools.chain.from_iterable((*in_turn, *last)))]

    def _alone(self, name: str) -> list[Choice]:
        """Return what is tried of one group beside the first preset."""
        group = self.groups[name]
        return [{**self.start, **group.prepares, name: text} for text in group.alone()]

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

    def milder(self, choice: Choice) -> list[Choice]:
        """Return what has the next smaller number of one option of one pass, and is the same otherwise."""
        return [{**choice, name: text} for name, group in self.groups.items() for text in group.milder(choice[name])]


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
    """Return the presets of a phase, with each of their options; where bytes count, also none of them. Those with an
    engine come first, and last what is for bytes alone, and what this machine has no instructions for.
    """
    is_for_speed = set(goals) <= {Goal.SPEED}
    texts: list[str] = []
    for name in _PRESETS[phase]:
        options = {
            option: list(values)[:: -1 if option == "engine" else 1]
            for option, values in PRESET_OPTIONS.get(name, {}).items()
        }
        if not has_engines():
            options.pop("engine", None)
        for values in itertools.product(*options.values()):
            chosen = ",".join(f"{option}={value}" for option, value in zip(options, values, strict=True))
            texts.append(f"{name}{{{chosen}}}" if chosen else name)
    texts += [_ENGINE] if phase is Phase.EVAL and has_engines() else []
    texts.sort(key=lambda text: (_is_slow(text), is_for_speed and text == _FOR_BYTES))
    return Group(PRESET, (*texts, *([] if is_for_speed else [NOTHING])))


def _changes_function(name: str) -> bool:
    return name != PRESET and find_pass(name).numerics is Numerics.SEMANTIC


def _is_slow(text: str) -> bool:
    return "bfloat16" in text and bool(why_no_packing(torch.bfloat16))


def _passes(
    phase: Phase, goals: Collection[Goal], sensitivities: Sensitivities, *, error: float, trains: bool
) -> Iterator[Group]:
    """Yield the passes that take part, fxopt's own and others."""
    for name in pass_names():
        try:
            kind = find_pass(name)
        except (FxoptError, ImportError):  # `list_passes` tells of it
            continue
        options = kind.searched(phase, goals)
        if options is None or kind.phase not in (phase, Phase.BOTH) or (kind.prepares and not trains):
            continue
        if BUDGET in option_types(kind) and 0 < error <= 1 and not kind.numerics.keeps_function:
            options = {**options, BUDGET: [part * error for part in _PARTS]}
        removes = kind.numerics is Numerics.SEMANTIC and not kind.prepares
        layers = sensitivities.units if removes else sensitivities.bits
        if KEEP in option_types(kind) and layers and not kind.numerics.keeps_function:
            options = {**options, KEEP: _most_sensitive(layers)}
        yield group_of(name, kind, options)


def _most_sensitive(layers: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Return which layers are left alone: none, and some shares of those that matter most."""
    order = sorted(layers, key=lambda name: layers[name], reverse=True)
    counts = dict.fromkeys(math.ceil(share * len(order)) for share in _KEPT_SHARES)
    return [tuple(order[:count]) for count in counts if count < len(order)]
