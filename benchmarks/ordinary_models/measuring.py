"""Measure one cell of the table, in a process that does nothing else."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import forget_peak, memory, page_faults
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fxopt
from fxopt.passes.timing import time_candidates
from fxopt.runtime.values import map_tensors

from .cases import CASES, SEED, Case
from .columns import COLUMNS, OWN_THREADS, Prepared, Subject, first_tensor, imported, optimized

__all__ = ["measured", "memory_used", "prepared_again", "reference", "relative_error"]

_ROUNDING = {"exact": 32 * 2.0**-23, "bf16": 2.0**-9}
"""Column -> by what part weights are off: 32 units in the last place, as verification has it, or half a unit."""

_PROBES = 3


def measured(name: str, column: str, threads: int, seconds: float) -> dict[str, Any]:
    """Return what a column takes and gives on a model: times beside eager, preparation, error and memory."""
    case = CASES[name]
    imported(column)
    return _trained(case, column, threads, seconds) if case.labels else _evaluated(case, column, threads, seconds)


@torch.no_grad()
def _evaluated(case: Case, column: str, threads: int, seconds: float) -> dict[str, Any]:
    model, arguments = case.built()
    subject = Subject(case, model, arguments, threads)
    own = COLUMNS["eager"](subject)
    own.call()
    prepared, cell = _prepared(column, subject)
    cell |= _timed(own.call, prepared.call, column, threads, seconds)
    result = prepared.call().clone()
    kind, expected = reference(model, arguments)
    return {**cell, "reference": kind, "error": relative_error([result], [expected]), "notes": prepared.notes}


def _prepared(column: str, subject: Subject) -> tuple[Prepared, dict[str, Any]]:
    """Prepare a column and call it once; say how long that took, what it holds then, and held at most."""
    forget_peak()
    before = memory("VmRSS")
    start, start_of_process = time.perf_counter(), time.process_time()
    prepared = COLUMNS[column](subject)
    if not subject.case.labels:
        prepared.call()
    cell: dict[str, Any] = {
        "preparation_s": round(time.perf_counter() - start, 2),
        "preparation_cpu_s": round(time.process_time() - start_of_process, 2),
        "peak_bytes": memory("VmHWM") - before,
    }
    forget_peak()
    return prepared, {**cell, "held_bytes": memory("VmRSS") - before}


@torch.no_grad()
def prepared_again(name: str, column: str, threads: int) -> dict[str, Any]:
    """Return what preparing takes, and no more: of a process that finds what another one has left in a cache."""
    imported(column)
    case = CASES[name]
    subject = Subject(case, *case.built(), threads)
    subject.model(*subject.arguments)
    return _prepared(column, subject)[1]


@torch.no_grad()
def memory_used(name: str, *, release: bool) -> dict[str, int]:
    """Return the bytes that this process holds for a network, and for what is optimized of it, perhaps with `release`.

    The first are counted behind a call, the second behind a call without the network.
    """
    case = CASES[name]
    fxopt.optimize(nn.Linear(4, 4).eval(), example_inputs=torch.randn(2, 4))  # what is imported at first is not counted
    forget_peak()
    empty = memory("VmRSS")
    model, arguments = case.built()
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}
    size = sum(each.numel() * each.element_size() for each in tensors.values())
    model(*arguments)
    forget_peak()
    before = memory("VmRSS") - empty
    prepared = optimized(Subject(case, model, arguments, 1), kind="exact", last=["release"] if release else [])
    prepared.call()
    fast, prepared = prepared.model, None
    del model
    assert fast is not None
    fast(*arguments)
    forget_peak()
    return {"tensors": size, "before": before, "after": memory("VmRSS") - empty}


def _timed(
    own: Callable[[], object], call: Callable[[], object], column: str, threads: int, seconds: float
) -> dict[str, Any]:
    """Time a column and eager side by side; of eager itself one speaks by its seconds alone."""
    if column == "eager":
        timings = time_candidates({"eager": own}, seconds=seconds)
        return {"ms": _milliseconds(timings.seconds("eager")), "ratio": [1.0, 1.0, 1.0]}
    timings = time_candidates({"eager": own, column: call}, seconds=seconds)
    if timings.in_one_thread and column in OWN_THREADS:
        raise RuntimeError(f"calls stall in {threads} threads; no ratio says anything: the machine is too busy")
    ratio = timings.ratio("eager", column)
    return {
        "ms": _milliseconds(timings.seconds(column)),
        "eager_ms": _milliseconds(timings.seconds("eager")),
        "ratio": [round(value, 3) for value in (ratio.low, ratio.mid, ratio.high)],
        "rounds": len(timings.rounds),
        "page_faults": {"eager": page_faults(own), "column": page_faults(call)},
        **({"in_one_thread": True} if timings.in_one_thread else {}),
    }


def _milliseconds(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def reference(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[str, Tensor]:
    """Return the result in float64, or where the model cannot have that, in float32."""
    try:
        return "float64", first_tensor(copy.deepcopy(model).double()(*map_tensors(_double, arguments)))
    except (RuntimeError, TypeError, NotImplementedError):
        return "float32", first_tensor(model(*arguments))


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference over the largest value of the reference."""
    pairs = list(zip(found, expected, strict=True))
    largest = max(float((one.double() - other.double()).abs().max()) for one, other in pairs)
    return float(f"{largest / max(float(other.abs().max()) for other in expected):.2g}")


class _Learner:
    """A network with its optimizer, and one batch that it learns again and again."""

    def __init__(self, case: Case) -> None:
        self.model, self.arguments = case.built()
        kind, options = case.optimizer
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), **options)
        rows, generator = len(self.arguments[0]), torch.Generator().manual_seed(SEED)
        self.labels = torch.randint(0, case.labels, (rows,), generator=generator)
        self.call: Callable[..., Any] = self.model

    def gradients(self) -> list[Tensor]:
        """Make a forward and its backward, and return the gradients in the order of parameters."""
        self.optimizer.zero_grad()
        cross_entropy(first_tensor(self.call(*self.arguments)), self.labels).backward()
        return [each.grad for each in self.model.parameters() if each.grad is not None]

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()


def _trained(case: Case, column: str, threads: int, seconds: float) -> dict[str, Any]:
    own, other = _Learner(case), _Learner(case)
    expected = _exact_gradients(case)
    own.step()
    prepared, cell = _prepared(column, Subject(case, other.model, other.arguments, threads, other.optimizer))
    assert prepared.model is not None
    other.call = prepared.model
    if prepared.notes:
        other.model = prepared.model
    start = time.perf_counter()
    found = other.gradients()
    other.optimizer.step()
    cell["preparation_s"] = round(cell["preparation_s"] + time.perf_counter() - start, 2)
    cell |= {"error": relative_error(found, expected)} | _eager_errors(case, column, expected)
    if column == "exact":
        cell["error_in_float64"] = relative_error(_in_float64(case, prepared.model), expected)
    forget_peak()
    cell |= _timed(own.step, other.step, column, threads, seconds)
    cell["step_peak_bytes"] = memory("VmHWM")
    return {**cell, "reference": "float64", "notes": prepared.notes}


def _exact_gradients(case: Case) -> list[Tensor]:
    return _in_float64(case, _Learner(case).model)


def _in_float64(case: Case, model: nn.Module) -> list[Tensor]:
    """Return the gradients of a network, with the weights of the beginning, in float64."""
    learner = _Learner(case)
    learner.call = copy.deepcopy(model)
    learner.call.load_state_dict(learner.model.state_dict())
    learner.model = learner.call.double()
    learner.arguments = map_tensors(_double, learner.arguments)
    return learner.gradients()


def _eager_errors(case: Case, column: str, expected: list[Tensor]) -> dict[str, float]:
    """Return what eager's own gradients are off by, and how far they move where weights are off by rounding.

    Behind a ReLU that falls on its other side, gradients jump: an error is to be seen beside these.
    """
    own = relative_error(_Learner(case).gradients(), expected)
    if column not in _ROUNDING:
        return {"eager_error": own}
    moved = [relative_error(_moved(case, _ROUNDING[column], seed), expected) for seed in range(_PROBES)]
    return {"eager_error": own, "eager_moves": max(own, *moved)}


def _moved(case: Case, step: float, seed: int) -> list[Tensor]:
    """Return gradients of eager with weights that are off by a part of them."""
    learner, generator = _Learner(case), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in learner.model.parameters():
            each.mul_(1 + step * (2 * torch.rand(each.shape, generator=generator) - 1))
    return learner.gradients()
