"""Ways to make a model small or fast."""

from __future__ import annotations

import copy
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.transforms.delegate import Delegate
from fxopt.transforms.quantize import Quantize

from .cases import Greedy
from .peers import PEERS
from .prepared import Inputs, Prepared, Way, finished

__all__ = ["WAYS"]


def plain(model: nn.Module, inputs: Inputs, *, compiled: bool = False, dtype: torch.dtype | None = None) -> Prepared:
    """Leave a model as it is, compile it, or convert it."""
    start = time.perf_counter()
    model = copy.deepcopy(model)
    if dtype is not None:
        model = model.to(dtype)
        kinds = inputs.items() if isinstance(inputs, dict) else ()
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in kinds} or inputs
    return finished(start, model, inputs, compiled=compiled)


def torchao(model: nn.Module, inputs: Inputs, *, weight_only: bool = False, compiled: bool = False) -> Prepared:
    """Quantize by torchao's own entry point."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    start = time.perf_counter()
    model = copy.deepcopy(model)
    quantize_(model, Int8WeightOnlyConfig() if weight_only else Int8DynamicActivationInt8WeightConfig())
    return finished(start, model, inputs, compiled=compiled)


def quantize(model: nn.Module, inputs: Inputs, *, scheme: Any, budget: float | None = None) -> Prepared:
    """Quantize by fxopt, timed and verified; a decoder on a step of one token."""
    start = time.perf_counter()
    if isinstance(model, Greedy):
        fast, size = _quantized(model.decoder, fxopt.Inputs(input_ids=next(iter(inputs))[:, :1]), scheme)
        generating: Any = copy.copy(model)
        generating.__dict__["_modules"] = {"decoder": fast}
        return finished(start, generating, inputs, size=size)
    given = _given(inputs)
    fast, size = _quantized(model, given, scheme, budget)
    return finished(start, fast, inputs, size=size)


def with_engine(model: nn.Module, inputs: Inputs, *, budget: float | None = None) -> Prepared:
    """Quantize with ranges of the call, and let an engine compute that."""
    start, given = time.perf_counter(), _given(inputs)
    static = Quantize("int8_static", budget=budget, calibration=[given])
    fast, size = _sized(model, given, static, Delegate(dtype=torch.int8, budget=budget))
    return finished(start, fast, inputs, size=size)


def preset(model: nn.Module, inputs: Inputs) -> Prepared:
    """Let the preset take what is fastest: without calibration it quantizes no convolutions."""
    start, given = time.perf_counter(), _given(inputs)
    fast, size = _sized(model, given, "inference{dtype=int8}")
    return finished(start, fast, inputs, size=size)


def by_method(model: nn.Module, inputs: Inputs, *, scheme: Any, method: Any) -> Prepared:
    """Quantize all linear layers of a language model, fast or not, by a method that sees eight other batches."""
    start, generator = time.perf_counter(), torch.Generator().manual_seed(1)
    tokens: torch.Tensor = dict(inputs)["input_ids"]
    others = [torch.randint(0, int(tokens.max()), tokens.shape, generator=generator) for _ in range(8)]
    is_plain = method == "rtn" and scheme != "int8_static"  # which looks at no data
    seen = None if is_plain else [{"input_ids": each} for each in others]
    pass_ = Quantize(scheme, budget=1.0, aim="size", calibration=seen, method=method)
    fast, size = _sized(model, fxopt.Inputs(input_ids=tokens), pass_)
    return finished(start, fast, inputs, size=size)


def _given(inputs: Inputs) -> fxopt.Inputs:
    return fxopt.Inputs(**inputs) if isinstance(inputs, dict) else fxopt.Inputs(*inputs)


def _quantized(model: nn.Module, given: fxopt.Inputs, scheme: Any, budget: float | None = None) -> tuple[Any, int]:
    """Return a quantized model, and the size of its archive."""
    calibration, aim = [given] if scheme == "int8_static" else None, "size" if scheme == "float8" else "speed"
    if scheme == "int4_weight":
        budget = 0.5  # random weights are the worst case for 4 bits
    return _sized(model, given, Quantize(scheme, budget=budget, aim=aim, calibration=calibration))


def _sized(model: nn.Module, given: fxopt.Inputs, *passes: Pass | str) -> tuple[Any, int]:
    fast = fxopt.optimize(model, list(passes), example_inputs=given)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.fxopt"
        fxopt.save(fast, path, factory="torch.nn:Identity")
        return fast, path.stat().st_size


SCHEMES = ("int8_dynamic", "int8_static", "int8_weight", "int4_weight", "float8")
METHODS = (
    ("int8_dynamic", "rtn"), ("int8_dynamic", "smoothquant"), ("int8_static", "rtn"),
    ("int8_static", "smoothquant"), ("int8_weight", "rtn"), ("int8_weight", "gptq"),
    ("int4_weight", "rtn"), ("int4_weight", "awq"), ("int4_weight", "gptq"),
)  # fmt: skip
WAYS: dict[str, Way] = {
    "float32 eager": plain,
    "float32 compiled": partial(plain, compiled=True),
    "bfloat16 eager": partial(plain, dtype=torch.bfloat16),
    "torchao dynamic eager": torchao,
    "torchao dynamic compiled": partial(torchao, compiled=True),
    "torchao int8_weight eager": partial(torchao, weight_only=True),
    **PEERS,
    "fxopt preset int8": preset,
    "fxopt int8_static, any error": partial(quantize, scheme="int8_static", budget=1.0),
    "fxopt int8_static, engine": with_engine,
    "fxopt int8_static, engine, any error": partial(with_engine, budget=1.0),
    **{f"fxopt {scheme}": partial(quantize, scheme=scheme) for scheme in SCHEMES},
    **{f"fxopt {scheme} {method}": partial(by_method, scheme=scheme, method=method) for scheme, method in METHODS},
}
