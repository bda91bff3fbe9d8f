"""Read `.pt2` files of `torch.export` without running anything from them.

`torch.export.load` unpickles, loads shared libraries, and hands text to `eval`, `exec` and the importer. So each entry
is checked first, and torch reads a copy in memory of what was checked: its own zip reader may see other entries.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from ..compat import all_modules
from ..compat.export import load_exported_program
from ..errors import ArchiveError, one_line
from ..settings import weights_only
from ..storage import write_atomically
from ..tracing.examples import Inputs
from .container import UNREADABLE, checked_entries, read_json, regular_file
from .exported_text import check_program

__all__ = ["drop_checksum", "is_exported", "load_exported", "sha256_of", "write_checksum"]

_ENTRIES = re.compile(
    r"(archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id|models/model\.json|"
    r"data/weights/(model_weights_config\.json|weight_\d+)|data/constants/(model_constants_config\.json|tensor_\d+)|"
    r"data/sample_inputs/model\.pt|extra/[\w.]+)"
)
_PROGRAM = "models/model.json"
_INPUTS = "data/sample_inputs/model.pt"
_PAYLOADS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")
_GLOBAL = re.compile(
    r"torch\._utils _rebuild_(tensor(_v2|_v3)?|parameter)|torch (Size|\w+Storage|[a-z]\w*)|"
    r"torch\.storage (Unt|T)ypedStorage|torch\.serialization _get_layout|collections OrderedDict"
)
"""What the pickle of the example inputs may name; torch's weights-only reader would also make huge `bytearray`s."""


def is_exported(names: Iterator[str] | list[str]) -> bool:
    """Say whether a zip file with these entries was written by `torch.export`."""
    return any(
        name.partition("/")[2] == "archive_format" or name == "serialized_exported_program.json" for name in names
    )


def load_exported(path: Path) -> tuple[nn.Module, Inputs | None]:
    """Return the module that a `.pt2` file describes, in evaluation mode, and its example inputs.
    Raise an `ArchiveError` if the file may do harm.
    """
    regular_file(path)
    _check_checksum(path)
    try:
        with zipfile.ZipFile(path) as archive:
            checked = _checked(path, archive)
    except (*UNREADABLE, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"{path} is not a readable .pt2 file: {one_line(error)}") from error
    try:
        with weights_only():
            program = load_exported_program(checked)
        inputs = cast("tuple[tuple[Any, ...], dict[str, Any]] | None", program.example_inputs)
        model = program.module()
        for module in all_modules(model):
            module.training = False  # what runs is written out, and its own `eval()` and `train()` raise
        return model, None if inputs is None else Inputs(*inputs[0], **inputs[1])
    except Exception as error:  # the reader asserts what it expects, and raises whatever it meets
        first = one_line(Exception((str(error).strip().splitlines() or [""])[0]))
        raise ArchiveError(f"{path} is not a readable .pt2 file: {type(error).__name__}: {first}") from error


def _checked(path: Path, archive: zipfile.ZipFile) -> io.BytesIO:
    """Return a copy of a `.pt2` file once everything in it is known to be harmless."""
    entries = checked_entries(path, archive)
    root = next(iter(entries)).partition("/")[0]
    for name in entries:
        folder, _, rest = name.partition("/")
        if folder != root or not _ENTRIES.fullmatch(rest):
            raise ArchiveError(f"{path} holds {name!r}; fxopt reads .pt2 files of one exported program, without code")
    for name in _PAYLOADS:
        _check_payloads(path, root, name, entries, read_json(path, name, archive.read(f"{root}/{name}")))
    check_program(path, read_json(path, _PROGRAM, archive.read(f"{root}/{_PROGRAM}")))
    return _copied(archive, {f"{root}/{_INPUTS}": _checked_inputs(path, archive.read(f"{root}/{_INPUTS}"))})


def _copied(archive: zipfile.ZipFile, changes: Mapping[str, bytes]) -> io.BytesIO:
    """Return the same entries, but for some with other content, in a file without anything else."""
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
        for name in archive.namelist():
            target.writestr(name, changes[name] if name in changes else archive.read(name))
    copy.seek(0)
    return copy


def _checked_inputs(path: Path, data: bytes) -> bytes:
    """Return the example inputs, a zip file that torch.save wrote, once nothing in it unpacks to more than itself."""
    if not data:
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = checked_entries(path, archive, len(data))
        for name in entries:
            if name.endswith("/data.pkl"):
                for operation, argument, _ in pickletools.genops(archive.read(name)):
                    if operation.name == "GLOBAL" and not _GLOBAL.fullmatch(str(argument)):
                        raise ArchiveError(f"{path} is refused: fxopt does not read {argument!r} in example inputs")
        return _copied(archive, {}).getvalue()


def _check_payloads(
    path: Path, root: str, name: str, entries: Mapping[str, zipfile.ZipInfo], data: Mapping[str, Any]
) -> None:
    """Make sure that tensors come from entries for tensors, and have no more elements than these have bytes."""
    folder = name.rpartition("/")[0]
    payloads: Any = data.get("config")
    for payload in cast("dict[str, Any]", payloads).values() if isinstance(payloads, dict) else ():
        target, pickled, meta = (payload.get(key) for key in ("path_name", "use_pickle", "tensor_meta"))
        entry = entries.get(f"{root}/{folder}/{target}")
        if not isinstance(target, str) or not _PAYLOAD.fullmatch(target) or entry is None or pickled:
            raise ArchiveError(f"{path} holds {target!r}, which is not a plain tensor")
        sizes = [size["as_int"] for size in meta["sizes"]]
        if entry.file_size == 0 and 0 not in sizes:
            raise ArchiveError(f"{path}: the tensor {target!r} has no data")
        if math.prod(sizes) > entry.file_size:
            raise ArchiveError(f"{path}: the tensor {target!r} has more elements than bytes")


# -- the checksum beside a file, as `sha256sum` writes and checks it: torch's format has none -------------------------


_CHECKSUM = re.compile(rb"\\?([0-9a-f]{64})[ \t]")
_CHECKSUM_SUFFIX = ".sha256"


def sha256_of(path: Path) -> str:
    """Return the checksum of a file, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksum(path: Path, digest: str) -> None:
    """Write the checksum of a file beside it."""
    name = path.name.replace("\\", "\\\\").replace("\n", "\\n")
    escaped = "\\" if name != path.name else ""
    write_atomically(_beside(path), f"{escaped}{digest}  {name}\n".encode(errors="surrogateescape"))


def drop_checksum(path: Path) -> None:
    """Remove the checksum of a file that is about to be replaced: none at all is better than an old one."""
    _beside(path).unlink(missing_ok=True)


def _check_checksum(path: Path) -> None:
    """Compare a file with the checksum beside it, if there is one; raise `ArchiveError` if they differ."""
    beside = _beside(path)
    if not beside.is_file():
        return
    try:
        with beside.open("rb") as file:
            found = _CHECKSUM.match(file.read(80))
        digest = sha256_of(path)
    except OSError as error:
        raise ArchiveError(f"the checksum of {path} cannot be compared: {one_line(error)}") from error
    if found is None:
        raise ArchiveError(f"{beside} is not a checksum as sha256sum writes it; delete it, or export {path} again")
    if found[1].decode() != digest:
        raise ArchiveError(
            f"{path} is damaged: it does not have the checksum in {beside.name}; if something else than fxopt.export "
            "wrote it since, delete that file"
        )


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _CHECKSUM_SUFFIX)
