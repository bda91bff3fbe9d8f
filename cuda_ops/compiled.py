"""Kernels in CUDA C++ on LibTorch's stable interface: compiled by nvcc when first called, or by `make`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..settings import current

__all__ = ["SOURCES", "compile_all", "compiled", "compiled_kernels", "native"]

_HERE = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O3", "-DUSE_CUDA", "-shared", "-Xcompiler=-fPIC")
_SECONDS = 600.0
"""For one compilation; it takes ten."""

SOURCES = tuple(sorted(_HERE.glob("*/*.cu")))
"""What is compiled; each registers operators with torch in the namespace `fxopt_` and the name of its file."""


_loaded: dict[str, str] = {}
"""Name of a source -> the architecture that its operators are registered for."""


def native(name: str) -> Any:
    """Return the operators of a source for the GPU in use; raises an OSError as `compiled` does."""
    major, minor = torch.cuda.get_device_capability()
    return _native(name, f"sm_{major}{minor}")


@cache
def _native(name: str, architecture: str) -> Any:
    known = _loaded.get(name, architecture)
    if known != architecture:
        raise OSError(f"'{name}' is loaded for {known} in this process, and the GPU in use is {architecture}")
    (source,) = (each for each in SOURCES if each.stem == name)
    torch.ops.load_library(compiled(source, architecture))
    _loaded[name] = architecture
    return getattr(torch.ops, f"fxopt_{name}")


def compile_all(*architectures: str) -> list[Path]:
    """Compile all sources for architectures (`"sm_90"`), and return where the results are kept; see `compiled`."""
    return [compiled(source, architecture) for source in SOURCES for architecture in architectures]


def compiled(source: Path, architecture: str) -> Path:
    """Return where a source is kept as a library for one architecture (`"sm_90"`), after compiling it if it is new.
    Raises an OSError where there is no nvcc, it does not compile the source, or the folder cannot be written.
    """
    place = _place(source, architecture)
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        result = Path(folder) / place.name
        _run_nvcc([*_FLAGS, f"-arch={architecture}", *_torch_flags(), str(source), "-o", str(result)], source)
        result.replace(place)
    return place


def compiled_kernels() -> str:
    """Say which kernels are kept, and what would compile others."""
    kept = [each.stem.rpartition("-")[0] for source in SOURCES for each in _kept(source)]
    compiler = _nvcc()
    found = f"compiled: {', '.join(kept)}" if kept else "none compiled"
    return f"{found}; nvcc {'not found (optional: kernels in CUDA C++)' if compiler is None else f'is {compiler}'}"


def _kept(source: Path) -> list[Path]:
    pattern = _place(source, "*")
    return sorted(pattern.parent.glob(pattern.name))


def _place(source: Path, architecture: str) -> Path:
    return current().kernel_cache / f"{source.stem}-{architecture}-{_key(source)}.so"


def _key(source: Path) -> str:
    """Return a name for all that the result depends on, besides the architecture."""
    parts = [torch.__version__, *_FLAGS]
    texts = [each.read_text("utf-8") for each in sorted([*source.parent.glob("*.h"), source])]
    return hashlib.sha256("\0".join([*parts, *texts]).encode()).hexdigest()[:16]


def _torch_flags() -> list[str]:
    home = Path(torch.__file__).parent
    libraries = [name for name in ("torch_cpu", "torch_cuda") if (home / "lib" / f"lib{name}.so").exists()]
    return [f"-I{home / 'include'}", f"-L{home / 'lib'}", *(f"-l{name}" for name in libraries)]


def _nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _run_nvcc(arguments: list[str], source: Path) -> None:
    compiler = _nvcc()
    if compiler is None:
        raise FileNotFoundError("nvcc is not on the path; install the CUDA toolkit, or run `make kernels` where it is")
    done = subprocess.run(  # noqa: S603 - the path of a compiler, and our own arguments
        [compiler, *arguments], capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in said if "error" in line), said[0])
        raise ChildProcessError(f"nvcc does not compile {source.name}: {first}")
