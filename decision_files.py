"""The folder of decisions as files, of so many bytes in all at most: looked at and cleared without torch."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOST_BYTES", "DecisionFiles", "note_name"]

_NAME = re.compile(r"[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.json\.[0-9a-f]+\.tmp")
_NOTE = re.compile(r"[0-9a-f]{64}\.conversion")
"""Left by a process that ended in a conversion of an engine."""
MOST_BYTES = 256 * 2**20
"""Bytes of all entries; a plan of a large model has a few hundred thousand."""
_ABANDONED = 3600.0
"""A temporary file of so many seconds has no writer any more."""


def note_name(digest: str) -> str:
    """Return what a note of a conversion that runs is called."""
    return f"{digest}.conversion"


@dataclass(frozen=True)
class DecisionFiles:
    """The files of the entries in a folder; where that cannot be read, there are none."""

    folder: Path

    def usage(self) -> tuple[int, int]:
        """Return how many entries there are, and their bytes."""
        sizes = [status.st_size for _, status in self._files(_NAME)]
        return len(sizes), sum(sizes)

    def clear(self) -> tuple[int, int]:
        """Remove all entries, and return how many there were, and their bytes; raise OSError where one stays."""
        count, size = self.usage()
        for path, _ in (*self._files(_NAME), *self._files(_TEMPORARY), *self._files(_NOTE)):
            path.unlink(missing_ok=True)
        return count, size

    def make_room(self) -> None:
        """Remove what was not used for longest, until the rest fits; and what a writer has left behind."""
        entries = sorted(self._files(_NAME), key=lambda each: each[1].st_mtime)
        left = sum(status.st_size for _, status in entries)
        for path, status in entries:
            if left <= MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            left -= status.st_size
        for path, status in self._files(_TEMPORARY):
            if time.time() - status.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)

    def _files(self, name: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
        """Return the files of the cache; other files in the folder are left alone."""
        found: list[tuple[Path, os.stat_result]] = []
        try:
            with os.scandir(self.folder) as files:
                for each in files:
                    if name.fullmatch(each.name) and each.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):  # another process may remove it
                            found.append((Path(each.path), each.stat(follow_symlinks=False)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return found
