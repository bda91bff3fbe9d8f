"""What `fxopt doctor` looks at: versions, devices, settings, and passes that other distributions bring."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..compat import cpu_capabilities
from ..compat.quantized import why_no_static_int8
from ..cuda_ops import compiled_kernels, kernels_in_use
from ..passes.cache import Cache
from ..passes.pipeline import available
from ..passes.timing import DEFAULT_BUDGET
from ..settings import Measure, Settings, current
from ..storage import byte_text
from ..version import VERSION

__all__ = ["Check", "checks"]

REQUIRED = ("torch-geometric", "networkx", "safetensors", "typer", "rich")
OPTIONAL = {
    "torchao": "quantization", "openvino": "an engine for the pass delegate",
    "onnxruntime": "an engine for the pass delegate", "onnx": "onnxruntime", "onnxscript": "export to ONNX",
    "triton": "GPU kernels", "transformers": "its models", "matplotlib": "plots of reports",
}  # fmt: skip
_INT8 = ("avx_vnni", "avx512_vnni", "amx_int8", "dot", "i8mm")
_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)


@dataclass(frozen=True)
class Check:
    """One thing looked at; `ok` is False only where fxopt cannot work as it should."""

    name: str
    found: str
    ok: bool = True


def checks() -> list[Check]:
    """Look at everything that fxopt stands on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    refused = f"; quantize{{scheme=int8_static}} is refused: {reason}" if (reason := why_no_static_int8()) else ""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "none (optional: torch.compile)")
    return [
        Check("fxopt", VERSION),
        Check("python", platform.python_version()),
        _torch(),
        *(_distribution(name, f"missing; pip install {name}", required=True) for name in REQUIRED),
        *(_distribution(name, f"not installed (optional: {use})", required=False) for name, use in OPTIONAL.items()),
        Check("devices", ", ".join([f"cpu (threads: {torch.get_num_threads()})", *gpus])),
        Check("cpu instructions", torch.backends.cpu.get_cpu_capability()),
        Check("cpu int8", _instructions(_INT8) + refused),
        Check("cpu bfloat16", _instructions(_BFLOAT16)),
        Check("c++ compiler", compiler),
        Check("operators", kernels_in_use()),
        Check("kernels in CUDA C++", compiled_kernels()),
        Check("cached decisions", _cached(current())),
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


def _instructions(names: Sequence[str]) -> str:
    """Return which of some instructions this CPU has."""
    told = cpu_capabilities()
    if not told:
        return "this PyTorch does not tell"
    return ", ".join(name for name in names if told.get(name)) or f"none of {', '.join(names)}: it may not be faster"


def _settings(settings: Settings) -> list[Check]:
    given = {f.name: _as_set(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
    if settings.time_budget is None:
        given["time_budget"] = str(DEFAULT_BUDGET)
    return [Check(f"FXOPT_{name.upper()}", value) for name, value in given.items()]


def _cached(settings: Settings) -> str:
    if settings.cache is None:
        return "none: the cache is off"
    try:
        count, size = Cache(settings.cache).usage()
    except OSError as error:
        return f"none: the folder cannot be read ({error}); set FXOPT_CACHE to another one"
    return f"{count}, {byte_text(size)} in {settings.cache}"


def _as_set(value: object) -> str:
    """Return a setting's value as a user would give it."""
    if value is None:
        return "0"
    if isinstance(value, Measure) and value.is_cold:
        return value.value
    return str(int(bool(value))) if isinstance(value, (bool, Measure)) else str(value)


def _passes() -> list[Check]:
    return [
        Check(f"pass {info.name}", info.problem or f"from {info.origin}", ok=not info.problem)
        for info in available().values()
        if info.problem or info.origin != "fxopt"
    ]
