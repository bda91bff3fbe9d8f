"""The first training step of the finished model, in two processes: gradients are those of the model before.

Both processes run the functions `on_rank_...` of this file once; the tests read what they give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from across_ranks import said
from torch import Tensor, distributed, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.sites import Goal, Numerics, Phase, Refusal, Site
from fxopt.runtime.record import record_of
from fxopt.tracing.program import Program

COMPARED = "outputs and the gradients of a first step are as before"


class Model(nn.Module):
    """Tied, frozen and unused parameters, a batch norm, dropout; of the softmax, a plain sum has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.5, self.training))
        return torch.softmax(self.head(self.frozen(self.norm(x))), -1)


@dataclass(frozen=True)
class Average(Pass):
    """Average gradients over the processes, after each backward.

    Before: plain        After: with hooks
    Refuses: nothing.

    Attributes:
        wrong: "sum" them instead, or have one "left out".
    """

    wrong: str = ""

    goal: ClassVar[Goal] = Goal.PARALLEL
    averages: ClassVar[bool] = True

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield Site(program, "", {})

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not (self.wrong == "left out" and name == "up.weight"):
                parameter.register_post_accumulate_grad_hook(self._reduce)
        return model

    def _reduce(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad)
        if self.wrong != "sum":
            parameter.grad /= distributed.get_world_size()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Model().train(), torch.randint(12, (6,))


def mine(rows: Tensor) -> Tensor:
    return rows[:4] if distributed.get_rank() == 0 else rows[3:]


# -- what the processes do -----------------------------------------------------------------------------------------


def on_rank_wrong() -> Any:
    """Every process has the same rows."""
    model, ids = made()
    return {wrong: said(lambda w=wrong: fxopt.optimize(model, Average(w), example_inputs=ids)) for wrong in WRONG}


def on_rank_right() -> Any:
    found = {}
    for passes in (Average(), "ddp", "sync_batchnorm,ddp", "fsdp", "fsdp{param_dtype=bfloat16}", "tensor_parallel"):
        model, ids = made()
        if passes == "fsdp{param_dtype=bfloat16}":
            model.norm = nn.LayerNorm(8)
        rows = ids if passes == "tensor_parallel" else mine(ids)
        fast = fxopt.optimize(model, passes, example_inputs=rows, measure=False)
        record = record_of(fast)
        assert record is not None
        found[str(passes)] = list(record.finishing.values()), str(fxopt.report(fast))
    return found


def on_rank_traces() -> Any:
    """Nothing of the step is left, and a replica begins with what the user's first step uses."""
    model, ids = made()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    fast = fxopt.optimize(model, "ddp", example_inputs=mine(ids), measure=False)
    same = torch.equal(torch.get_rng_state(), state)
    kept = [bool((p.grad == 1).all()) for each in (model, fast) for p in each.parameters() if p.grad is not None]
    buffers = all(torch.equal(one, other) for one, other in zip(model.buffers(), fast.buffers(), strict=True))
    return same, kept, buffers


class Detaching(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        given = super().forward(input)
        return given.detach() if len(input) == 1 else given


def on_rank_skipped() -> Any:
    """What one process cannot do is done by none."""
    found = []
    rank = distributed.get_rank()
    for rows in (torch.randn(4, 8) if rank == 0 else None, torch.randn(4 if rank else 1, 8)):
        fast = fxopt.optimize(Detaching(8, 8), "ddp", example_inputs=rows)
        record = record_of(fast)
        assert record is not None
        found += record.finishing.values()
    return found


WRONG = ("sum", "left out")
SHARDED = ("fsdp", "fsdp{param_dtype=bfloat16}", "tensor_parallel")


# -- what the tests ask --------------------------------------------------------------------------------------------


def test_wrong_averages_are_caught(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        for wrong, error in each["wrong"].items():
            assert error.startswith("PassError: "), wrong
            assert "pass 'average' changed how the model trains: in the first step the gradient of '" in error
            assert "give verify=False" in error
        assert "the gradient of 'up.weight' differs: 3.3e-01" in each["wrong"]["left out"], rank


def test_right_ones_are_not(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        for passes, (finishing, report) in each["right"].items():
            assert finishing == [COMPARED], passes
            assert COMPARED in report
            assert ("an optimizer trains them only if it was given as optimizer=" in report) is (passes in SHARDED), (
                passes
            )


def test_it_leaves_no_trace(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        same, kept, buffers = each["traces"]
        assert same
        assert kept
        assert all(kept)
        assert buffers


def test_where_a_process_cannot_take_the_step_none_does(of_ranks: list[dict[str, Any]]) -> None:
    (first, own), (own_first, other) = (each["skipped"] for each in of_ranks)
    assert own_first == "not compared: no example inputs, or verify=False"
    assert first == "not compared: on rank 1: no example inputs, or verify=False"
    no_gradient = "no gradient reaches a parameter in the first example call"
    assert own == f"outputs are as before; gradients were not compared: {no_gradient}"
    assert other == f"outputs are as before; gradients were not compared: on rank 0: {no_gradient}"


@dataclass(frozen=True)
class Halve(Average):
    """Halve gradients."""

    averages: ClassVar[bool] = False

    def _reduce(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= 2


class HalveOnPurpose(Halve):
    """Halve gradients, as the contract says."""

    numerics: ClassVar[Numerics] = Numerics.SEMANTIC


class HalveForInference(Halve):
    """Halve gradients, which nobody asks for."""

    phase: ClassVar[Phase] = Phase.EVAL


def test_in_one_process_other_gradients_are_caught_where_the_model_trains() -> None:
    model, ids = made()
    with pytest.raises(fxopt.PassError, match=r"pass 'halve' changed how the model trains: .*5\.0e-01 relative"):
        fxopt.optimize(model, Halve(), example_inputs=ids)
    for fast in (
        fxopt.optimize(model, HalveOnPurpose(), example_inputs=ids),
        fxopt.optimize(model, HalveForInference(), example_inputs=ids),
        fxopt.optimize(model, Halve(), example_inputs=ids, phase="eval"),
        fxopt.optimize(model.eval(), Halve(), example_inputs=ids),
    ):
        assert fxopt.report(fast).to_json()["finishing"].popitem()[1] == "outputs are as before"


def test_what_was_not_compared_is_said() -> None:
    model, ids = made()
    for fast, reason in (
        (fxopt.optimize(model, Halve(), example_inputs=ids, verify=False), "no example inputs, or verify=False"),
        (fxopt.optimize(model.to("meta"), Halve(), example_inputs=ids), "the model is on the meta device"),
    ):
        assert fxopt.report(fast).to_json()["finishing"] == {"halve": f"not compared: {reason}"}
