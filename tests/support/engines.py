"""What the tests of engines share: engines that are installed, small models, and counts of what engines compute."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.transforms.delegate import Delegate

ENGINES = [
    pytest.param(name, marks=pytest.mark.skipif(None in map(find_spec, needed), reason=f"needs {needed}"))
    for name, needed in {"openvino": ["openvino"], "onnxruntime": ["onnxruntime", "onnx"]}.items()
]
engines = pytest.mark.parametrize("engine", ENGINES)
one_engine = pytest.mark.parametrize("engine", ENGINES[1:])  # what no engine makes different: the quick one
openvino_only = pytest.mark.parametrize("engine", ENGINES[:1])

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def counting(compile_: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    """Return a `compile` of an engine of which the sessions note the name of the engine at each call."""

    def compiled(engine: Any, *args: Any) -> Callable[[Any], list[Tensor]]:
        session = compile_(engine, *args)

        def counted(inputs: Any) -> list[Tensor]:
            found.append(engine.name)
            return session(inputs)

        return counted

    return compiled


def linears(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), *between, nn.Linear(8, 8), nn.Linear(8, 3)).eval()


def delegated(model: nn.Module, engine: str, x: object = X, **options: Any) -> nn.Module:
    return fxopt.optimize(model, Delegate(engine), example_inputs=x, measure=False, **options)  # type: ignore[arg-type]


def regions(model: nn.Module) -> list[Any]:
    return [node.target for node in fxopt.graphs(model)[""].nodes if type(node.target).__name__ == "DelegatedRegion"]


def reasons(model: nn.Module) -> dict[str, str]:
    return {each.label: each.reason for each in fxopt.plan(model).decisions if each.status == "refused"}


def same(one: nn.Module, other: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        found, expected = one(x), other(x)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    else:
        assert type(found) is type(expected)
        torch.testing.assert_close(dict(found), dict(expected), atol=1e-5, rtol=1e-4)
