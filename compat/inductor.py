"""The private names of AOTInductor: exported programs as compiled libraries, and the compiler that this takes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.export import ExportedProgram

__all__ = ["compiled_ahead", "has_cpp_compiler", "packaged_ahead"]


def has_cpp_compiler() -> bool:
    """Say whether inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except (RuntimeError, OSError):
        return False


def packaged_ahead(exported: ExportedProgram, package: Path, options: Mapping[str, Any]) -> None:
    """Compile a program with its constants, and write library and constants as one package, whose name ends in `.pt2`.

    `aoti_compile_and_package` would leave the library, with all weights, in the folder of inductor's cache.
    """
    inductor: Any = import_module("torch._inductor")
    packages: Any = import_module("torch._inductor.package")
    args, kwargs = cast("Any", exported).example_inputs
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "aot_inductor.package": True, "aot_inductor.output_path": folder, "compile_threads": 1, "freezing": True,
            **options,
        }  # fmt: skip
        files = inductor.aot_compile(exported.module(check_guards=False), args, kwargs, options=options)
        packages.package_aoti(str(package), files)


def compiled_ahead(exported: ExportedProgram, threads: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """Compile a program with its constants for a number of threads, and return what runs it, of tensors of the sizes
    that the program allows: it does not check them. It empties the list that it is given.

    The library is in a folder for temporary files, which goes with what is returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "region.pt2")
        packaged_ahead(exported, package, {"cpp.threads": threads})
        loaded = cast("Any", import_module("torch._inductor")).aoti_load_package(str(package))
    return loaded.loader.boxed_run  # a call of what is loaded parses two texts each time
