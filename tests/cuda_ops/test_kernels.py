"""Kernels against references: on a GPU, in Triton's interpreter, and compiled for GPUs that are not there."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

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


def _column() -> Tensor:
    return _random(33, 1, dtype="float32", seed=4).abs()


def _head(dtype: str) -> tuple[Tensor, ...]:
    """Return rows, weight, bias and targets, some of which are ignored."""
    target = torch.arange(33) % 19
    return (
        _rows(dtype),
        _random(19, 70, dtype=dtype, seed=5) / 8,
        _random(19, dtype=dtype),
        target.where(target != 3, -100),
    )


def _rotary(dtype: str) -> tuple[Tensor, ...]:
    return tuple(_random(*shape, dtype=dtype) for shape in ((2, 2, 3, 5, 6), (5, 6), (2, 1, 1, 5, 6)))


def _members(dtype: str, *widths: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and biases of five members; the last layer has no bias."""
    sizes = list(zip(widths[1:], widths[:-1], strict=True))
    weights = [_random(5, *size, dtype=dtype, seed=6 + i) / size[1] ** 0.5 for i, size in enumerate(sizes)]
    biases = [_random(5, size[0], dtype=dtype, seed=9 + i) for i, size in enumerate(sizes)]
    return weights, [*biases[:-1], biases[-1].new_empty(0)]


def _own(dtype: str, *shape: int) -> Tensor:
    return _random(*shape[:-2], shape[-1], shape[-2], dtype=dtype, seed=3).mT


KEY = torch.tensor([-3, 1 << 40])
CASES: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "add": lambda dtype: (_rows(dtype), _vector(dtype), 0.5),
    "add:transposed": lambda dtype: (_rows(dtype), _transposed(dtype)),
    "add:empty": lambda dtype: (_rows(dtype)[:0], _vector(dtype)),
    "add:scalars": lambda dtype: (_rows(dtype)[0, 0], _vector(dtype)[0]),
    "log_clip": lambda dtype: (_transposed(dtype), 0.1),
    "log_clip_backward": lambda dtype: (_rows(dtype), _transposed(dtype), 0.1),
    "bias_act": lambda dtype: (_rows(dtype), _vector(dtype), _transposed(dtype), KEY, "gelu", 0.25),
    "bias_act:relu": lambda dtype: (_transposed(dtype), _vector(dtype), None, None, "relu", 0.0),
    "bias_act:tanh": lambda dtype: (_rows(dtype), None, None, None, "gelu_tanh", 0.0),
    "bias_act:silu": lambda dtype: (_rows(dtype), None, None, KEY, "silu", 1.0),
    "bias_act_backward": lambda dtype: (_rows(dtype), _transposed(dtype), _vector(dtype), KEY, "gelu", 0.25),
    "bias_act_backward:tanh": lambda dtype: (_rows(dtype), _rows(dtype), None, None, "gelu_tanh", 0.0),
    "bias_act_backward:sigmoid": lambda dtype: (_rows(dtype), _rows(dtype), None, None, "sigmoid", 0.0),
    "bias_act_backward:result": lambda dtype: (_rows(dtype), _rows(dtype), None, None, "tanh_by_result", 0.0),
    "ensemble_mlp": lambda dtype: (_rows(dtype), *_members(dtype, 70, 19, 33, 3), "gelu"),
    "ensemble_mlp:own": lambda dtype: (_own(dtype, 5, 7, 12), *_members(dtype, 12, 20, 4), "tanh"),
    "ensemble_mlp:one": lambda dtype: (_own(dtype, 5, 1, 12), *_members(dtype, 12, 4), "relu"),
    "ensemble_mlp:large": lambda dtype: (_rows(dtype), *_members(dtype, 70, 130, 3), "silu"),
    "ensemble_mlp_backward": lambda dtype: (
        _random(5, 33, 3, dtype=dtype),
        _rows(dtype),
        *_members(dtype, 70, 19, 33, 3),
        "gelu",
        True,
    ),
    "ensemble_mlp_backward:own": lambda dtype: (
        _own(dtype, 5, 7, 4),
        _own(dtype, 5, 7, 12),
        *_members(dtype, 12, 20, 4),
        "tanh",
        True,
    ),
    "ensemble_mlp_backward:fixed": lambda dtype: (
        _random(5, 33, 3, dtype=dtype),
        _rows(dtype),
        *_members(dtype, 70, 3),
        "relu",
        False,
    ),
    "gated": lambda dtype: (_rows(dtype), _transposed(dtype), "silu"),
    "gated_backward": lambda dtype: (_rows(dtype), _transposed(dtype), _rows(dtype), "gelu"),
    "linear_cross_entropy": lambda dtype: (*_head(dtype), None, -100, 0.1, 0.0, 0.0, 16),
    "linear_cross_entropy_step": lambda dtype: (
        *_head(dtype),
        _random(19, dtype="float32").abs(),
        -100,
        0.1,
        2.0,
        0.1,
        16,
    ),
    "linear_cross_entropy_backward": lambda dtype: (
        _random(33, dtype="float32"),
        *_head(dtype),
        _random(19, dtype="float32").abs(),
        -100,
        0.0,
        1.5,
        0.1,
        16,
    ),
    "rms_norm": lambda dtype: (_rows(dtype), _vector(dtype), _transposed(dtype), 1e-6),
    "rms_norm:plain": lambda dtype: (_transposed(dtype), None, None, 1e-6),
    "rms_norm_backward": lambda dtype: (_rows(dtype), _rows(dtype), _transposed(dtype), _vector(dtype), _column()),
    "layer_norm": lambda dtype: (_rows(dtype), _vector(dtype), _vector(dtype, 3), _transposed(dtype), 1e-6),
    "layer_norm_backward": lambda dtype: (
        _rows(dtype),
        None,
        _transposed(dtype),
        _vector(dtype),
        _vector(dtype),
        _column(),
        _column(),
    ),
    "rotary_embedding": lambda dtype: _rotary(dtype),
    "rotary_embedding:back": lambda dtype: (*_rotary(dtype), True),
    "rotary_embedding:rows": lambda dtype: (_rows(dtype), _vector(dtype), _transposed(dtype)),
    "bernoulli_sigmoid": lambda dtype: (_transposed(dtype), _vector(dtype), KEY),
    "bernoulli_sigmoid:without": lambda dtype: (_rows(dtype), None, KEY),
}
"""Operator, and what is special, to arguments."""
KERNELS = {
    "add": "add",
    "log_clip": "log_clip",
    "log_clip_backward": "log_clip",
    "bernoulli_sigmoid": "bernoulli_sigmoid",
    "bias_act": "bias_act",
    "bias_act_backward": "bias_act",
    "ensemble_mlp": "ensemble_mlp",
    "ensemble_mlp_backward": "ensemble_mlp",
    "gated": "gated",
    "gated_backward": "gated",
    "linear_cross_entropy": "linear_cross_entropy",
    "linear_cross_entropy_step": "linear_cross_entropy",
    "linear_cross_entropy_backward": "linear_cross_entropy",
    "rms_norm": "norms",
    "rms_norm_backward": "norms",
    "layer_norm": "norms",
    "layer_norm_backward": "norms",
    "rotary_embedding": "rotary_embedding",
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
    """Return the largest difference of results, in parts of the largest value; infinite where they differ in kind.

    It is infinite, too, where a difference is not finite: no case here has a result that is not.
    """
    pairs = [(got, expected)] if isinstance(got, Tensor) else list(zip(got, expected, strict=True))
    found = [0.0]
    for one, other in pairs:
        if (one.shape, one.dtype, one.is_contiguous()) != (other.shape, other.dtype, other.is_contiguous()):
            return float("inf")
        if one.numel():
            difference = float((one.double() - other.double()).abs().max()) / (1 + float(other.abs().max()))
            found.append(difference if math.isfinite(difference) else float("inf"))
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
    without = {"linear_cross_entropy_sum", "near_pairs", "oriented_edges"}  # made of others, or of torch's
    without |= {"triangles", "triple_products"}  # in CUDA C++, with tests of their own
    assert {case.partition(":")[0] for case in CASES} == names - without == set(KERNELS)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_is_no_small_difference(wrong: float):
    right = torch.ones(3)
    assert _difference(right, right) == 0
    assert _difference((right, right.index_fill(0, torch.tensor([1]), wrong)), (right, right)) == float("inf")


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
    got = _operator(case)(*tree_map_only(Tensor, Tensor.cuda, args))
    results = tree_map_only(Tensor, Tensor.cpu, got)
    assert _difference(results, _operator(case)(*args)) <= ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@each_case
def test_kernels_compile_without_a_gpu(case: str, capability: int):
    found = launches(lambda: _kernel(case)(*CASES[case]("bfloat16")), capability)
    assert found or case.endswith(("empty", "large"))
    assert all(compiled.asm["cubin"] for compiled in found)


class Driver:
    """Stands for that of a GPU which is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by this

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def launches(call: Callable[[], object], capability: int) -> list[Any]:
    """Return the kernels that a call would launch on a GPU of a capability: they are compiled, and not launched."""
    import triton
    from triton.runtime import driver

    found: list[Any] = []
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(run(self, *args, warmup=True, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", compile_only)
        patch.setattr(driver, "_active", Driver(capability))
        call()
    return found


if __name__ == "__main__":
    _interpret()
