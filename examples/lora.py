"""LoRA: low-rank adapters on a small BERT, adapted first and optimized then.

Low-rank adaptation (Hu et al., 2021) freezes a model and trains a product of two thin matrices beside some linears. The
adapters change the structure, so they come before `optimize`: query, key and value are alike again, and run as one,
adapters included. A linear that is part of a fused ensemble takes no adapter any more, and says so.

Run it: python examples/lora.py (needs transformers)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import fxopt

ADAPTED = ("query", "key", "value")


class LowRank(nn.Module):
    """A linear that stays as it is, and a product of two thin ones that learns."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # at first nothing changes

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def small_bert() -> BertForSequenceClassification:
    """Return a BERT with random weights; a real one would come from `from_pretrained`."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def adapt(model: BertForSequenceClassification) -> BertForSequenceClassification:
    """Freeze a model but for its classifier, and put adapters beside the linears of its attention."""
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        for name in ADAPTED:
            setattr(attention, name, LowRank(getattr(attention, name)))
    return model


def batch(size: int = 32) -> tuple[Tensor, Tensor]:
    """Return sentences [size, 12], and whether the first word is among the first half of the vocabulary."""
    words = torch.randint(0, 50, (size, 12))
    return words, (words[:, 0] < 25).long()


def main(steps: int = 40) -> tuple[float, float]:
    """Train, print and return the loss before and after."""
    model = adapt(small_bert())
    words, _ = batch()
    # A model as small as this one is no faster for it; measure=False fuses all the same, to show how that trains.
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs={"input_ids": words}, phase="train", measure=False)
    print(fxopt.report(fast).table())

    optimizer = torch.optim.AdamW([p for p in fast.parameters() if p.requires_grad], lr=2e-2)
    losses: list[float] = []
    for _ in range(steps):
        words, labels = batch()
        loss = F.cross_entropy(fast(input_ids=words).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    before, after = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"loss {before:.3f} at first, {after:.3f} at last")

    # What was learned, under the original names: a model that was never optimized takes it.
    learned = {name: t for name, t in fast.state_dict().items() if ".down." in name or ".up." in name or "cla" in name}
    other = adapt(small_bert())
    other.load_state_dict(learned, strict=False)
    words, _ = batch()
    torch.testing.assert_close(fast(input_ids=words).logits, other(input_ids=words).logits, rtol=1e-4, atol=1e-4)
    print(f"{len(learned)} tensors of adapters and classifier, which an unoptimized model takes, too")
    return before, after


if __name__ == "__main__":
    main()
