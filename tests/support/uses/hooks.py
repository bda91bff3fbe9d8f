"""Hooks of every kind, on every child, before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.outcomes import Outcome, attempt, kept, loss
from support.samples import NotForThis, Subject, floats_of
from support.using import Use
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def _scaled(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x * 1.5 if x.is_floating_point() else x, value)


def _forward(module: nn.Module, count: Callable[[], None]) -> Any:
    return module.register_forward_hook(lambda module, given, result: (count(), _scaled(result))[1])


def _with_keywords(module: nn.Module, count: Callable[[], None]) -> Any:
    return module.register_forward_hook(
        lambda module, given, keywords, result: (count(), _scaled(result))[1], with_kwargs=True
    )


def _before(module: nn.Module, count: Callable[[], None]) -> Any:
    return module.register_forward_pre_hook(lambda module, given: (count(), _scaled(given))[1])


def _backward(module: nn.Module, count: Callable[[], None]) -> Any:
    return module.register_full_backward_hook(lambda module, into, out: (count(), _scaled(into))[1])


def _before_backward(module: nn.Module, count: Callable[[], None]) -> Any:
    return module.register_full_backward_pre_hook(lambda module, out: (count(), _scaled(out))[1])


def _gradient(module: nn.Module, count: Callable[[], None]) -> Any:
    for parameter in module.parameters(recurse=False):
        parameter.register_hook(lambda gradient: (count(), gradient * 1.5)[1])


def _accumulate(parameter: Tensor, count: Callable[[], None]) -> None:
    count()
    if parameter.grad is not None:
        parameter.grad.mul_(1.5)


def _accumulated(module: nn.Module, count: Callable[[], None]) -> Any:
    for parameter in module.parameters(recurse=False):
        parameter.register_post_accumulate_grad_hook(lambda parameter: _accumulate(parameter, count))


def _state(module: nn.Module, count: Callable[[], None]) -> Any:
    return module.register_state_dict_post_hook(lambda module, state, prefix, local: count())


KINDS = {
    "forward": _forward, "forward_with_keywords": _with_keywords, "before_forward": _before, "backward": _backward,
    "before_backward": _before_backward, "gradient": _gradient, "accumulated_gradient": _accumulated, "state": _state,
}  # fmt: skip


def _run(model: nn.Module, subject: Subject, counted: Callable[[], int]) -> Outcome:
    arguments = subject.arguments()
    for each in floats_of(arguments):
        each.requires_grad_()
    found: dict[str, Any] = {"result": attempt(lambda: model(*arguments))}
    found["backward"] = attempt(lambda: loss(model(*arguments)).backward())
    found["state"] = attempt(lambda: list(model.state_dict()))
    found["count"] = counted()
    found.update({f"input {i}": kept(each.grad) for i, each in enumerate(floats_of(arguments))})
    return {**found, **kept(subject.gradients(model))}


def _hooked(kind: str, name: str, subject: Subject, *, first: bool) -> Outcome:
    """Hook one child, before or after it is optimized, and return what a step gives."""
    counts: list[int] = []
    model = subject.build() if first else subject.new()
    hooking = attempt(lambda: KINDS[kind](model.get_submodule(name), lambda: counts.append(1)) and None)
    if hooking is not None:
        return {"hook": hooking}
    if first:
        model = subject.optimize(model)
    counts.clear()
    return {"hook": None, **_run(model, subject, lambda: len(counts))}


def _chosen(subject: Subject) -> list[str]:
    """Return one of its modules, or the model itself: another one for each sample."""
    return [subject.random.choice(["", *subject.children])]


def _hooks(kind: str, *, first: bool) -> Use:
    def run(subject: Subject) -> Outcome:
        if first and subject.sample.zeros:
            raise NotForThis
        found: dict[str, Any] = {}
        for name in _chosen(subject):
            outcome = _hooked(kind, name, subject, first=first)
            found.update({f"'{name}': {label}": value for label, value in outcome.items()})
        return found

    when = "before" if first else "after"
    run.__doc__ = f"Hooks on modules, registered {when} optimizing: {kind.replace('_', ' ')}."
    return Use(f"{kind}_hooks_{when}", run, ranges=True)


USES = tuple(_hooks(kind, first=first) for kind in KINDS for first in (False, True))
