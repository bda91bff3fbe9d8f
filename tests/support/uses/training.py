"""Training: ten steps of optimizers, with groups of parameters, moved and held ones, averages, clipped gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.optimizers import Lamb, Lion, NovoGrad
from support.outcomes import Outcome, attempt, kept, loss
from support.samples import NotForThis, Subject
from support.using import Use, use
from torch import Tensor, nn, optim
from torch.optim import Optimizer

STEPS = 10
TOLERANCE = 3e-3
"""How far rounding may carry some steps apart: a wrong step is ten times as far off."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(optim.Adam, lr=0.01, eps=1e-3, amsgrad=True),
    "adamw": partial(optim.AdamW, lr=0.01, eps=1e-3),
    "adamax": partial(optim.Adamax, lr=0.01, eps=1e-3),
    "nadam": partial(optim.NAdam, lr=0.01, eps=1e-3),
    "radam": partial(optim.RAdam, lr=0.01, eps=1e-3),
    "adagrad": partial(optim.Adagrad, lr=0.02, eps=1e-3),
    "adadelta": partial(optim.Adadelta, lr=0.5, eps=1e-4),
    "rmsprop": partial(optim.RMSprop, lr=0.01, eps=1e-3, centered=True, momentum=0.5),
    "rprop": partial(optim.Rprop, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.05),
    "lbfgs": partial(optim.LBFGS, lr=0.1, max_iter=2),
    "adafactor": partial(optim.Adafactor, lr=0.05),
    "sparse_adam": partial(optim.SparseAdam, lr=0.01),
    "lion": Lion,
    "lamb": Lamb,
    "novograd": NovoGrad,
}


def _losses(model: nn.Module, optimizer: Optimizer, subject: Subject, steps: int = STEPS) -> Any:
    """Take steps, and return the losses and what the model computes then."""

    def step(turn: int) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            value = loss(model(*subject.arguments(seed=turn % 3)))
            value.backward()
            return value

        return optimizer.step(closure)

    values = [float(step(turn)) for turn in range(steps)]
    with torch.no_grad():
        return torch.tensor(values), model(*subject.arguments(seed=7))


def _stepped(make: Callable[[nn.Module], Optimizer], subject: Subject) -> Outcome:
    model = subject.new()
    found = {"steps": attempt(lambda: _losses(model, make(model), subject))}
    state = attempt(model.state_dict)
    return {**found, "state": state}


def _optimizer(name: str) -> Use:
    def run(subject: Subject) -> Outcome:
        if name == "lbfgs":
            subject.skip_where_split()  # it decides by its parts how often it calls the model
        return _stepped(lambda model: OPTIMIZERS[name](model.parameters()), subject)

    run.__doc__ = f"Ten steps of {name}."
    return Use(f"optimizer_{name}", run, writes=True, tolerance=0.05 if name == "lbfgs" else TOLERANCE)


@use(writes=True, tolerance=TOLERANCE)
def optimizer_muon(subject: Subject) -> Outcome:
    """Ten steps of Muon over matrices, with AdamW over the rest."""
    model = subject.new()

    def steps() -> Any:
        matrices = [each for each in model.parameters() if each.ndim == 2]
        others = [each for each in model.parameters() if each.ndim != 2]
        if not matrices:
            raise NotForThis
        muon = optim.Muon(matrices, lr=0.02)
        rest = optim.AdamW(others, lr=0.01, eps=1e-3) if others else None
        values = []
        for turn in range(STEPS):
            model.zero_grad()
            value = loss(model(*subject.arguments(seed=turn % 3)))
            value.backward()
            muon.step()
            if rest is not None:
                rest.step()
            values.append(float(value))
        return torch.tensor(values)

    return {"steps": attempt(steps), "state": attempt(model.state_dict)}


def _grouped(decays: Callable[[str, Any], bool], subject: Subject) -> Outcome:
    def make(model: nn.Module) -> Optimizer:
        named = list(model.named_parameters())
        groups = [
            {"params": [each for name, each in named if decays(name, each)], "weight_decay": 0.5},
            {"params": [each for name, each in named if not decays(name, each)], "weight_decay": 0.0, "lr": 0.02},
        ]
        return optim.AdamW([group for group in groups if group["params"]], lr=0.01, eps=1e-3)

    return _stepped(make, subject)


@use(writes=True, tolerance=TOLERANCE)
def groups_by_name(subject: Subject) -> Outcome:
    """Groups of parameters by name: no decay for what ends in "bias", or has "norm" in its name."""
    return _grouped(lambda name, each: not name.endswith("bias") and "norm" not in name, subject)


@use(writes=True, tolerance=TOLERANCE)
def groups_by_dimensions(subject: Subject) -> Outcome:
    """Groups of parameters by dimensions: decay for matrices and more."""
    return _grouped(lambda name, each: each.ndim >= 2, subject)


@use(writes=True, tolerance=TOLERANCE)
def optimizer_from_before(subject: Subject) -> Outcome:
    """An optimizer with moments, made before, that is moved by `optimizer=`, and a schedule on it."""
    model = subject.build()
    optimizer = optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    schedule = optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    if subject.sample.zeros:
        raise NotForThis
    found = {"before": attempt(lambda: _losses(model, optimizer, subject, 3))}
    fast: list[nn.Module] = []
    moved = attempt(lambda: fast.append(subject.optimize(model, optimizer=optimizer)))
    if not fast:
        return {**found, "moved": moved}
    found["after"] = attempt(lambda: (_losses(fast[0], optimizer, subject, 3), schedule.step()))
    return {**found, "moved": None, "last": attempt(lambda: _losses(fast[0], optimizer, subject, 3))}


def _towards(slow: Tensor, own: Tensor) -> Tensor:
    return slow.lerp(own, 0.1) if slow.is_floating_point() else own


class Learner(nn.Module):
    """A model that holds its optimizer, a slow copy and lists of its parameters, as classes of tutorials do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.slow = copy.deepcopy(model).requires_grad_(False)
        self.optimizer = optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        self.matrices = [each for each in model.parameters() if each.ndim >= 2]

    def forward(self, *arguments: Any) -> Any:
        return self.model(*arguments)

    def learn(self, arguments: Any) -> float:
        self.optimizer.zero_grad()
        value = loss(self(*arguments)) + sum(each.square().sum() for each in self.matrices)
        value.backward()
        self.optimizer.step()
        with torch.no_grad():
            own = self.model.state_dict()
            self.slow.load_state_dict(
                {name: _towards(each, own[name]) for name, each in self.slow.state_dict().items()}
            )
        return float(value)


@use(writes=True, tolerance=TOLERANCE)
def optimizer_held_by_the_model(subject: Subject) -> Outcome:
    """A model with its optimizer, a slow copy and lists of its parameters as attributes."""
    if subject.sample.zeros:
        raise NotForThis
    learner = Learner(subject.build()).train(subject.sample.training)
    held: list[Any] = []
    made = attempt(lambda: held.append(subject.optimize(learner)))
    if not held:
        return {"made": made}
    model = held[0]
    found = {
        "steps": attempt(lambda: torch.tensor([model.learn(subject.arguments(seed=turn % 3)) for turn in range(5)]))
    }
    found["slow"] = attempt(lambda: model.slow(*subject.arguments()))
    return {"made": None, **found, "state": attempt(model.state_dict)}


@use(writes=True, tolerance=TOLERANCE)
def averages(subject: Subject) -> Outcome:
    """`AveragedModel`, and averages by state dict."""
    from torch.optim.swa_utils import AveragedModel

    model = subject.new()
    held: list[Any] = []
    made = attempt(lambda: held.append(AveragedModel(model)))
    if not held:
        return {"made": made}
    slow = held[0]

    def steps() -> Any:
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            _losses(model, optimizer, subject, 1)
            slow.update_parameters(model)
        with torch.no_grad():
            return slow(*subject.arguments())

    return {"made": None, "steps": attempt(steps), "state": attempt(slow.state_dict)}


@use(writes=True, tolerance=TOLERANCE)
def clipped_gradients(subject: Subject) -> Outcome:
    """`clip_grad_norm_`, gradients of several backwards, gradients set to zero."""
    model = subject.new()

    def steps() -> Tensor:
        optimizer, norms = optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
        for turn in range(4):
            optimizer.zero_grad(set_to_none=turn % 2 == 0)
            for part in range(2):
                loss(model(*subject.arguments(seed=turn + part))).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
        return torch.tensor(norms)

    return {"norms": attempt(steps), "state": attempt(model.state_dict)}


@use(writes=True, tolerance=TOLERANCE)
def written_weights(subject: Subject) -> Outcome:
    """Weights that are written to: in place, through `.data`, by `copy_`, by initializers, by vectors."""
    model, found = subject.new(), {}

    def write(kind: str) -> None:
        for name, each in subject.parameters(model).items():
            if kind == "mul_":
                each.mul_(1.1)
            elif kind == "data":
                each.data.add_(0.05)
            elif kind == "new data":
                each.data = each.data * 0.9
            elif name.endswith("weight") and each.dim() > 1:
                nn.init.orthogonal_(each, generator=torch.Generator().manual_seed(1))

    for kind in ("mul_", "data", "new data", "orthogonal"):
        with torch.no_grad():
            found[f"write, {kind}"] = attempt(lambda kind=kind: write(kind))
            if kind == "data":
                model.train(model.training)  # torch does not count such writes: the documented way to say so
            found[kind] = attempt(lambda: model(*subject.arguments()))
    return {
        **found,
        "state": attempt(model.state_dict),
        "after": kept(attempt(lambda: loss(model(*subject.arguments())))),
    }


USES = (
    *(_optimizer(name) for name in OPTIMIZERS), optimizer_muon, groups_by_name, groups_by_dimensions,
    optimizer_from_before, optimizer_held_by_the_model, averages, clipped_gradients, written_weights,
)  # fmt: skip
