"""Write files so that a reader sees the old content or all of the new, whatever happens in between."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import UsageError, expect

__all__ = ["allowed_bytes", "as_folder", "as_path", "atomic_file", "byte_text", "parse_bytes", "write_atomically"]


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing raises without the name of the file."""

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES = re.compile(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]+)\s*")


def as_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Return a path that a user gave; raise `UsageError` if it is none."""
    expect(path, (str, os.PathLike), name, "the path of a file, as text or pathlib.Path")
    return Path(path)


def as_folder(path: str | os.PathLike[str], name: str = "folder") -> Path:
    """Return the path of a folder that may not be there yet; raise `UsageError` for a file, or what is no path."""
    folder = as_path(path, name)
    taken = next((each for each in (folder, *folder.parents) if each.exists()), None)
    if taken is not None and not taken.is_dir():
        raise UsageError(f"{name}={str(folder)!r}: {taken} is a file; name a folder")
    return folder


def byte_text(count: float) -> str:
    """Write a number of bytes with a unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"


def parse_bytes(text: str) -> float | None:
    """Return how many bytes a number with a unit says, such as `2GiB` or `512 MB`; None if it says none."""
    parts = _BYTES.fullmatch(text)
    unit = _UNITS.get(parts[2].lower()) if parts else None
    return None if parts is None or unit is None else float(parts[1]) * unit


def allowed_bytes(budget: object, whole: float) -> float | None:
    """Return how many bytes a budget allows: a share of a whole, from 0 to 1, or text with a unit; else None."""
    if isinstance(budget, str):
        return parse_bytes(budget)
    if isinstance(budget, (int, float)) and not isinstance(budget, bool) and 0 <= budget <= 1:
        return budget * whole
    return None


def write_atomically(path: str | os.PathLike[str], data: str | bytes, *, durable: bool = True) -> None:
    """Replace the file at `path` by `data` (text as UTF-8), or leave it and raise `OSError`; see `atomic_file`."""
    with atomic_file(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: str | os.PathLike[str], *, durable: bool = True) -> Generator[BinaryIO]:
    """Open a temporary file that takes the place of `path`, rights kept, at the end; where the block raises it goes.

    What is not `durable` may be lost, or empty, where the machine stops; it need not wait for the disk.
    """
    target = _target(path)
    rights = _rights(target)
    start = target.name.encode(errors="surrogateescape")[:200].decode(errors="ignore")
    temporary = target.with_name(f".{start}.{secrets.token_hex(6)}.tmp")
    try:
        with _naming(target, temporary), _opened(temporary, rights) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        # Where the temporary file cannot go either, the first error is the one to hear about.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(target.parent)


def _target(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).resolve()
    except RuntimeError as error:  # Python 3.11 and 3.12 say so of links that lead back to themselves
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path)) from error


def _rights(target: Path) -> int | None:
    """Return the rights of the file that is to be replaced, or None if there is none yet."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file, so it cannot be replaced", str(target))
    return stat.S_IMODE(mode)


def _opened(temporary: Path, rights: int | None) -> BinaryIO:
    """Open a new file, with the rights of the old one from the start."""
    mode = 0o666 if rights is None else rights
    file = open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
    if rights is not None and hasattr(os, "fchmod"):
        with suppress(PermissionError):  # the mask of the process may have taken some away
            os.fchmod(file.fileno(), rights)
    return file


@contextmanager
def _naming(target: Path, temporary: Path) -> Generator[None]:
    """Let an error name the file that was asked for."""
    try:
        yield
    except OSError as error:
        if error.filename == str(temporary) or (error.filename is None and error.errno in _FULL):
            error.filename = str(target)
        raise


def _sync_folder(folder: Path) -> None:
    """Make the new name durable where the system can open folders; where it cannot, names are durable by themselves."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that one may write into and not list
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
