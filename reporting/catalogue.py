"""The passes there are, as text and as JSON."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..known_passes import PRESET_OPTIONS, PRESETS
from ..passes.pipeline import PassInfo, available, find_pass

__all__ = ["catalogue", "catalogue_json"]


def catalogue(name: str | None = None) -> str:
    """List passes and presets in a line each, or say all about the pass or the preset called `name`.

    Raises:
        UsageError: there is none.
    """
    if name is not None and name in PRESETS:
        members = {member: dataclasses.replace(_info(member), name=member) for member in PRESETS[name]}
        return _lines(name, members, {}) + "".join(_choices(name))
    return _page(name) if name is not None else _lines("passes", available(), PRESETS)


def _lines(title: str, infos: Mapping[str, PassInfo], presets: Mapping[str, Sequence[str]]) -> str:
    width = max(map(len, [*infos, *presets])) + 2
    lines = [title, *_indented([f"{info.name:<{width}}{info.problem or info.summary}" for info in infos.values()])]
    if presets:
        named = [f"{preset:<{width}}{','.join(members)}{_options(preset)}" for preset, members in presets.items()]
        lines += ["presets", *_indented(named)]
    return "\n".join(lines) + "\n"


def _options(preset: str) -> str:
    """Return the options that a preset takes, with their values."""
    options = PRESET_OPTIONS.get(preset, {}).items()
    return "".join(f"  ({option}={', '.join(values)})" for option, values in options)


def _choices(preset: str) -> Iterator[str]:
    """Yield the options of a preset, with what each value puts in the place of passes."""
    for option, values in PRESET_OPTIONS.get(preset, {}).items():
        yield f"{option}={next(iter(values))}\n"
        for value, instead in values.items():
            changed = [f"{','.join(passes)} in the place of {member}" for member, passes in instead.items()]
            yield f"  {value:<10}{'; '.join(changed) or 'as above'}\n"


def catalogue_json(name: str | None = None) -> dict[str, Any]:
    """Return what `catalogue` says as plain JSON values."""
    presets = {preset: list(members) for preset, members in PRESETS.items()}
    if name in presets:
        infos = {info.name: info for info in map(_info, PRESETS[name])}
        options = {option: list(values) for option, values in PRESET_OPTIONS.get(name, {}).items()}
        plain = [_plain(info) for info in infos.values()]
        return {"passes": plain, "presets": {name: presets[name]}, "options": options}
    if name is not None:
        find_pass(name)
    infos = [_plain(info) for info in available().values() if name in (None, info.name)]
    return {"passes": infos, "presets": presets}


def _info(member: str) -> PassInfo:
    """Return what is known of the pass that a preset has, with or without options."""
    return available()[member.partition("{")[0]]


def _page(name: str) -> str:
    found = find_pass(name)
    info = available()[name]
    options = [
        f"{option.name}={'...' if option.default is None else option.default}  ({option.takes})"
        for option in info.options
    ]
    contract = [f"numerics {_word(info.numerics)}, goal {_word(info.goal)}, phase {_word(info.phase)}"]
    sections = {"contract": contract, "options": options or ["none"]}
    text = [f"{name}: {inspect.getdoc(found)}", ""]
    return "\n".join([*text, *(line for key, value in sections.items() for line in [key, *_indented(value)])]) + "\n"


def _plain(info: PassInfo) -> dict[str, Any]:
    return {
        key: _word(value) if isinstance(value, enum.Enum) else value for key, value in dataclasses.asdict(info).items()
    }


def _word(member: enum.Enum | None) -> str:
    return "" if member is None else str(member.value)


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
