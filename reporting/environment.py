"""What `fxopt doctor` looks at: versions, devices, settings, and passes that other distributions bring."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil
from dataclasses import dataclass

import torch

from ..cuda_ops import compiled_kernels, kernels_in_use
from ..passes.pipeline import available
from ..settings import Settings, current
from ..version import VERSION

__all__ = ["Check", "checks"]

REQUIRED = ("torch-geometric", "networkx", "safetensors", "typer", "rich")
OPTIONAL = {"torchao": "quantization", "triton": "GPU kernels", "transformers": "its models"}
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)


@dataclass(frozen=True)
class Check:
    """One thing looked at; `ok` is False only where fxopt cannot work as it should."""

    name: str
    found: str
    ok: bool = True


def checks() -> list[Check]:
    """Look at everything that fxopt stands on."""
    return [
        Check("fxopt", VERSION),
        Check("python", platform.python_version()),
        _torch(),
        *(_distribution(name, f"missing; pip install {name}", required=True) for name in REQUIRED),
        *(_distribution(name, f"not installed (optional: {use})", required=False) for name, use in OPTIONAL.items()),
        Check("devices", _devices()),
        Check("cpu instructions", torch.backends.cpu.get_cpu_capability()),
        Check("c++ compiler", _compiler()),
        Check("operators", kernels_in_use()),
        Check("kernels in CUDA C++", compiled_kernels()),
        *_settings(current()),
        *_passes(),
    ]


def _torch() -> Check:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    ok = OLDEST_TORCH <= version <= NEWEST_TORCH
    supported = " to ".join(".".join(map(str, each)) for each in (OLDEST_TORCH, NEWEST_TORCH))
    return Check("torch", torch.__version__ + ("" if ok else f" (fxopt supports {supported})"), ok)


def _distribution(name: str, absent: str, *, required: bool) -> Check:
    try:
        return Check(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, absent, ok=not required)


def _devices() -> str:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join([f"cpu ({torch.get_num_threads()} threads)", *gpus])


def _compiler() -> str:
    """Return the compiler that torch.compile would take, where there is one."""
    names = ("c++", "g++", "clang++")
    return next(filter(None, map(shutil.which, names)), "none (optional: torch.compile)")


def _settings(settings: Settings) -> list[Check]:
    return [Check(f"FXOPT_{f.name.upper()}", str(getattr(settings, f.name))) for f in dataclasses.fields(settings)]


def _passes() -> list[Check]:
    return [
        Check(f"pass {info.name}", info.problem or f"from {info.origin}", ok=not info.problem)
        for info in available().values()
        if info.problem or info.origin != "fxopt"
    ]
