"""Write files so that a reader sees the old content or all of the new, whatever happens in between."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["atomic_file", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replace the file at `path` by `data` (text as UTF-8), or leave it as it is and raise `OSError`."""
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """Open a temporary file beside `path` that takes its place when the block ends, and vanishes if the block raises.

    A link is followed; the content is on disk before the old file goes.
    """
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the new name durable where the system can open folders; where it cannot, names are durable by themselves."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
