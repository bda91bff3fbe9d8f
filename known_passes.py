"""The names of all passes, and what each does, found without importing any of them, nor torch: for the command line."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from .errors import PipelineError, did_you_mean
from .settings import current

__all__ = [
    "ENGINES", "GROUP", "PRESETS", "PRESET_OPTIONS", "TRANSFORMS", "check_names", "class_name", "entry_points",
    "has_engines", "listing", "members_of", "own_names", "own_summaries", "pass_names",
]  # fmt: skip

GROUP = "fxopt.passes"
"""The entry-point group of passes from other distributions; fxopt's own win where names are equal."""

ENGINES = "fxopt.engines"
"""The entry-point group of engines from other distributions, one line each: `name = "module:EngineClass"`."""

_ENGINES = (("openvino",), ("onnxruntime", "onnx"))
"""What each of fxopt's own engines needs."""

PRESETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "inference": (
            "eliminate_common_subexpressions",
            "fold_constants",
            "eliminate_dead_code",
            "fold_batchnorm",
            "fuse_experts",
            "fuse_ensembles",
            "sparse_message_passing",
            "attention",
            "pack",
            "flatten_calls",
        ),
        "training": (
            "eliminate_common_subexpressions",
            "eliminate_dead_code",
            "fuse_experts",
            "fuse_ensembles",
            "channels_last",
        ),
        "distributed": (
            "eliminate_common_subexpressions",
            "eliminate_dead_code",
            "sync_batchnorm",
            "fuse_ensembles",
            "ddp",
        ),
        "compress": ("quantize{scheme=int8_weight,aim=size}", "quantize{scheme=int8_static,aim=size}"),
    }
)
"""Preset -> what it stands for: passes, with options where they are not the default ones."""

Replacements = Mapping[str, tuple[str, ...]]
"""Pass -> what stands in its place."""

PRESET_OPTIONS: Mapping[str, Mapping[str, Mapping[str, Replacements]]] = MappingProxyType(
    {
        "inference": {
            "engine": {
                "none": {},
                "auto": {
                    # an engine computes few members, such as the three of attention, as fast as if they were fused
                    "fuse_ensembles": ("fuse_ensembles{members=8}",),
                    "attention": ("delegate", "attention"),
                },
            },
            "dtype": {
                "float32": {},
                "bfloat16": {
                    "pack": ("pack{dtype=bfloat16}", "pack"),
                    "delegate": ("delegate{dtype=bfloat16}",),  # which tries float32, too
                },
                "int8": {
                    "pack": ("quantize{baseline=bfloat16}", "pack{dtype=bfloat16}", "pack"),
                    "delegate": ("quantize{baseline=bfloat16}", "delegate{dtype=int8}"),
                },
            },
        }
    }
)
"""Preset -> option -> value -> what stands in the place of passes; the first value is the default. Where an engine is
installed, that of `engine` is `auto`."""

TRANSFORMS = f"{__name__.split('.', maxsplit=1)[0]}.transforms"
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"|[,={}\[\]]|[^\s,={}\[\]"'<>]+""")

_WITH_OPTIONS = re.compile(rf"(?<![^\s,])(?P<preset>{'|'.join(PRESETS)})\s*{{(?P<options>[^{{}}\[\]\"']*)}}")
_OPTION = re.compile(r"([^\s,={}]+)\s*=\s*([^\s,={}]+)")


def pass_names() -> dict[str, str]:
    """Return the name of every pass and where it comes from, importing none."""
    own = dict.fromkeys(own_names(), "fxopt")
    others = {entry.name: entry.dist.name if entry.dist else entry.value for entry in entry_points()}
    return {**others, **own}


def own_names() -> list[str]:
    """Return the transforms whose file, or front door, has the class that their name promises."""
    return list(_names_in(tuple(importlib.import_module(TRANSFORMS).__path__)))


@cache
def _names_in(paths: tuple[str, ...]) -> tuple[str, ...]:
    folders = [Path(path) for path in paths]
    files = {path.stem: (path, "\nclass {}(") for folder in folders for path in folder.glob("[a-z]*.py")}
    doors = {path.parent.name: (path, '"{}"') for folder in folders for path in folder.glob("[a-z]*/__init__.py")}
    found = sorted({**files, **doors}.items())
    fits = (name for name, (path, sign) in found if sign.format(class_name(name)) in path.read_text(encoding="utf-8"))
    return tuple(fits)


def own_summaries() -> dict[str, str]:
    """Return what each transform does in a line, by reading, not importing, them."""
    folders = [Path(path) for path in importlib.import_module(TRANSFORMS).__path__]
    return {name: next(_summaries(folders, name), "") for name in own_names()}


def _summaries(folders: Iterable[Path], name: str) -> Iterator[str]:
    first_line = re.compile(rf'\nclass {class_name(name)}\([^)]*\):\n    """([^\n"]*)')
    for folder in folders:
        for path in (folder / f"{name}.py", *sorted((folder / name).glob("*.py"))):
            found = first_line.search(path.read_text(encoding="utf-8")) if path.exists() else None
            if found is not None:
                yield found[1]


def listing(preset: str | None, summaries: Mapping[str, str]) -> str:
    """List the passes and presets in a line each, or the passes of a preset and what its options choose among."""
    if preset is None:
        return _lines("passes", summaries, PRESETS)
    members = {member: summaries[member.partition("{")[0]] for member in members_of(preset, {})}
    return _lines(preset, members, {}) + "".join(_choices(preset))


def _lines(title: str, summaries: Mapping[str, str], presets: Mapping[str, Iterable[str]]) -> str:
    width = max(map(len, [*summaries, *presets])) + 2
    lines = [title, *(f"  {name:<{width}}{summary}" for name, summary in summaries.items())]
    if presets:
        lines += ["presets", *(f"  {name:<{width}}{','.join(of)}{_values(name)}" for name, of in presets.items())]
    return "\n".join(lines) + "\n"


def _values(preset: str) -> str:
    """Return the options that a preset takes, with their values."""
    options = PRESET_OPTIONS.get(preset, {}).items()
    return "".join(f"  ({option}={', '.join(values)})" for option, values in options)


def _choices(preset: str) -> Iterator[str]:
    """Yield the options of a preset, with what each value puts in the place of passes."""
    for option, values in PRESET_OPTIONS.get(preset, {}).items():
        yield f"{option}={_default(option, values)}\n"
        for value, instead in values.items():
            listed = {member: ",".join(passes) or "nothing" for member, passes in instead.items()}
            changed = [f"{passes} in the place of {member}" for member, passes in listed.items()]
            yield f"  {value:<10}{'; '.join(changed) or 'replaces nothing'}\n"


def members_of(preset: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a preset stands for with some options, which are among `PRESET_OPTIONS`."""
    members = PRESETS[preset]
    for option, values in PRESET_OPTIONS.get(preset, {}).items():
        instead = values[options.get(option, _default(option, values))]
        members = tuple(each for member in members for each in instead.get(member, (member,)))
    return tuple(dict.fromkeys(members))  # what stands in several places runs in the first


def _default(option: str, values: Mapping[str, object]) -> str:
    return "auto" if option == "engine" and has_engines() else next(iter(values))


def has_engines() -> bool:
    """Say whether an engine for the pass `delegate` is installed, and presets may use it."""
    if not current().engines:
        return False
    is_there = any(all(map(importlib.util.find_spec, needed)) for needed in _ENGINES)
    return is_there or bool(importlib.metadata.entry_points(group=ENGINES))


def class_name(name: str) -> str:
    """Return the name of a pass's class."""
    return "".join(word.capitalize() for word in name.split("_"))


def entry_points() -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of passes from other distributions."""
    return list(importlib.metadata.entry_points(group=GROUP))


def check_names(pipeline: str) -> None:
    """Check the names in a pipeline string, and the options of presets; a `PipelineError` shows the place."""
    text, depth, names = re.sub(r"\s", " ", pipeline), 0, {*pass_names(), *PRESETS}
    for token in _TOKEN.finditer(text):
        word = token.group()
        depth += (word in "{[") - (word in "}]")
        if depth == 0 and word not in ",=}]" and word[0] not in "'\"" and word not in names:
            raise PipelineError(f"unknown pass {word!r}{did_you_mean(word, names)}", text, token.start(), token.end())
    _check_preset_options(text)


def _check_preset_options(text: str) -> None:
    for found in _WITH_OPTIONS.finditer(text):
        options = PRESET_OPTIONS.get(found["preset"], {})
        for each in _OPTION.finditer(text, *found.span("options")):
            name, value = each.groups()
            if name not in options:
                hint = did_you_mean(name, options) if options else "; it has none"
                raise PipelineError(f"{found['preset']!r} has no option {name!r}{hint}", text, *each.span(1))
            if value not in options[name]:
                hint = did_you_mean(value, options[name])
                if name == "engine":
                    hint += f"; the name of an engine goes into the pass: delegate{{engine=...}},{found['preset']}"
                wrong = f"option {name!r}: {value!r} is no value of it{hint}"
                raise PipelineError(wrong, text, *each.span(2))
