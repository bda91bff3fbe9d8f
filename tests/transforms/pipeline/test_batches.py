"""Two processes: padded batches, microbatches of one row, evaluation, and errors in the middle of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from across_ranks import said
from torch import Tensor, distributed, nn
from transformers import GPT2Config, GPT2LMHeadModel

import fxopt
from fxopt.transforms.pipeline import PipelineModule

ROWS = 4

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_v")


def gpt2() -> nn.Module:
    """Return a model whose head shares the weight of its embedding, of five blocks: no number of stages divides it."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=5, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().train()


def padded() -> dict[str, Tensor]:
    """Return rows of different lengths; the first is full."""
    lengths = torch.tensor([[7], [6], [5], [3]])
    return {"input_ids": torch.randint(3, 50, (ROWS, 7)), "attention_mask": (torch.arange(7) < lengths).long()}


def token_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def staged(model: nn.Module, options: str, examples: object) -> PipelineModule:
    fast = fxopt.optimize(model, f"pipeline{{{options}}}", example_inputs=examples)
    assert isinstance(fast, PipelineModule)
    return fast


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def apart(fast: PipelineModule, model: nn.Module, batch: dict[str, Tensor], target: Tensor) -> float:
    """Train both for two steps; return how far losses, gradients and parameters are apart."""
    farthest = 0.0
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (fast, model)]
    for _ in range(2):
        fast.zero_grad(), model.zero_grad()
        whole = token_loss(model(**batch), target)
        whole.backward()
        farthest = max(farthest, float(abs(fast.step(batch, target, token_loss) - whole.detach())))
        mine, theirs = gradients(fast), gradients(model)
        assert sorted(mine) == sorted(name for name, _ in fast.named_parameters(remove_duplicate=False))
        farthest = max(farthest, *(float((g - theirs[name]).abs().max()) for name, g in mine.items()))
        for optimizer in optimizers:
            optimizer.step()
    theirs = dict(model.named_parameters(remove_duplicate=False))
    named = fast.named_parameters(remove_duplicate=False)
    return max(farthest, *(float((p - theirs[name]).detach().abs().max()) for name, p in named))


def evaluated(fast: PipelineModule, model: nn.Module, batch: dict[str, Tensor]) -> float:
    fast.eval(), model.eval()
    with torch.no_grad():
        found = float((fast(**batch).logits - model(**batch).logits).abs().max())
    fast.train(), model.train()
    return found


def on_rank_schedules() -> dict[str, dict[str, float]]:
    return {schedule: of_schedule(schedule) for schedule in SCHEDULES}


def of_schedule(schedule: str) -> dict[str, float]:
    torch.manual_seed(1)
    batch, target = padded(), torch.randint(3, 50, (ROWS, 7))
    rows = [{name: tensor[number : number + 1] for name, tensor in batch.items()} for number in range(2)]
    full = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    model = gpt2()
    fast = staged(model, f"schedule={schedule},microbatches={ROWS}", [batch, full])
    return {
        "one padded row": apart(fast, model, batch, target),
        "evaluated padded": evaluated(fast, model, batch),
        "evaluated one row": max(evaluated(fast, model, row) for row in rows),
    }


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def on_rank_errors() -> dict[str, Any]:
    """Each of them is raised on both ranks, none of which waits; the model works after it."""
    torch.manual_seed(1)
    batch = padded()
    full, rank = {"input_ids": batch["input_ids"]}, distributed.get_rank()
    found: dict[str, Any] = {}
    for schedule in ("1f1b", "interleaved"):
        fast = staged(gpt2(), f"schedule={schedule},microbatches=2", full).eval()
        found[f"other path {schedule}"] = said(lambda fast=fast: fast(input_ids=full["input_ids"][:1]))
        found[f"other form {schedule}"] = said(lambda fast=fast: fast(input_ids=full["input_ids"][:, : 4 + rank]))
        found[f"after {schedule}"] = said(lambda fast=fast: fast(**full))
    x, model = torch.randn(ROWS, 8).double(), Layers().double()
    for schedule in SCHEDULES:
        torch.manual_seed(2)
        fast = staged(Layers().double(), f"schedule={schedule}", x)

        def wrong(output: Tensor, target: Tensor) -> Tensor:
            raise ValueError("no such loss")

        model.load_state_dict(fxopt.state_dict(fast)), model.zero_grad()
        F.mse_loss(model(x), x).backward()
        found[f"loss {schedule}"] = said(lambda fast=fast: fast.step(x, x, wrong))
        fast.zero_grad()
        fast.step(x, x, F.mse_loss)
        theirs = gradients(model)
        found[f"after loss {schedule}"] = max(float((g - theirs[n]).abs().max()) for n, g in gradients(fast).items())
        with torch.no_grad():
            found[f"bad rows {schedule}"] = said(lambda fast=fast: fast.step(x[: ROWS - rank], x[: ROWS - rank], wrong))
    for schedule in ("interleaved", "zero_bubble"):
        partly = Layers().double()
        partly.layers[:3].requires_grad_(False)
        fast = staged(partly, f"schedule={schedule}", x)
        found[f"frozen {schedule}"] = said(lambda fast=fast: fast.step(x, x, F.mse_loss))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_like_one_process(of_ranks: list[dict[str, Any]], schedule: str):
    for each in of_ranks:
        assert {name: gap for name, gap in each["schedules"][schedule].items() if not gap < 1e-9} == {}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_evaluation_fails_on_both_ranks(of_ranks: list[dict[str, Any]], schedule: str):
    first, second = (each["errors"] for each in of_ranks)
    assert first[f"other path {schedule}"].startswith("GuardError: 'if batch_size != position_ids.shape[0]'")
    assert first[f"other path {schedule}"].endswith("give [batch, 1 row of it]")
    assert second[f"other path {schedule}"].startswith("GuardError: rank 0 raised GuardError: 'if batch_size")
    for each in (first, second):
        assert each[f"other form {schedule}"].startswith("UsageError: rank 1 was given a batch of another form")
        assert each[f"after {schedule}"] == "nothing was raised"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_raises(of_ranks: list[dict[str, Any]], schedule: str):
    last = 0 if schedule == "zero_bubble_v" else 1
    for rank, each in enumerate(of_ranks):
        found = each["errors"]
        expected = f"FxoptError: rank {last} raised ValueError: no such loss; the gradients of this step are incomplete"
        assert found[f"loss {schedule}"].startswith("ValueError: no such loss" if rank == last else expected)
        assert found[f"after loss {schedule}"] < 1e-9
        assert "does not divide into 4 microbatches" in found[f"bad rows {schedule}"]


def test_zero_bubble_needs_gradients_of_what_a_stage_receives(of_ranks: list[dict[str, Any]]):
    for each in of_ranks:
        assert each["errors"]["frozen interleaved"] == "nothing was raised"
        assert "cannot divide the backward of stage 1: " in each["errors"]["frozen zero_bubble"]
