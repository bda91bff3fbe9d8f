"""Derivatives: backward, second ones, forward mode, functions of torch.func, gradients of single rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.outcomes import Outcome, Raised, attempt, kept, loss
from support.samples import NotForThis, Subject, floats_of
from support.using import use
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap


def _of_first(subject: Subject, model: nn.Module, seed: int = 0) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the first input, and the loss as a function of it."""
    first, *others = subject.arguments(seed=seed)
    if not first.is_floating_point():
        raise NotForThis
    return first, lambda x: loss(model(x, *others))


@use()
def gradients(subject: Subject) -> Outcome:
    """Gradients of parameters and inputs, of two calls added up, with inputs that need none before."""
    model = subject.new()
    arguments = subject.arguments()
    for each in floats_of(arguments):
        each.requires_grad_()
    found = {"no input": attempt(lambda: loss(model(*subject.arguments(2))).backward())}
    found["backward"] = attempt(lambda: loss(model(*arguments)).backward())
    found.update({f"input {i}": kept(each.grad) for i, each in enumerate(floats_of(arguments))})
    return {**found, **kept(subject.gradients(model))}


@use()
def gradients_twice(subject: Subject) -> Outcome:
    """Two backwards of one graph, and gradients of a part of the parameters with the others frozen."""
    model = subject.new()
    value = attempt(lambda: _twice(model, subject))
    found = {"twice": value, **kept(subject.gradients(model))}
    other = subject.new()
    names = [name for name in subject.names if name.endswith("weight")]

    def frozen() -> None:
        for name in names:
            subject.parameters(other)[name].requires_grad_(False)
        loss(other(*subject.arguments())).backward()

    found["frozen"] = attempt(frozen)
    if not isinstance(found["frozen"], Raised):
        found.update({f"frozen, {name}": kept(each) for name, each in subject.gradients(other).items()})
    return found


def _twice(model: nn.Module, subject: Subject) -> None:
    value = loss(model(*subject.arguments()))
    value.backward(retain_graph=True)
    value.backward()


@use()
def second_gradients(subject: Subject) -> Outcome:
    """Gradients of the norm of gradients, by input and by parameters."""
    model = subject.new()
    first, function = _of_first(subject, model)
    first.requires_grad_()

    def penalty() -> Tensor:
        (slope,) = torch.autograd.grad(function(first), first, create_graph=True)
        slope.square().sum().backward()
        return first.grad

    return {"input": attempt(penalty), **kept(subject.gradients(model))}


@use()
def forward_mode(subject: Subject) -> Outcome:
    """`torch.func.jvp`, and dual numbers."""
    from torch.autograd import forward_ad

    model = subject.new()
    first, function = _of_first(subject, model)
    tangent = torch.linspace(-1, 1, first.numel()).view_as(first)

    def dual() -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(first, tangent))).tangent

    return {"jvp": attempt(lambda: jvp(function, (first,), (tangent,))), "dual": attempt(dual)}


@use()
def jacobians(subject: Subject) -> Outcome:
    """`jacrev`, `jacfwd` and `vjp` by the input."""
    model = subject.new()
    first, function = _of_first(subject, model)
    return {
        "jacrev": attempt(lambda: jacrev(function)(first)),
        "jacfwd": attempt(lambda: jacfwd(function)(first)),
        "grad": attempt(lambda: grad(function)(first)),
        "vjp": attempt(lambda: vjp(function, first)[1](torch.ones(()))),
    }


@use()
def hessians(subject: Subject) -> Outcome:
    """`torch.func.hessian` and products with it, by a single row."""
    model = subject.new()
    first, *others = subject.arguments(1 if not subject.sample.extra.get("graph") else None)

    def function(x: Tensor) -> Tensor:
        return loss(model(x, *others))

    if first.numel() > 80:
        tangent = torch.ones_like(first)
        return {"product": attempt(lambda: jvp(grad(function), (first,), (tangent,)))}
    return {"hessian": attempt(lambda: hessian(function)(first))}


@use()
def mapped(subject: Subject) -> Outcome:
    """`vmap` over several batches, in either place."""
    model = subject.new()
    first, *others = subject.arguments()
    several = torch.stack([first, 2 * first, first.flip(0)])
    return {
        "vmap": attempt(lambda: vmap(lambda x: model(x, *others))(several)),
        "other place": attempt(lambda: vmap(lambda x: model(x, *others), in_dims=1)(several.movedim(0, 1))),
    }


def _parameters(subject: Subject, model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in model.named_parameters() if not each.is_meta}


def _original(subject: Subject, model: nn.Module, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the original names, whichever names the model has."""
    if not subject.fast:
        return found
    import fxopt

    probe = subject.new()
    own = dict(probe.named_parameters())
    if set(own) != set(found):
        raise NotForThis
    with torch.no_grad():
        for name, value in found.items():
            own[name].copy_(value)
    state = fxopt.state_dict(probe)
    return {name: state[name] for name in subject.names}


@use()
def gradients_of_single_rows(subject: Subject) -> Outcome:
    """`vmap(grad(functional_call))` over the rows of a batch."""
    if subject.sample.extra.get("graph"):
        raise NotForThis
    model = subject.new()
    (x,) = subject.arguments()
    state = _parameters(subject, model)

    def of_row(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return loss(functional_call(model, parameters, (row[None],)))

    found = attempt(lambda: vmap(grad(of_row), in_dims=(None, 0))(state, x))
    if not isinstance(found, dict) or subject.sample.zeros:
        return {"gradients": found if not isinstance(found, dict) else None}
    rows = [{name: each[i] for name, each in found.items()} for i in range(len(x))]
    return {f"row {i}": attempt(lambda each=each: _original(subject, model, each)) for i, each in enumerate(rows)}


@use()
def functional_derivatives(subject: Subject) -> Outcome:
    """`grad` and `jvp` of a functional call by all parameters."""
    model = subject.new()
    state = _parameters(subject, model)

    def function(parameters: dict[str, Tensor]) -> Tensor:
        return loss(functional_call(model, parameters, subject.arguments()))

    slopes = attempt(lambda: grad(function)(state))
    if isinstance(slopes, dict):
        taken = slopes
        slopes = None if subject.sample.zeros else attempt(lambda: _original(subject, model, taken))
    return {"grad": slopes, "jvp": attempt(lambda: jvp(function, (state,), (state,))[1])}


USES = (
    gradients, gradients_twice, second_gradients, forward_mode, jacobians, hessians, mapped,
    gradients_of_single_rows, functional_derivatives,
)  # fmt: skip
