"""MAML: an inner step on an optimized model, and gradients through it.

Model-Agnostic Meta-Learning (Finn et al., 2017) looks for weights from which one gradient step solves a new task. The
step is taken on a dictionary of weights, with `torch.func.functional_call`; the outer gradient flows through it.

Run it: python examples/maml.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fxopt

State = dict[str, Tensor]


class Mixture(nn.Module):
    """The mean of eight small networks."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


def task() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return points of a sine of random height and phase to adapt to, and others to be judged by: [points, 1] each."""
    height, phase = torch.rand(()) + 0.5, torch.rand(()) * 3
    seen, unseen = torch.rand(10, 1) * 4 - 2, torch.rand(20, 1) * 4 - 2
    return seen, height * torch.sin(seen + phase), unseen, height * torch.sin(unseen + phase)


def loss_of(model: nn.Module, weights: State, x: Tensor, y: Tensor) -> Tensor:
    # The weights have the original names, so that they can be saved and loaded into a model that was never optimized;
    # the model reads stacked ones. Gradients flow through the translation.
    return F.mse_loss(functional_call(model, fxopt.translate_state(weights, model), (x,)), y)


def adapted(model: nn.Module, weights: State, x: Tensor, y: Tensor) -> State:
    """Take the inner step; `create_graph` lets the outer gradient flow through it."""
    gradients = torch.autograd.grad(loss_of(model, weights, x, y), list(weights.values()), create_graph=True)
    return {name: weight - 0.1 * g for (name, weight), g in zip(weights.items(), gradients, strict=True)}


def loss_after_adapting(model: nn.Module, weights: State, tasks: int) -> Tensor:
    """Return the mean loss on unseen points, after one step on those that were seen."""
    losses: list[Tensor] = []
    for _ in range(tasks):
        seen, seen_values, unseen, unseen_values = task()
        losses.append(loss_of(model, adapted(model, weights, seen, seen_values), unseen, unseen_values))
    return torch.stack(losses).mean()


def judged(model: nn.Module, weights: State) -> float:
    """Return the loss on tasks that are the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return loss_after_adapting(model, weights, 20).item()


def main(steps: int = 60) -> tuple[float, float]:
    """Train, print and return the loss after adapting, before meta-training and after."""
    torch.manual_seed(0)
    model = Mixture()
    # Meta-weights under the original names, the model's own tensors untouched.
    weights = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in model.named_parameters()}
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=(torch.randn(10, 1),), phase="train")
    print(fxopt.report(fast).table())

    optimizer = torch.optim.Adam(weights.values(), lr=5e-3)
    before = judged(fast, dict(weights))
    for _ in range(steps):
        optimizer.zero_grad()
        loss_after_adapting(fast, dict(weights), 4).backward()
        optimizer.step()
    after = judged(fast, dict(weights))
    print(f"loss after one step on a new task: {before:.3f} before meta-training, {after:.3f} after")

    # Any model of the class takes the result, optimized or not.
    model.load_state_dict(weights)
    fast.load_state_dict(weights)
    x = torch.linspace(-2, 2, 9).unsqueeze(1)
    torch.testing.assert_close(fast(x), model(x))
    return before, after


if __name__ == "__main__":
    main()
