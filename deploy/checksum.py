"""The checksum beside a `.pt2` file, as `sha256sum` writes and checks it: torch's format has none of its own."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ..errors import ArchiveError, one_line
from ..storage import write_atomically

__all__ = ["check_checksum", "drop_checksum", "sha256_of", "write_checksum"]

_LINE = re.compile(rb"\\?([0-9a-f]{64})[ \t]")
_SUFFIX = ".sha256"


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


def check_checksum(path: Path) -> None:
    """Compare a file with the checksum beside it, if there is one; raise `ArchiveError` if they differ."""
    beside = _beside(path)
    if not beside.is_file():
        return
    try:
        with beside.open("rb") as file:
            found = _LINE.match(file.read(80))
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
    return path.with_name(path.name + _SUFFIX)
