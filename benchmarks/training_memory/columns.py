"""The ways of training a model in less memory that are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxopt

from .models import Subject

__all__ = ["Column", "columns"]

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Column:
    """One way, at one budget.

    Attributes:
        kind: "plain", "fxopt", "by hand" or "torch.compile".
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


def columns(subject: Subject, model: nn.Module, example: Tensor) -> Iterator[Column]:
    """Yield every way of training a model."""
    yield Column("plain", 1.0, model, model)
    for budget in BUDGETS:
        yield _fxopt(model, example, budget)
    for budget in BUDGETS[1:]:
        by_hand = _by_hand(copy.deepcopy(model), subject, budget)
        yield Column("by hand", budget, by_hand, by_hand)
    for budget in BUDGETS:
        compiled = copy.deepcopy(model)
        yield Column("torch.compile", budget, compiled, _compiled(compiled, example, budget))


def _fxopt(model: nn.Module, example: Tensor, budget: float) -> Column:
    try:
        fast = fxopt.optimize(
            model, f"checkpoint{{budget={budget}}}", example_inputs=(example,), verify=False, measure=False
        )
    except fxopt.PassError as error:
        return Column("fxopt", budget, model, model, str(error))
    return Column("fxopt", budget, fast, fast)


def _by_hand(model: nn.Module, subject: Subject, budget: float) -> nn.Module:
    """Checkpoint the first of the blocks, as many as the share that is not to be kept."""
    names = subject.blocks(model)
    for name in names[: round((1 - budget) * len(names))]:
        block = model.get_submodule(name)
        block.forward = _checkpointed(block.forward)
    return model


def _checkpointed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def _compiled(model: nn.Module, example: Tensor, budget: float) -> Callable[[Tensor], Tensor]:
    """Compile without generating kernels: the partition of forward and backward is what the budget decides."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with functorch_config.patch(activation_memory_budget=budget):
        compiled(example).square().mean().backward()
    return compiled
