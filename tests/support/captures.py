"""How a captured model is compared with the model as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxopt.runtime.values import map_tensors, tensors_in
from fxopt.tracing.examples import Inputs, normalize_inputs
from fxopt.tracing.program import Program, capture_program


def _run(model: nn.Module, call: Inputs, seed: int) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """Return output, gradients of parameters, buffers and inputs after one call."""
    torch.manual_seed(seed)
    model.zero_grad()
    args, kwargs = map_tensors(lambda t: t.detach().clone(), (call.args, call.kwargs))
    output = model(*args, **kwargs)
    losses = [t.sum() for t in tensors_in(output) if t.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return output, gradients, [b.clone() for b in model.buffers()], [*tensors_in((args, kwargs))]


def _assert_equal(given: Any, expected: Any) -> None:
    assert type(given) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
        assert given.requires_grad == expected.requires_grad
    elif isinstance(expected, (tuple, list)):
        assert len(given) == len(expected)
        for a, b in zip(given, expected, strict=True):
            _assert_equal(a, b)
    elif isinstance(expected, dict):
        assert list(given) == list(expected)
        for key in expected:
            _assert_equal(given[key], expected[key])
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            _assert_equal(getattr(given, field.name), getattr(expected, field.name))
    else:
        assert given == expected


@pytest.fixture
def agree() -> Callable[..., Program]:
    """Capture a copy of a model; assert that it equals the original in both modes, in values and gradients."""

    def check(model: nn.Module, example_inputs: object, *others: object, opaque: bool = False) -> Program:
        captured = copy.deepcopy(model)
        program = capture_program(captured, example_inputs)
        if not opaque:
            assert not program.opaque, program.coverage().text
        for graph in program.graphs.values():
            graph.lint()
        calls = [call for given in (example_inputs, *others) for call in normalize_inputs(given)]
        for training in (model.training, not model.training):
            model.train(training)
            captured.train(training)
            for seed, call in enumerate(calls):
                expected, given = _run(model, call, seed), _run(captured, call, seed)
                for a, b in zip(given, expected, strict=True):
                    _assert_equal(a, b)
        return program

    return check


@pytest.fixture
def misses() -> Callable[[Program], int]:
    """Count the calls that ran a module's own forward because no graph fitted."""
    return lambda program: sum(capture.misses.total() for capture in program.captures.values())
