"""A mixture of experts that is trained: its loop over experts becomes a few products, for any choice of experts.

Run it: python examples/mixture.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxopt


class Mixture(nn.Module):
    """Give each token to two of eight experts, and add up what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, 1] for tokens [tokens, 8]."""
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = x.new_zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == number)
            if rows.numel():
                y.index_add_(0, rows, weights[rows, nth, None] * expert(x[rows]))
        return y


def main(steps: int = 60) -> tuple[float, float]:
    """Train, print and return the loss before and after."""
    torch.manual_seed(0)
    model = Mixture()
    x = torch.randn(256, 8)
    y = torch.where(x[:, :1] > 0, x[:, 1:2].sin(), x[:, 2:3].abs())

    fast = fxopt.optimize(model, "fuse_experts", example_inputs=(x,), phase="train")
    print(fxopt.report(fast))
    optimizer = torch.optim.Adam(fast.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(fast(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} before, {losses[-1]:.3f} after")

    model.load_state_dict(fast.state_dict())  # the original takes what was learned, expert by expert
    torch.testing.assert_close(model(x), fast(x))
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
