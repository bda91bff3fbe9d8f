"""Tell the files apart that a model may be in, by their content, and read each as what it is."""

from __future__ import annotations

import enum
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ..errors import ArchiveError, InputError, UsageError, one_line
from ..runtime.record import Plan
from . import archive
from .archive import check_kind
from .container import MANIFEST, UNREADABLE, read_manifest, regular_file
from .exported import is_exported, load_exported

__all__ = ["FileKind", "kind_of_file", "load_pickle", "open_file", "plan_in"]


class FileKind(enum.Enum):
    """What a file holds."""

    RECIPE = "recipe"
    EXPORTED = "pt2"
    PICKLE = "pickle"


def open_file(
    path: Path,
    *,
    replay: archive.Replay,
    model: nn.Module | None = None,
    trust: Sequence[str] | bool = (),
    inputs: object = None,
) -> nn.Module:
    """Return the model in a file, by the arguments of `archive.load`; trust=True allows pickles, too."""
    kind = kind_of_file(path)
    if kind is FileKind.RECIPE:
        return archive.load(path, replay=replay, model=model, trust=trust, inputs=inputs)
    if model is not None:
        raise UsageError(f"{path} is not an fxopt archive: it holds the whole model, so do not pass model=")
    if kind is FileKind.EXPORTED:
        return load_exported(path)[0]
    return load_pickle(path, trusted=trust is True)


def kind_of_file(path: Path) -> FileKind:
    """Return what a file holds, by its content; nothing in it is run. Raise `ArchiveError` if that is no model."""
    regular_file(path)
    try:
        start, names = _outline(path)
    except UNREADABLE as error:
        raise ArchiveError(f"{path} is not a readable fxopt archive: {one_line(error)}") from error
    if MANIFEST not in names and is_exported(names):
        return FileKind.EXPORTED
    if any(name.partition("/")[2].startswith("code/") for name in names):
        raise ArchiveError(
            f"{path} is a TorchScript file, which fxopt does not read; save the model's state dict instead"
        )
    if start[:1] == b"\x80" or (MANIFEST not in names and any(name.endswith("/data.pkl") for name in names)):
        return FileKind.PICKLE
    check_kind(path, read_manifest(path))
    return FileKind.RECIPE


def plan_in(path: Path) -> Plan:
    """Return the plan in a JSON file, or in an archive."""
    if zipfile.is_zipfile(path):
        if kind_of_file(path) is not FileKind.RECIPE:
            raise InputError(f"{path} has no plan; name one that --save-plan wrote, or a model that optimize saved")
        return archive.plan_of(path)
    return Plan.load(path)


def _outline(path: Path) -> tuple[bytes, list[str]]:
    """Return a file's first bytes, and the names of its entries if it is a zip file."""
    with path.open("rb") as file:
        start = file.read(2)
        if start != b"PK":
            return start, []
        with zipfile.ZipFile(file) as archive:
            return start, archive.namelist()


def load_pickle(path: Path, *, trusted: bool) -> nn.Module:
    """Return the model that `torch.save(model, path)` wrote, if it is trusted: reading it may run any code."""
    if not trusted:
        raise ArchiveError(
            f"{path} is a pickle, which can run any code when it is read; if you know who made it, "
            "pass trust=True (--trust all on the command line)"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling runs the classes' own code
        raise ArchiveError(f"{path} cannot be unpickled: {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(found, nn.Module):
        raise InputError(
            f"{path} holds a {type(found).__name__}, expected a torch.nn.Module; pass weights by --weights"
        )
    return found
