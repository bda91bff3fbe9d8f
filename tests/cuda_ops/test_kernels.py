"""Kernels against references: on a GPU, in Triton's interpreter, and compiled for GPUs that are not there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from fxopt import cuda_ops

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
DTYPES = ("float32", "float16", "bfloat16")
ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""The interpreter cuts bfloat16 where a GPU rounds it, so two steps of the dtype are allowed."""


def _random(*shape: int, dtype: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def _rows(dtype: str) -> Tensor:
    return _random(33, 70, dtype=dtype)


def _transposed(dtype: str) -> Tensor:
    return _random(70, 33, dtype=dtype, seed=1).t()


def _vector(dtype: str, seed: int = 2) -> Tensor:
    return _random(70, dtype=dtype, seed=seed)


KEY = torch.tensor([-3, 1 << 40])
CASES: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "add": lambda dtype: (_rows(dtype), _vector(dtype), 0.5),
    "add:transposed": lambda dtype: (_rows(dtype), _transposed(dtype)),
    "add:empty": lambda dtype: (_rows(dtype)[:0], _vector(dtype)),
    "add:scalars": lambda dtype: (_rows(dtype)[0, 0], _vector(dtype)[0]),
    "log_clip": lambda dtype: (_transposed(dtype), 0.1),
    "log_clip_backward": lambda dtype: (_rows(dtype), _transposed(dtype), 0.1),
    "bernoulli_sigmoid": lambda dtype: (_transposed(dtype), _vector(dtype)[:70], KEY),
    "bernoulli_sigmoid:without": lambda dtype: (_rows(dtype), None, KEY),
}
"""Operator, and what is special, to arguments."""
KERNELS = {
    "add": "add",
    "log_clip": "log_clip",
    "log_clip_backward": "log_clip",
    "bernoulli_sigmoid": "bernoulli_sigmoid",
}
"""Operator to the folder that its kernel is in."""
each_case = pytest.mark.parametrize("case", CASES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def _operator(case: str) -> Callable[..., Any]:
    return getattr(torch.ops.fxopt, case.partition(":")[0]).default


def _kernel(case: str) -> Callable[..., Any]:
    name = case.partition(":")[0]
    return getattr(importlib.import_module(f"{cuda_ops.__name__}.{KERNELS[name]}.triton_kernel"), name)


def _difference(got: Any, expected: Any) -> float:
    """Return the largest difference of results, in parts of the largest value; infinite where they differ in kind."""
    pairs = [(got, expected)] if isinstance(got, Tensor) else list(zip(got, expected, strict=True))
    found = [0.0]
    for one, other in pairs:
        if (one.shape, one.dtype, one.is_contiguous()) != (other.shape, other.dtype, other.is_contiguous()):
            return float("inf")
        scale = 1 + float(other.abs().max()) if other.numel() else 1.0
        found.append(float((one.double() - other.double()).abs().max()) / scale if one.numel() else 0.0)
    return max(found)


def _interpret() -> None:
    """Run every case in Triton's interpreter, which must be asked for before Triton is imported; print differences."""
    found = {
        f"{case} {dtype}": _difference(_kernel(case)(*make(dtype)), _operator(case)(*make(dtype)))
        for case, make in CASES.items()
        for dtype in DTYPES
    }
    print(json.dumps(found))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_operator_has_a_case_and_a_kernel():
    names = {name.removeprefix("fxopt::") for name in cuda_ops.NAMES}
    assert {case.partition(":")[0] for case in CASES} == names == set(KERNELS)


@needs_triton
@each_case
@each_dtype
def test_interpreted_kernels_compute_what_references_do(interpreted: dict[str, float], case: str, dtype: str):
    assert interpreted[f"{case} {dtype}"] <= ROUNDING[dtype]


@pytest.mark.gpu
@each_case
@each_dtype
def test_kernels_compute_what_references_do(case: str, dtype: str):
    args = CASES[case](dtype)
    got = _operator(case)(*(arg.cuda() if isinstance(arg, Tensor) else arg for arg in args))
    results = got.cpu() if isinstance(got, Tensor) else tuple(each.cpu() for each in got)
    assert _difference(results, _operator(case)(*args)) <= ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@each_case
def test_kernels_compile_without_a_gpu(monkeypatch: pytest.MonkeyPatch, case: str, capability: int):
    """Compile what a launch would: its arguments are noted in the place of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launched: list[ASTSource] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = self.signature.bind(*args, **kwargs).arguments
        fixed = {p.name: given[p.name] for p in self.params if p.is_constexpr}
        types = {name: "constexpr" if name in fixed else _type(value) for name, value in given.items()}
        launched.append(ASTSource(self, types, fixed))

    monkeypatch.setattr(triton.JITFunction, "run", note)
    _kernel(case)(*CASES[case]("bfloat16"))
    assert launched or case.endswith("empty")
    for source in launched:
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


def _type(value: Any) -> str:
    pointers = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
    return pointers[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i64"


if __name__ == "__main__":
    _interpret()
