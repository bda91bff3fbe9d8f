"""Packages of AOTInductor: a compiled library, which runs without Python code of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ...compat.inductor import has_cpp_compiler, packaged_ahead
from ...errors import UsageError
from .source import Source

__all__ = ["write_aoti"]


def write_aoti(source: Source, folder: Path) -> tuple[Path, ...]:
    """Write `model.pt2` into a folder."""
    if not has_cpp_compiler():
        raise UsageError("aoti needs a C++ compiler: install g++, or set CXX to the path of one")
    package = folder / "model.pt2"
    # As many threads as torch has where it runs, not as here.
    packaged_ahead(cast("Any", source.program), package, {"cpp.dynamic_threads": True})
    return (package,)
