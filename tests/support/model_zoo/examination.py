"""Look at one model: what was captured, whether it is equal everywhere, and what it costs."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fxopt
from fxopt.passes.timing import time_candidates
from fxopt.runtime.graphs import capture_of
from fxopt.runtime.values import is_container, is_leaf
from fxopt.tracing.program import Program

from .subjects import Built

__all__ = ["captured_row", "differences", "inference_row", "overhead_row", "unlike_in_evaluation"]

NEVER_CALLED = "the example inputs never call it"
_TOLERANCE = 1e-5
"""Relative, float32: graphs call the same kernels, so that only threads could reorder a sum."""


def captured_row(built: Built) -> tuple[dict[str, Any], Program]:
    """Capture a model and compare it with itself; return the findings and the program."""
    start = time.perf_counter()
    program = fxopt.capture(built.model, built.inputs)
    first = time.perf_counter() - start
    different = differences(built.model, program.model, built)
    missed = program.coverage().missed
    row = {
        "modules": sum(1 for _ in built.model.modules()),
        "graphs": len(program.graphs),
        "first_seconds": first,
        "opaque": _opaque(program),
        "never_called": sum(o.reason == NEVER_CALLED for o in program.opaque.values()),
        "parameters": parameter_shares(program),
        "different": different,
        "fallbacks": {name: sum(m.calls for m in missed if m.module == name) for name in {m.module for m in missed}},
        "fallback_reasons": sorted({miss.guard for miss in missed}),
    }
    return row, program


def _opaque(program: Program) -> list[dict[str, str]]:
    return [
        {"module": o.name, "class": type(program.module(o.name)).__name__, "where": o.location, "reason": o.reason}
        for o in program.opaque.values()
        if o.reason != NEVER_CALLED
    ]


def parameter_shares(program: Program) -> dict[str, int]:
    """Return how many parameters are called from graphs, by data-dependent experts, by other code, and not at all."""
    counts = dict.fromkeys(("graphs", "experts", "opaque", "never_called"), 0)
    modules = program.names.modules
    seen: set[int] = set()
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                counts[_caller_kind(program, name, module)] += parameter.numel()
    return counts


def _caller_kind(program: Program, name: str, module: nn.Module) -> str:
    """Tell what runs the code that uses a module's own parameters: a leaf's is that of the module that calls it."""
    while is_leaf(module) or is_container(module) or (capture_of(module) is None and name not in program.opaque):
        if not name:
            return "graphs" if capture_of(module) is not None else "opaque"
        name = name.rpartition(".")[0]
        module = program.names.modules[name]
    if capture_of(module) is not None:
        return "graphs"
    reason = program.opaque[name].reason
    if reason == NEVER_CALLED:
        return "never_called"
    is_expert = "expert" in name.lower() or "moe" in type(module).__name__.lower()
    return "experts" if is_expert and "data in a tensor" in reason else "opaque"


def differences(model: nn.Module, other: nn.Module, built: Built) -> list[str]:
    """Return in which of evaluation and training, first and second inputs, and gradients two models differ.

    A case that the model itself cannot run is passed over.
    """
    found: list[str] = []
    for training in (False, True):
        for size, inputs in (("first", built.inputs), ("second", built.second)):
            case = f"{'training' if training else 'evaluation'}, {size} inputs"
            expected = _outcome(model, inputs, training)
            if isinstance(expected, Exception):
                continue
            given = _outcome(other, inputs, training)
            found += [f"{case}: {what}" for what in _unlike(given, expected)]
    model.eval()
    other.eval()
    return found


def _outcome(model: nn.Module, inputs: Mapping[str, Any], training: bool) -> Any:
    """Return outputs, gradients and buffers of one call from a fixed random state; or the error that it raised."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train(training)
    model.zero_grad()
    with preserved_random_state():
        try:
            outputs = list(tensors(model(**copied(inputs))))
            loss = [t.float().square().mean() for t in outputs if t.is_floating_point() and t.requires_grad]
            if loss:
                torch.stack(loss).sum().backward()
        except Exception as error:
            return error
        finally:
            after = {name: buffer.clone() for name, buffer in model.named_buffers()}
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and buffer.shape == buffers[name].shape:
                        buffer.copy_(buffers[name])
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [t.detach() for t in outputs], gradients, after


@contextmanager
def preserved_random_state() -> Generator[None]:
    """Start from a fixed state of every generator inside, and put them back."""
    host, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        try:
            yield
        finally:
            random.setstate(host)
            np.random.set_state(numpy_state)


def _unlike(given: Any, expected: Any) -> Iterator[str]:
    if isinstance(given, Exception):
        yield f"raised {type(given).__name__}: {str(given).partition(chr(10))[0][:200]}"
        return
    if len(given[0]) != len(expected[0]):
        yield f"{len(given[0])} outputs for {len(expected[0])}"
    elif not all(map(close, given[0], expected[0])):
        yield f"outputs, by {max(map(_distance, given[0], expected[0])):.1e}"
    for part, what in ((1, "gradients"), (2, "buffers")):
        if given[part].keys() != expected[part].keys():
            names = sorted(given[part].keys() ^ expected[part].keys())
            yield f"{what} of {', '.join(names[:3])} are missing or new"
        elif not all(close(given[part][name], value) for name, value in expected[part].items()):
            yield what


def close(given: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors are equal up to the last bits, relative to the largest number."""
    if given.shape != expected.shape or given.dtype != expected.dtype:
        return False
    return _distance(given, expected) <= _TOLERANCE


def _distance(given: Tensor, expected: Tensor) -> float:
    if given.shape != expected.shape:
        return float("inf")
    if not given.is_floating_point() or not given.numel():
        return 0.0 if torch.equal(given, expected) else float("inf")
    smallest = torch.finfo(expected.dtype).tiny  # smaller numbers have fewer digits, or none
    given, expected = (torch.where(t.abs() < smallest, 0, t).double() for t in (given, expected))
    if not torch.equal(torch.isfinite(given), torch.isfinite(expected)):
        return float("inf")
    given, expected = torch.nan_to_num(given), torch.nan_to_num(expected)
    largest = float(expected.abs().max())
    return float((given - expected).abs().max()) / (largest or 1.0)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an output: caches, which are objects, are passed over."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs whose tensors a forward may change."""
    return {name: value.clone() if hasattr(value, "clone") else value for name, value in inputs.items()}


def overhead_row(built: Built, fast: nn.Module, seconds: float) -> dict[str, Any]:
    """Time a model beside itself without graphs: microseconds, and the ratio with its 95% interval."""
    modules = sum(1 for _ in built.model.modules())

    def run(model: nn.Module) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return model(**built.inputs)

        return call

    timings = time_candidates({"eager": run(built.model), "fast": run(fast)}, seconds=seconds, least_rounds=15)
    ratio = timings.ratio("eager", "fast")
    return {
        "eager_us": timings.microseconds("eager"),
        "fast_us": timings.microseconds("fast"),
        "modules": modules,
        "speed": [round(value, 4) for value in (ratio.low, ratio.mid, ratio.high)],
    }


def inference_row(built: Built, *, measure: bool) -> tuple[dict[str, Any], nn.Module]:
    """Optimize a model for inference, and check what is promised about the result."""
    before = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    start = time.perf_counter()
    fast = fxopt.optimize(built.model, "inference", example_inputs=built.inputs, measure=measure)
    row: dict[str, Any] = {"seconds": time.perf_counter() - start}
    row["applied"] = dict(Counter(d.pass_name for d in fxopt.plan(fast).decisions if d.status == "applied"))
    row["different"] = unlike_in_evaluation(built.model, fast, built)
    row["class_kept"] = type(built.model) in type(fast).__mro__
    row["untouched"] = _same_state(built.model.state_dict(), before)
    row["loads_old"] = _loads(fast, built)
    row["writes_old"] = _same_state(fxopt.state_dict(fast), before)
    row["generates"] = _generated(fast, built) == _generated(built.model, built)
    restored = fxopt.restore(fast)
    row["restored_different"] = unlike_in_evaluation(built.model, restored, built)
    row["restored_class"] = type(restored) is type(built.model) and _same_state(restored.state_dict(), before)
    return row, fast


def unlike_in_evaluation(model: nn.Module, other: nn.Module, built: Built) -> list[str]:
    """Return for which of the first and second inputs two models differ by more than rounding."""
    found: list[str] = []
    for size, inputs in (("first", built.inputs), ("second", built.second)):
        with torch.no_grad():
            expected = [t.clone() for t in tensors(model(**copied(inputs)))]
            given = list(tensors(other(**copied(inputs))))
        if len(given) != len(expected) or not all(_near(a, b) for a, b in zip(given, expected, strict=True)):
            found.append(f"{size} inputs")
    return found


def _near(given: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors are equal up to the rounding of another order of operations."""
    return given.shape == expected.shape and _distance(given, expected) <= 100 * _TOLERANCE


def _generated(model: Any, built: Built) -> Any:
    """Return the tokens that a model appends; None where it appends none, or not to these inputs."""
    if not getattr(model, "can_generate", bool)():
        return None
    try:
        with torch.no_grad(), preserved_random_state():
            found = model.generate(**copied(built.inputs), max_new_tokens=4, do_sample=False)
    except Exception:  # what a family asks for is its own
        return None
    return found.tolist() if isinstance(found, Tensor) else None


def _same_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return list(state) == list(expected) and all(_near(state[name], value) for name, value in expected.items())


def _loads(fast: nn.Module, built: Built) -> bool:
    """Tell whether other weights, loaded into both under the old names, give the same again."""
    kept = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    other = {name: tensor * 0.9 if tensor.is_floating_point() else tensor for name, tensor in kept.items()}
    try:
        built.model.load_state_dict(other)
        fxopt.load_state_dict(fast, other)
        return not unlike_in_evaluation(built.model, fast, built)
    finally:
        built.model.load_state_dict(kept)
        fxopt.load_state_dict(fast, kept)
