"""What compilers say of Triton's kernels, and how far the interpreter is from references; neither needs a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["compile_reports", "interpreter_differences"]

CHECKS = Path(__file__).parents[2] / "tests" / "cuda_ops" / "test_kernels.py"
CAPABILITIES = (80, 90)
FEATURES, CLASSES = 4096, 32_768


def checks() -> ModuleType:
    """Return the tests of kernels, which know how one is called without a GPU."""
    spec = importlib.util.spec_from_file_location("kernel_checks", CHECKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreter_differences() -> dict[str, float]:
    """Return for each operator the largest difference from its reference, of the largest value, in any dtype."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CHECKS)], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = {}
    for case, difference in json.loads(done.stdout).items():
        name, dtype = re.split(r"[: ]", case)[0], case.rpartition(" ")[2]
        key = f"{name} {dtype}"
        found[key] = max(found.get(key, 0.0), difference)
    return found


def rows(dtype: torch.dtype) -> Tensor:
    return torch.zeros(8, FEATURES, dtype=dtype)


def members(*widths: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    sizes = list(zip(widths[1:], widths[:-1], strict=True))
    weights = [torch.zeros(8, *size, dtype=dtype) for size in sizes]
    return weights, [torch.zeros(8, outside, dtype=dtype) for outside, _ in sizes]


def calls(dtype: torch.dtype) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return by label an operator and its arguments, at sizes that are in use."""
    x, vector = rows(dtype), torch.zeros(FEATURES, dtype=dtype)
    key, column = torch.tensor([0, 0]), torch.zeros(8, 1)
    head = torch.zeros(8, 64, dtype=dtype), torch.zeros(CLASSES, 64, dtype=dtype), None, torch.zeros(8).long()
    heads, large = members(16, 32, 4, dtype=dtype), members(64, 64, 64, 4, dtype=dtype)
    return {
        "add": ("add", (x, x, 0.5)),
        "log_clip": ("log_clip", (x, 0.1)),
        "bernoulli_sigmoid": ("bernoulli_sigmoid", (x, vector, key)),
        "bias_act gelu": ("bias_act", (x, vector, None, None, "gelu", 0.0)),
        "bias_act gelu, backward": ("bias_act_backward", (x, x, vector, None, "gelu", 0.0)),
        "gated silu": ("gated", (x, x, "silu")),
        "gated silu, backward": ("gated_backward", (x, x, x, "silu")),
        "rms_norm": ("rms_norm", (x, vector, x, 1e-6)),
        "rms_norm, backward": ("rms_norm_backward", (x, x, x, vector, column)),
        "layer_norm": ("layer_norm", (x, vector, vector, x, 1e-6)),
        "layer_norm, backward": ("layer_norm_backward", (x, x, x, vector, vector, column, column)),
        "rotary_embedding": (
            "rotary_embedding",
            (torch.zeros(1, 2, 8, 128, dtype=dtype), *(torch.zeros(8, 128, dtype=dtype) for _ in range(2))),
        ),
        "linear_cross_entropy_step": ("linear_cross_entropy_step", (*head, -100, 0.0, 8)),
        "ensemble_mlp 16-32-4": ("ensemble_mlp", (torch.zeros(64, 16, dtype=dtype), *heads, "tanh")),
        "ensemble_mlp 16-32-4, backward": (
            "ensemble_mlp_backward",
            (torch.zeros(8, 64, 4, dtype=dtype), torch.zeros(64, 16, dtype=dtype), *heads, "tanh", True),
        ),
        "ensemble_mlp 64-64-64-4": ("ensemble_mlp", (torch.zeros(64, 64, dtype=dtype), *large, "tanh")),
        "ensemble_mlp 64-64-64-4, backward": (
            "ensemble_mlp_backward",
            (torch.zeros(8, 64, 4, dtype=dtype), torch.zeros(64, 64, dtype=dtype), *large, "tanh", True),
        ),
    }


def compile_reports(dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """Return registers of a thread, shared memory of a block and spilled bytes of each kernel and architecture."""
    module = checks()
    return [
        {"kernel": label, "sm": capability, **usage(compiled)}
        for label, (operator, arguments) in calls(dtype).items()
        for capability in CAPABILITIES
        for compiled in module.launches(partial(module._kernel(operator), *arguments), capability)[:1]
    ]


def usage(compiled: Any) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {
        "registers": of(text, "REG"),
        "shared_bytes": compiled.metadata.shared,
        "spilled_bytes": of(text, "STACK"),
        "warps": compiled.metadata.num_warps,
    }


def of(text: str, name: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", text)
    assert found is not None, text
    return int(found[1])
