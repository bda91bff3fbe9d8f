"""Where no kernel can be had: the reference computes, and says so once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxopt.cuda_ops import gpu, kernels_in_use


class BuildError(Exception):
    """Stands for what Triton raises."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that there is a GPU with Triton, and one kernel that builds; return what was called."""
    calls: list[str] = []

    def kernel(place: str) -> Callable[[Tensor], Tensor]:
        def compute(x: Tensor) -> Tensor:
            calls.append(place)
            if place.startswith("broken"):
                raise BuildError("no compiler\nsecond line")
            if place.startswith("failing"):
                raise RuntimeError("out of memory")
            return x + 1

        return compute

    monkeypatch.setattr(gpu, "_has_triton", lambda: True)
    monkeypatch.setattr(gpu, "_kernel", kernel)
    monkeypatch.setattr(gpu, "_build_errors", lambda: (BuildError,))
    monkeypatch.setattr(gpu, "_broken", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return calls


def test_a_kernel_computes(called: list[str]):
    assert gpu.on_gpu("whole:f", "f", torch.neg)(torch.ones(2)).tolist() == [2, 2]
    assert called == ["whole:f"]


def test_float64_is_for_the_reference(called: list[str]):
    assert gpu.on_gpu("whole:f", "f", torch.neg)(torch.ones(2).double()).tolist() == [-1, -1]
    assert called == []


def test_a_kernel_that_cannot_be_built_is_tried_once(called: list[str]):
    compute = gpu.on_gpu("broken:f", "f", torch.neg)
    with pytest.warns(UserWarning, match="the kernel of f could not be built, so its reference computes: no compiler"):
        assert compute(torch.ones(2)).tolist() == [-1, -1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute(torch.ones(2)).tolist() == [-1, -1]
    assert called == ["broken:f"]


def test_an_error_of_a_launch_is_not_swallowed(called: list[str]):
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu.on_gpu("failing:f", "f", torch.neg)(torch.ones(2))


def test_the_doctor_says_what_computes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "_has_triton", lambda: False)
    assert kernels_in_use() == "CPU reference: triton is not installed"
    monkeypatch.setattr(gpu, "_has_triton", lambda: True)
    assert kernels_in_use() == "CPU reference: no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.importlib.metadata, "version", lambda _: "3.7.1")
    monkeypatch.setattr(gpu, "_broken", {"add.triton_kernel:add": "no compiler"})
    assert kernels_in_use() == "triton 3.7.1; reference for add.triton_kernel:add, which could not be built"
