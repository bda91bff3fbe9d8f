"""Training in stages: `torch.distributed.pipelining` by hand, and the pass `pipeline`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import RobertaConfig, RobertaForMaskedLM

import fxopt

from .way import Step, Way

MICROBATCHES = 4
BLOCKS_BEFORE = 14
"""The cut by hand, as even as blocks allow: the head costs as much as four of the 24."""


def roberta_large() -> tuple[RobertaForMaskedLM, Tensor, Tensor]:
    """Return RoBERTa-large (355 million parameters, random weights), and 4 rows of 16 tokens with a target."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=514,
    )  # fmt: skip
    return RobertaForMaskedLM(config).train(), *torch.randint(3, 50265, (2, MICROBATCHES, 16)).unbind()


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class First(nn.Module):
    """The embeddings and the first blocks."""

    def __init__(self, model: RobertaForMaskedLM) -> None:
        super().__init__()
        self.embeddings, self.layers = model.roberta.embeddings, model.roberta.encoder.layer[:BLOCKS_BEFORE]

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embeddings(input_ids=ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Second(nn.Module):
    """The other blocks and the head."""

    def __init__(self, model: RobertaForMaskedLM) -> None:
        super().__init__()
        self.layers, self.head = model.roberta.encoder.layer[BLOCKS_BEFORE:], model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def by_hand() -> Step:
    """Cut the model between two blocks, and add up the gradients of its tied embedding."""
    model, ids, target = roberta_large()
    rank = distributed.get_rank()
    stage = (First, Second)[rank](model)
    tied = model.roberta.embeddings.word_embeddings.weight
    del model
    schedule = Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu")), MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD(stage.parameters(), 0.01)
    torch.manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=target)
        distributed.all_reduce(tied.grad)
        optimizer.step()

    return step


def by_pass() -> Step:
    """Let the pass cut it."""
    model, ids, target = roberta_large()
    staged = fxopt.optimize(model, f"pipeline{{microbatches={MICROBATCHES}}}", example_inputs={"input_ids": ids})
    del model
    optimizer = torch.optim.SGD(staged.parameters(), 0.01)
    torch.manual_seed(distributed.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        staged.step({"input_ids": ids}, target, lambda output, expected: loss(output.logits, expected))
        optimizer.step()

    return step


WAYS = [Way("pipeline, RoBERTa-large", by_hand, by_pass)]
