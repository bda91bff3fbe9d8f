"""Stacked weights of experts are masked where the layer is known, and named where they are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxopt
from fxopt.layers import MixtureOfExperts
from fxopt.transforms.prune import masks

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


class Mixing(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.moe, self.head = nn.Linear(16, 16), MixtureOfExperts(16, 32, 4, 2, **options), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.moe(self.inner(x)))


class Stacked(nn.Module):
    """Experts of a user's own, stacked as `transformers` does."""

    def __init__(self):
        super().__init__()
        self.inner, self.down_proj = nn.Linear(16, 16), nn.Parameter(torch.randn(4, 16, 16))
        self.position = nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x):
        return torch.einsum("bti,eoi->bto", self.inner(x + self.position), self.down_proj)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        flat = x.reshape(-1, 16)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, slot = torch.where(chosen == number)
            out.index_add_(0, tokens, weights[tokens, slot, None] * expert(flat[tokens]))
        return out.reshape(x.shape)


def run(model, passes):
    return fxopt.optimize(model, passes, example_inputs=(X,), time_budget=60)


def refusals(model):
    return {decision.label: decision.reason for decision in fxopt.plan(model).decisions if decision.status == "refused"}


@pytest.mark.parametrize("options", ["amount=0.75,scope=layer", "method=random,scope=layer", "method=nm"])
@pytest.mark.parametrize("gated", [True, False])
def test_weights_of_experts_are_masked_and_biases_are_not(options, gated):
    model = Mixing(bias=True, gated=gated)
    fast = run(model, f"prune{{{options}}}")
    first = "gate_up_proj" if gated else "up_proj"
    assert set(masks(fast)) == {"inner.weight", "head.weight", "moe.down_proj", f"moe.{first}"}
    share = 0.75 if "0.75" in options else 0.5
    for name in (first, "down_proj"):
        weight = getattr(fast.moe, name)
        assert int((weight == 0).sum()) == share * weight.numel()
        assert bool(getattr(fast.moe, f"{name}_bias").all())
        if "nm" in options:
            assert bool(((weight.reshape(*weight.shape[:2], -1, 4) == 0).sum(-1) == 2).all())
    assert fast.state_dict().keys() == model.state_dict().keys()


def test_masked_experts_train_and_keep_their_zeros():
    fast = run(Mixing(), "prune{amount=0.5}")
    optimizer = torch.optim.AdamW(fast.parameters(), lr=0.1)
    before = fast.moe.down_proj.detach().clone()
    fast(X).square().sum().backward()
    optimizer.step()
    kept = masks(fast)["moe.down_proj"]
    assert not fast.moe.down_proj[~kept].any()
    assert not torch.equal(fast.moe.down_proj, before)


def test_masks_of_all_layers_are_ranked_together():
    model = Mixing()
    with torch.no_grad():
        model.moe.down_proj.mul_(1e-3)
    weight = run(model, "prune{amount=0.3}").moe.down_proj
    assert (weight == 0).float().mean() > 0.9


def test_stacked_weights_of_other_modules_are_named():
    fast = run(Stacked(), "prune{scope=layer}")
    reason = "it is no layer that can be masked: its stacked weights down_proj stay"
    assert refusals(fast) == {"(root)": reason}
    quantized = run(Stacked().eval(), "quantize{scheme=int8_weight,aim=size}")
    assert any("stacked (down_proj)" in reason for reason in refusals(quantized).values())


def test_weights_that_were_stacked_before_are_named():
    fast = run(Loop().eval(), "fuse_experts")
    assert "stacked_experts" in dict(fast.named_children())
    for passes, words in {
        "prune{scope=layer}": "the weights of its members are stacked; prune before they are fused",
        "quantize{scheme=int8_weight,aim=size}": "the weights of its members are stacked",
    }.items():
        assert any(words in reason for reason in refusals(run(fast, passes)).values())


def test_quantize_names_the_experts_it_leaves():
    fast = run(Mixing().eval(), "quantize{scheme=int8_weight,aim=size}")
    assert "gate_up_proj and down_proj" in refusals(fast)["moe"]
