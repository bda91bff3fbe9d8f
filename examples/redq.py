"""REDQ: ten critics trained as one, with their target network, on a toy problem.

Randomized Ensembled Double Q-learning (Chen et al., 2021) takes the minimum over a random pair of ten critics as its
target, and updates the critics many times for each step in the environment. The ensemble is where its time goes.

Run it: python examples/redq.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxopt

CRITICS, PAIR, DISCOUNT, POLYAK = 10, 2, 0.95, 0.02


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


class Critics(nn.Module):
    """Estimate the value of an action in a state, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(mlp(3, 1) for _ in range(CRITICS))

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        """Return [critics, batch] for states [batch, 2] and actions [batch, 1]."""
        x = torch.cat([state, action], -1)
        return torch.stack([member(x).squeeze(-1) for member in self.members])


def environment(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Push a mass towards the origin: return the next states [batch, 2] and rewards [batch]."""
    position, velocity = state.unbind(-1)
    velocity = 0.9 * velocity + 0.3 * action.squeeze(-1)
    position = (position + 0.3 * velocity).clamp(-3, 3)
    return torch.stack([position, velocity], -1), -(position**2 + 0.1 * velocity**2)


@torch.no_grad()
def mean_reward(actor: nn.Module, steps: int = 30) -> float:
    """Let the actor run from fixed places."""
    state, total = torch.stack([torch.linspace(-2, 2, 21), torch.zeros(21)], -1), 0.0
    for _ in range(steps):
        state, reward = environment(state, actor(state).tanh())
        total += reward.mean().item()
    return total / steps


def main(steps: int = 200) -> tuple[float, float]:
    """Train, print and return the mean reward before and after."""
    torch.manual_seed(0)
    actor, critics = mlp(2, 1), Critics()
    example = torch.randn(64, 2), torch.randn(64, 1)

    # The critics are optimized for training, before the target is copied: both then have the same stacked parameters.
    critics = fxopt.optimize(critics, "fuse_ensembles", example_inputs=example, phase="train")
    target = copy.deepcopy(critics).requires_grad_(False)
    print(fxopt.report(critics).table())
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=3e-3)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)

    before = mean_reward(actor)
    for _ in range(steps):
        # Any state may come up in this toy problem; a real one would sample them from a replay buffer.
        state = torch.randn(64, 2) * torch.tensor([1.5, 0.5])
        action = (actor(state).tanh() + 0.3 * torch.randn(64, 1)).clamp(-1, 1).detach()
        following, reward = environment(state, action)

        with torch.no_grad():
            pair = torch.randperm(CRITICS)[:PAIR]
            value = target(following, actor(following).tanh())[pair].amin(0)
            goal = reward + DISCOUNT * value
        loss = F.mse_loss(critics(state, action), goal.expand(CRITICS, -1))
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()

        # `strict`: two lists of parameters of one model always pair up, those of two kinds of model do not.
        with torch.no_grad():
            for slow, now in zip(target.parameters(), critics.parameters(), strict=True):
                slow.lerp_(now, POLYAK)

        actor_optimizer.zero_grad()
        (-critics(state, actor(state).tanh()).mean()).backward()
        actor_optimizer.step()

    after = mean_reward(actor)
    print(f"mean reward {before:.3f} before training, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    main()
