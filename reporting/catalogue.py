"""The passes there are, as text and as JSON."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

from ..known_passes import PRESET_OPTIONS, PRESETS, listing
from ..passes.pipeline import PassInfo, available, find_pass

__all__ = ["catalogue", "catalogue_json"]


def catalogue(name: str | None = None) -> str:
    """List passes and presets in a line each, or say all about one; raise `UsageError` if there is none of its name."""
    if name is None or name in PRESETS:
        return listing(name, {info.name: info.problem or info.summary for info in available().values()})
    return _page(name)


def catalogue_json(name: str | None = None) -> dict[str, Any]:
    """Return what `catalogue` says as plain JSON values."""
    presets = {preset: list(members) for preset, members in PRESETS.items()}
    if name in presets:
        known = available()
        infos = {info.name: info for info in (known[member.partition("{")[0]] for member in PRESETS[name])}
        options = {option: list(values) for option, values in PRESET_OPTIONS.get(name, {}).items()}
        plain = [_plain(info) for info in infos.values()]
        return {"passes": plain, "presets": {name: presets[name]}, "options": options}
    if name is not None:
        find_pass(name)
    infos = [_plain(info) for info in available().values() if name in (None, info.name)]
    return {"passes": infos, "presets": presets}


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
    for title, lines in sections.items():
        text += [title, *(f"  {line}" for line in lines)]
    return "\n".join(text) + "\n"


def _plain(info: PassInfo) -> dict[str, Any]:
    return {
        key: _word(value) if isinstance(value, enum.Enum) else value for key, value in dataclasses.asdict(info).items()
    }


def _word(member: enum.Enum | None) -> str:
    return "" if member is None else str(member.value)
