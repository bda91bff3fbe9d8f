"""State: checkpoints in and out, copies, pickles, archives, the way back."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.outcomes import Outcome, attempt, loss
from support.samples import NotForThis, Subject, quiet
from support.using import use
from torch import nn

import fxopt


def _result(model: nn.Module, subject: Subject, seed: int = 0) -> Any:
    with torch.no_grad():
        return attempt(lambda: model(*subject.arguments(seed=seed)))


def _trained(model: nn.Module, subject: Subject) -> Any:
    """Return what a model computes and, where it can be trained, what it computes after a step."""
    if subject.sample.serves:
        return {"result": _result(model, subject)}
    found: dict[str, Any] = {"result": _result(model, subject)}

    def step() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss(model(*subject.arguments())).backward()
        optimizer.step()

    found["step"] = attempt(step)
    return found if subject.sample.zeros else {**found, "after a step": _result(model, subject)}


@use()
def checkpoint_out(subject: Subject) -> Outcome:
    """The state dicts of the model and of each module in it: names, order, numbers; loaded into the plain model."""
    model = subject.new()
    found: dict[str, Any] = {"names": attempt(lambda: list(model.state_dict())), "state": attempt(model.state_dict)}
    for name in subject.children:
        found[f"state of {name}"] = attempt(lambda name=name: dict(model.get_submodule(name).state_dict()))
    other = subject.build(seed=5)

    def load() -> Any:
        other.load_state_dict(model.state_dict(), strict=not subject.sample.adds)
        return other(*subject.arguments())

    return {**found, "in the plain model": attempt(load)}


@use(writes=True)
def checkpoint_in(subject: Subject) -> Outcome:
    """A checkpoint of another training, loaded whole, by halves, and into each module."""
    model = subject.new()
    state = subject.build(seed=5).state_dict()
    names = list(state)
    half = {name: state[name] for name in names[: len(names) // 2]}
    found: dict[str, Any] = {"half": attempt(lambda: str(model.load_state_dict(half, strict=False)))}
    found["result of half"] = _result(model, subject)
    found["load"] = attempt(lambda: str(model.load_state_dict(state)))
    found["result"] = _result(model, subject)
    third = subject.build(seed=6)
    for name in subject.children:
        part = third.get_submodule(name).state_dict()
        found[f"load {name}"] = attempt(lambda: str(model.get_submodule(name).load_state_dict(part)))  # noqa: B023
    return {**found, **_trained(model, subject)}


@use(writes=True)
def wrong_checkpoint_in(subject: Subject) -> Outcome:
    """Checkpoints with a name too few, a name too many, or a wrong shape; the model stays as it was."""
    model = subject.new()
    state = subject.build(seed=5).state_dict()
    name = next(name for name, each in state.items() if each.dim())
    kinds = {
        "few": {key: each for key, each in state.items() if key != name},
        "many": {**state, "unknown.weight": torch.ones(2)},
        "shape": {**state, name: torch.ones(*state[name].shape, 2)},
    }
    return {
        f"wrong, {kind}": attempt(lambda each=each: model.load_state_dict(each) and None)
        for kind, each in kinds.items()
    }


@use(writes=True)
def checkpoint_assigned(subject: Subject) -> Outcome:
    """`load_state_dict(assign=True)`, then results and steps."""
    model = subject.new()
    state = subject.build(seed=5).state_dict()
    found = {"load": attempt(lambda: str(model.load_state_dict(state, assign=True)))}
    return {**found, **_trained(model, subject)}


@use(writes=True)
def copies(subject: Subject) -> Outcome:
    """`copy.deepcopy` of the model and of a part of it: copies work, and share nothing with the original."""
    model = subject.new()
    held: list[nn.Module] = []
    found: dict[str, Any] = {"copy": attempt(lambda: held.append(copy.deepcopy(model)))}
    if held:
        found["copied"] = _trained(held[0], subject)
    found["original"] = _result(model, subject)
    for name in subject.children[:4]:
        found[f"part {name}"] = attempt(lambda name=name: dict(copy.deepcopy(model.get_submodule(name)).state_dict()))
    return found


@use(writes=True)
def pickles(subject: Subject) -> Outcome:
    """`pickle` and `torch.save` of the whole model."""
    model, held = subject.new(), {}

    def through_torch() -> nn.Module:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    found: dict[str, Any] = {
        "pickle": attempt(lambda: held.update(pickle=pickle.loads(pickle.dumps(model)))),
        "torch": attempt(lambda: held.update(torch=through_torch())),
    }
    return {**found, **{f"loaded, {name}": _trained(each, subject) for name, each in held.items()}}


@use()
def archives(subject: Subject) -> Outcome:
    """`fxopt.save` and `fxopt.load`."""
    model = subject.new()
    if not subject.fast:
        return {"save": None, "load": None, **_trained(model, subject)}
    held: list[nn.Module] = []
    with tempfile.TemporaryDirectory() as folder, quiet():
        path = Path(folder) / "model.fxopt"
        found = {"save": attempt(lambda: fxopt.save(model, path, factory="support.small_models:Ensemble"))}
        loading = attempt(
            lambda: held.append(fxopt.load(path, model=subject.build(), example_inputs=subject.arguments()))
        )
    if not held:
        return {**found, "load": loading if found["save"] is None else None}
    return {**found, "load": None, **_trained(held[0], subject)}


@use()
def restored(subject: Subject) -> Outcome:
    """`fxopt.restore`: the way back."""
    model = subject.new()
    if not subject.fast:
        return {"restore": None, **_trained(model, subject)}
    held: list[nn.Module] = []
    found = {"restore": attempt(lambda: held.append(fxopt.restore(model)))}
    return {**found, **_trained(held[0], subject)} if held else found


@use()
def optimized_twice(subject: Subject) -> Outcome:
    """The same passes over the result."""
    model = subject.new()
    held: list[nn.Module] = []
    found = {"twice": attempt(lambda: held.append(subject.optimize(model)))}
    return {**found, **_trained(held[0], subject)} if held else found


@use()
def replayed_plan(subject: Subject) -> Outcome:
    """A plan, saved as text and replayed."""
    model = subject.new()
    if not subject.fast:
        return {"replay": None, **_trained(model, subject)}
    held: list[nn.Module] = []

    def replay() -> None:
        with tempfile.TemporaryDirectory() as folder, quiet():
            path = Path(folder) / "plan.json"
            fxopt.plan(model).save(path)
            held.append(fxopt.optimize(subject.build(), plan=path, example_inputs=subject.arguments()))

    found = {"replay": attempt(replay)}
    return {**found, **_trained(held[0], subject)} if held else found


@use(writes=True)
def optimizer_state(subject: Subject) -> Outcome:
    """The state of an optimizer, saved and loaded with the model into a second model of the same kind."""
    model, second = subject.new(), subject.new()

    def resume() -> Any:
        one = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        for _ in range(2):
            one.zero_grad()
            loss(model(*subject.arguments())).backward()
            one.step()
        other = torch.optim.Adam(second.parameters(), lr=0.01, eps=1e-3)
        second.load_state_dict(model.state_dict())
        other.load_state_dict(one.state_dict())
        other.zero_grad()
        loss(second(*subject.arguments())).backward()
        other.step()

    return {"resume": attempt(resume), "result": _result(second, subject)}


@use()
def shared_memory(subject: Subject) -> Outcome:
    """`share_memory`, `requires_grad_`, `to("cpu")`, `to(memory_format=)` and `apply`."""
    subject.skip_where_split()  # a DTensor has no memory to share
    model, found = subject.new(), {}
    for kind, change in {
        "shared": lambda: model.share_memory(), "cpu": lambda: model.to("cpu"),
        "frozen": lambda: model.requires_grad_(False), "trained": lambda: model.requires_grad_(True),
        "laid": lambda: model.to(memory_format=torch.channels_last), "applied": lambda: model.apply(lambda each: None),
    }.items():  # fmt: skip
        found[kind] = attempt(lambda change=change: change() and None)
        found[f"{kind}, result"] = _result(model, subject)
    return {**found, **_trained(model, subject)}


@use(writes=True)
def on_the_meta_device(subject: Subject) -> Outcome:
    """`to("meta")`, `to_empty` and a checkpoint."""
    if subject.sample.zeros:
        raise NotForThis
    model = subject.new()
    state = subject.build().state_dict()
    found = {"meta": attempt(lambda: model.to("meta") and None)}
    found["empty"] = attempt(lambda: model.to_empty(device="cpu") and None)
    found["load"] = attempt(lambda: str(model.load_state_dict(state)))
    return {**found, "result": _result(model, subject)} if found["load"] == "<All keys matched successfully>" else found


USES = (
    checkpoint_out, checkpoint_in, wrong_checkpoint_in, checkpoint_assigned, copies, pickles, archives, restored,
    optimized_twice, replayed_plan, optimizer_state, shared_memory, on_the_meta_device,
)  # fmt: skip
