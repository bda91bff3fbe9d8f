"""The ways of training a model in less memory that are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxopt

from .models import Subject

__all__ = ["BUDGETS", "Column", "columns"]

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
FINER = (1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 0.25, 0.0)
"""Budgets of fxopt: each of the others finds one nearby to be compared with."""


@dataclass(frozen=True)
class Column:
    """One way, at one budget.

    Attributes:
        kind: "plain", "torch.autocast", "fxopt's autocast", "fxopt", "by hand" or "torch.compile".
        budget: what was asked for.
        model: whose parameters are trained.
        call: the forward.
        why: what kept it from being made.
    """

    kind: str
    budget: float
    model: nn.Module
    call: Callable[[Tensor], Tensor]
    why: str = ""


def columns(subject: Subject, model: nn.Module, example: Tensor, compiled_for: Sequence[float]) -> Iterator[Column]:
    """Yield every way of training a model; torch.compile's with some budgets only, since it takes minutes."""
    yield Column("plain", 1.0, model, model)
    yield _under_autocast(copy.deepcopy(model))
    fast = fxopt.optimize(model, "autocast", example_inputs=(example,), phase="train", measure=False)
    yield Column("fxopt's autocast", 1.0, fast, fast)
    for budget in FINER:
        yield _fxopt(model, example, budget)
    for budget in BUDGETS[1:]:
        by_hand = _by_hand(copy.deepcopy(model), subject, budget)
        yield Column("by hand", budget, by_hand, by_hand)
    for budget in compiled_for:
        compiled = copy.deepcopy(model)
        yield Column("torch.compile", budget, compiled, _compiled(compiled, example, budget))


def _under_autocast(model: nn.Module) -> Column:
    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result = model(x)
        return result.float()

    return Column("torch.autocast", 1.0, model, call)


def _fxopt(model: nn.Module, example: Tensor, budget: float) -> Column:
    try:
        fast = fxopt.optimize(
            model, f"checkpoint{{budget={budget}}}", example_inputs=(example,), verify=False, measure=False
        )
    except fxopt.BudgetError as error:
        return Column("fxopt", budget, model, model, str(error))
    return Column("fxopt", budget, fast, fast)


def _by_hand(model: nn.Module, subject: Subject, budget: float) -> nn.Module:
    """Checkpoint the first of the blocks, as many as the share that is not to be kept."""
    names = subject.blocks(model)
    for name in names[: round((1 - budget) * len(names))]:
        block = model.get_submodule(name)
        block.forward = _checkpointed(block.forward)
    return model


def _checkpointed(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        given = list(x) if isinstance(x, list) else x  # a DenseNet appends to it before it is computed again
        return checkpoint(forward, given, use_reentrant=False)

    return run


def _compiled(model: nn.Module, example: Tensor, budget: float) -> Callable[[Tensor], Tensor]:
    """Compile without generating kernels: the partition of forward and backward is what the budget decides."""

    def forward(x: Tensor) -> Tensor:
        return model(x)

    # What is compiled is kept with a function's code: each budget needs its own.
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{budget}".replace(".", "_"))
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    with functorch_config.patch(activation_memory_budget=budget):
        compiled(example).square().mean().backward()
    return compiled
