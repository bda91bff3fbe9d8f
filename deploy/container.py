"""The zip file of an archive: manifest, members, checksums, tensors. Nothing is compressed: that bounds its size."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import zipfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import ArchiveError, one_line
from ..storage import atomic_file

__all__ = [
    "FORMAT", "LONGEST_JSON", "MANIFEST", "SCHEMA_VERSION", "UNREADABLE", "WEIGHTS", "checked_entries",
    "read_container", "read_json", "read_manifest", "read_weights", "regular_file", "stored_once", "weights_bytes",
    "write_container",
]  # fmt: skip

FORMAT = "fxopt-archive"
SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
LONGEST_JSON = 64 * 2**20
UNREADABLE = (OSError, zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, OverflowError, struct.error)
_VERSION = re.compile(r"[\w.+-]{1,40}")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_container(path: str | os.PathLike[str], manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write the members and a manifest with their sizes and checksums; equal content makes equal files."""
    files = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in members.items()}
    head = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **manifest, "files": files}
    text = json.dumps(head, indent=1, allow_nan=False).encode()
    with atomic_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {MANIFEST: text, **members}.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)


def read_container(path: str | os.PathLike[str], expected: Collection[str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the manifest and the members called `expected`, each checked; raise `ArchiveError` for anything else."""
    where = regular_file(path)
    with _opened(where) as (archive, names):
        manifest = _manifest(where, archive, names)
        for name in sorted(set(names) - {MANIFEST, *expected}):
            raise ArchiveError(f"{where} has an unexpected member {name!r}")
        for name in sorted(expected):
            _found(where, names, name)
        members = {name: archive.read(names[name]) for name in expected}
    _check_sums(where, manifest, members)
    return manifest, members


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest alone; the members are not looked at. Raise `ArchiveError` as `read_container` does."""
    where = regular_file(path)
    with _opened(where) as (archive, names):
        return _manifest(where, archive, names)


@contextmanager
def _opened(where: Path) -> Generator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Open an archive, with its entries by name; an error of the file is an `ArchiveError`."""
    try:
        with zipfile.ZipFile(where) as archive:
            yield archive, checked_entries(where, archive)
    except UNREADABLE as error:
        raise ArchiveError(f"{where} is not a readable fxopt archive: {one_line(error)}") from error


def regular_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file, or raise `ArchiveError`: reading a pipe or a device may never end."""
    where = Path(path)
    try:
        mode = where.stat().st_mode
    except (OSError, ValueError) as error:
        raise ArchiveError(f"{where} is not a readable fxopt archive: {one_line(error)}") from error
    if not stat.S_ISREG(mode):
        raise ArchiveError(f"{where} is not a readable fxopt archive: it is not a regular file")
    return where


def _manifest(where: Path, archive: zipfile.ZipFile, names: Mapping[str, zipfile.ZipInfo]) -> dict[str, Any]:
    manifest = read_json(where, MANIFEST, archive.read(_found(where, names, MANIFEST)))
    _check_version(where, manifest)
    return manifest


def read_json(where: Path, name: str, data: bytes) -> dict[str, Any]:
    """Return a member that holds a JSON object; raise `ArchiveError` if it is too long or something else."""
    if len(data) > LONGEST_JSON:
        raise ArchiveError(f"{where}: {name} has {len(data):,} bytes; at most {LONGEST_JSON:,} are read")
    try:
        value = json.loads(data, object_pairs_hook=_object, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{where}: {name} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ArchiveError(f"{where}: {name} is not a JSON object")
    return cast("dict[str, Any]", value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose keys are distinct: readers differ in which of two they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _not_json(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def checked_entries(where: Path, archive: zipfile.ZipFile, length: int | None = None) -> dict[str, zipfile.ZipInfo]:
    """Return the entries by name; refuse doubled, compressed, encrypted and too large ones. `length` is the file's."""
    entries = archive.infolist()
    names = {entry.filename: entry for entry in entries}
    if len(names) < len(entries):
        raise ArchiveError(f"{where} has two members of one name")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise ArchiveError(
                f"{where}: {entry.filename!r} is compressed or encrypted, so its unpacked size is not known"
            )
    if sum(entry.file_size for entry in entries) > (where.stat().st_size if length is None else length):
        raise ArchiveError(f"{where}: its members claim more bytes than the file has")
    return names


def _found(where: Path, names: Mapping[str, Any], name: str) -> str:
    if name not in names:
        raise ArchiveError(f"{where} is not an fxopt archive: it has no {name}")
    return name


def _check_version(where: Path, manifest: Mapping[str, Any]) -> None:
    version = manifest.get("schema_version")
    if manifest.get("format") != FORMAT or type(version) is not int or version < 1:
        raise ArchiveError(f"{where} is not an fxopt archive: its manifest says neither format nor version")
    if version > SCHEMA_VERSION:
        writer = manifest.get("fxopt")
        by = f"fxopt {writer}" if isinstance(writer, str) and _VERSION.fullmatch(writer) else "a newer fxopt"
        raise ArchiveError(
            f"{where} has format {version}, written by {by}; this fxopt reads up to {SCHEMA_VERSION}: upgrade fxopt"
        )


def _check_sums(where: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    files = manifest.get("files")
    for name, data in members.items():
        said = cast("dict[str, Any]", files).get(name) if isinstance(files, dict) else None
        wanted = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if said != wanted:
            raise ArchiveError(f"{where} is damaged: the checksum of {name} does not match")


def stored_once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, ready to be stored, and alias -> name for tied ones; or raise `ArchiveError`."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in state.items():
        _check_storable(name, tensor)
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        if first.setdefault(identity, name) != name:
            aliases[name] = first[identity]
        else:
            # A view into a stacked tensor shares its storage, which the format refuses.
            stored[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return stored, aliases


def _check_storable(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise ArchiveError(f"{name!r} is a {type(tensor).__name__}, not a tensor; an archive holds tensors only")
    if tensor.is_meta:
        raise ArchiveError(f"{name!r} is on the meta device and has no values to save")
    if tensor.layout != torch.strided:
        raise ArchiveError(f"{name!r} is sparse ({tensor.layout}); an archive holds dense tensors only")


def weights_bytes(stored: dict[str, Tensor]) -> bytes:
    """Return tensors as a safetensors file; raise `ArchiveError` if the format has no place for one."""
    try:
        return safetensors.torch.save(stored)
    except (KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise ArchiveError(f"the weights cannot be stored: {one_line(error)}") from error


def read_weights(where: Path, data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; raise `ArchiveError` if it is none."""
    try:
        return safetensors.torch.load(data)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError, SafetensorError) as error:
        raise ArchiveError(f"{where}: its weights are unreadable: {one_line(error)}") from error
