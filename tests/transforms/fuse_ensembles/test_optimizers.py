"""Every optimizer of torch over a fused model: groups by dimensions and by names, and ten steps as without fusing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

import fxopt


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(Head() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return torch.stack([head(x) for head in self.heads])


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.scale


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def made() -> Any:
    torch.manual_seed(0)
    return Ensemble().double()


def fused(model: Any) -> Any:
    return fxopt.optimize(
        model, "fuse_ensembles{lowering=bmm}", example_inputs=(inputs(),), verify=False, measure=False
    )


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 10) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(inputs()) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


Kind = Callable[[Any], optim.Optimizer]


def by(decays: Callable[[str, Tensor], bool]) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Return the groups of a model: what decays and what does not."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        yes, no = ([p for name, p in named if decays(name, p) is wanted] for wanted in (True, False))
        return [{"params": yes, "weight_decay": 0.5}, {"params": no, "weight_decay": 0.0}]

    return groups


GROUPS = {
    "dimensions": by(lambda _, parameter: parameter.ndim >= 2),
    "bias": by(lambda name, _: not name.endswith((".bias", "scale"))),
    "norm": by(lambda name, _: "norm.weight" not in name),
    "last": by(lambda name, _: name.rpartition(".")[2] == "weight"),
}
SIMPLE: dict[str, Kind] = {
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9), "Adam": lambda p: optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, 0.01), "RMSprop": lambda p: optim.RMSprop(p, 0.01),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1), "Adadelta": lambda p: optim.Adadelta(p, 1.0),
    "NAdam": lambda p: optim.NAdam(p, 0.01), "RAdam": lambda p: optim.RAdam(p, 0.1),
    "Adamax": lambda p: optim.Adamax(p, 0.01), "ASGD": lambda p: optim.ASGD(p, 0.1, t0=2),
    "Rprop": lambda p: optim.Rprop([q for group in p for q in group["params"]]),
    "LBFGS": lambda p: optim.LBFGS([q for group in p for q in group["params"]], 0.1, max_iter=2),
}  # fmt: skip


def test_stacked_vectors_keep_their_dimension_and_their_last_word() -> None:
    model, fast = made(), fused(made())
    expected = {(name.rpartition(".")[2], parameter.ndim > 1) for name, parameter in model.named_parameters()}
    assert {(name.rpartition(".")[2], parameter.ndim > 1) for name, parameter in fast.named_parameters()} == expected
    assert len(list(fast.parameters())) == 2 + 7


def test_ten_steps_of_each_optimizer_are_those_of_the_plain_model() -> None:
    model = made()
    start, fast = model.state_dict(), fused(model)
    for kind in SIMPLE.values():
        for groups in GROUPS.values():
            plain = made()
            fast.load_state_dict(start)
            train(plain, kind(groups(plain)))
            train(fast, kind(groups(fast)))
            torch.testing.assert_close(fast.state_dict(), plain.state_dict())


def test_clipping_of_the_whole_norm_and_of_values_is_the_same() -> None:
    plain, fast = made(), fused(made())
    for each in (plain, fast):
        (each(inputs()) - 1).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (plain, fast)]
    torch.testing.assert_close(*norms)
    for each in (plain, fast):
        nn.utils.clip_grad_value_(each.parameters(), 0.01)
    torch.testing.assert_close(*(_gradients(each.heads[3].parameters()) for each in (plain, fast)))


def _gradients(parameters: Iterable[Any]) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in parameters]
