"""A model that runs from graphs is trained by transformers' `Trainer`, from these graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxopt
from fxopt.runtime.graphs import misses_in

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("recorded", [False, True])
def test_a_bert_is_trained_from_its_graphs(tmp_path: Path, recorded: bool) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    data = [
        {"input_ids": torch.randint(3, 99, (7,)), "attention_mask": torch.ones(7).long(), "labels": torch.tensor(i % 2)}
        for i in range(8)
    ]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, gradient_accumulation_steps=2, eval_strategy="steps",
        eval_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip

    def train(trained: Any) -> None:
        transformers.Trainer(trained, arguments, train_dataset=data, eval_dataset=data).train()

    calls: Any = {name: torch.stack([each[name] for each in data[:4]]) for name in data[0]}
    if recorded:
        with fxopt.recording(model) as calls:
            train(model)
    program = fxopt.capture(model, calls)
    assert program.opaque == {}
    before = program.model.classifier.weight.clone()
    train(program.model)
    assert not torch.equal(program.model.classifier.weight, before)
    assert misses_in(program.model.modules()) == []
