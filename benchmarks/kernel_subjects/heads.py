"""A step of the chunked cross entropy beside the plain head: what each takes in memory, and in time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import forget_peak, memory
from torch import Tensor
from torch.nn import functional as F

from fxopt import cuda_ops
from fxopt.passes.timing import time_candidates

__all__ = ["head_row"]

TOKENS = 4096


def inputs(classes: int, features: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(TOKENS, features, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=device, dtype=dtype) / features**0.5).requires_grad_()
    return x, weight, torch.randint(0, classes, (TOKENS,), device=device)


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


LOSSES = {"fxopt": cuda_ops.linear_cross_entropy, "eager": plain}


def step(loss: Callable[..., Tensor], given: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Any]:
    def call() -> Any:
        gradients = torch.autograd.grad(loss(*given), given[:2])
        if gradients[0].is_cuda:
            torch.cuda.synchronize()
        return gradients

    return call


def peak(name: str, classes: int, features: int, device: str) -> int:
    """Return the bytes of a step at its worst, without operands and their gradients; in a fresh process on a CPU."""
    if device == "cpu":
        command = [sys.executable, "-c", f"import kernel_subjects.heads as h; h.tell({name!r}, {classes}, {features})"]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)
    given = inputs(classes, features, device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = step(LOSSES[name], given)()
    return torch.cuda.max_memory_allocated() - before - sum(each.nbytes for each in gradients)


def tell(name: str, classes: int, features: int) -> None:
    """Print the bytes of one step; a small one before it takes what libraries keep."""
    torch.set_num_threads(1)
    step(LOSSES[name], inputs(64, features, "cpu"))()
    given = inputs(classes, features, "cpu")
    forget_peak()
    before = memory("VmRSS")
    gradients = step(LOSSES[name], given)()
    print(memory("VmHWM") - before - sum(each.nbytes for each in gradients))


def head_row(classes: int, features: int, device: str, *, seconds: float) -> dict[str, Any]:
    """Return peaks, and how many times as fast as the plain head the chunked one is, with its interval."""
    peaks = {name: peak(name, classes, features, device) for name in LOSSES}
    given = inputs(classes, features, device)
    timings = time_candidates(
        {name: step(LOSSES[name], given) for name in ("eager", "fxopt")}, seconds=seconds, least_rounds=6
    )
    ratio = timings.ratio("eager", "fxopt")
    return {
        "classes": classes,
        "tokens": TOKENS,
        "features": features,
        "peak_bytes": peaks,
        "memory_of_plain": round(peaks["fxopt"] / peaks["eager"], 4),
        "rounds": len(timings.rounds),
        "speedup": [round(value, 3) for value in (ratio.low, ratio.mid, ratio.high)],
    }
