"""Calls: sizes, rows that are not finite, layouts, modes, another routing, another graph."""

from __future__ import annotations

from typing import Any

import torch
from support.outcomes import Outcome, attempt, kept, loss
from support.samples import NotForThis, Subject, floats_of
from support.using import use
from torch import Tensor
from torch.utils import _pytree as pytree


@use()
def sizes(subject: Subject) -> Outcome:
    """Calls with other numbers of rows, without gradients."""
    model = subject.new()
    with torch.no_grad():
        return {str(n): attempt(lambda n=n: model(*subject.arguments(n, n))) for n in (1, 2, 5, 17)}


@use()
def no_rows(subject: Subject) -> Outcome:
    """A call without rows, and its gradients."""
    model = subject.new()
    found = {"result": attempt(lambda: model(*subject.arguments(0)))}
    found["backward"] = attempt(lambda: loss(model(*subject.arguments(0))).backward())
    return found


def _spoiled(subject: Subject, number: float) -> Outcome:
    model = subject.new()
    arguments = subject.arguments()
    given = floats_of(arguments)
    if not given:
        raise NotForThis
    given[0][0] = number
    with torch.no_grad():
        return {"result": attempt(lambda: model(*arguments)), "after": attempt(lambda: model(*subject.arguments()))}


@use()
def nan_rows(subject: Subject) -> Outcome:
    """A row of NaN beside others."""
    return _spoiled(subject, float("nan"))


@use()
def infinite_rows(subject: Subject) -> Outcome:
    """A row of infinity beside others."""
    return _spoiled(subject, float("inf"))


@use(ranges=True)
def large_and_small_rows(subject: Subject) -> Outcome:
    """Inputs a hundred times as large, negated, tiny and zero."""
    model = subject.new()
    with torch.no_grad():
        return {
            str(scale): attempt(lambda scale=scale: model(*_scaled(subject.arguments(), scale)))
            for scale in (100.0, -1.0, 1e-3, 0.0)
        }


def _scaled(arguments: Any, scale: float) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x * scale if x.is_floating_point() else x, arguments)


def _in_strides(x: Tensor) -> Tensor:
    """Return the same numbers in other strides: every other element of a larger memory, dimensions turned round."""
    turned = torch.empty([2 * size for size in reversed(x.shape)], dtype=x.dtype)
    laid = turned.permute(*reversed(range(x.dim())))[tuple(slice(None, None, 2) for _ in x.shape)]
    return laid.copy_(x)


@use()
def strides(subject: Subject) -> Outcome:
    """Inputs that are views of something else: with gaps, turned, expanded, channels last."""
    model = subject.new()
    arguments = subject.arguments()
    found = {"gaps": attempt(lambda: model(*pytree.tree_map_only(Tensor, _in_strides, arguments)))}
    if not subject.sample.extra.get("graph"):
        one = [x[:1].expand(5, *x.shape[1:]) for x in arguments]
        found["expanded"] = attempt(lambda: model(*one))
    if arguments[0].dim() == 4:
        found["channels last"] = attempt(lambda: model(arguments[0].to(memory_format=torch.channels_last)))
    return found


@use()
def no_batch(subject: Subject) -> Outcome:
    """A single row without a batch dimension, and one dimension more."""
    if subject.sample.extra.get("graph"):
        raise NotForThis
    model = subject.new()
    (x,) = subject.arguments()
    with torch.no_grad():
        return {"less": attempt(lambda: model(x[0])), "more": attempt(lambda: model(x[None]))}


@use()
def wrong_inputs(subject: Subject) -> Outcome:
    """Inputs that the plain model refuses: another width, too many arguments, None; and of other types."""
    model = subject.new()
    first, *others = subject.arguments()
    with torch.no_grad():
        return {
            "wrong width": attempt(lambda: model(torch.cat([first, first], -1 if first.dim() < 4 else 1), *others)),
            "another type": attempt(lambda: model(first.to(torch.int64), *others)),
            "another float": attempt(lambda: model(first.double(), *others)),
            "wrong number": attempt(lambda: model(first, first, first, first)),
            "wrong value": attempt(lambda: model(None, *others)),
        }


@use()
def modes(subject: Subject) -> Outcome:
    """Calls in the other mode, and in the first one again, with what is left in buffers."""
    model, training = subject.new(), subject.sample.training
    found: dict[str, Any] = {}
    for turn, mode in enumerate([training, not training, training]):
        found[f"set {turn}"] = attempt(lambda mode=mode: model.train(mode) and None)
        found[f"result {turn}"] = attempt(lambda turn=turn: model(*subject.arguments(seed=turn)))
    found.update({f"buffer {name}": kept(each) for name, each in _buffers(subject, model).items()})
    return found


def _buffers(subject: Subject, model: Any) -> dict[str, Any]:
    if subject.sample.zeros:
        return {}
    return {name: model.get_buffer(name) for name, _ in subject.sample.build().named_buffers()}


@use()
def inference_mode(subject: Subject) -> Outcome:
    """Calls in inference mode, without gradients and with them, one after another."""
    model, found = subject.new(), {}
    with torch.inference_mode():
        found["inference"] = attempt(lambda: model(*subject.arguments()))
    with torch.no_grad():
        found["no grad"] = attempt(lambda: model(*subject.arguments()))
    found["grad"] = attempt(lambda: model(*subject.arguments()))
    found["backward"] = attempt(lambda: loss(model(*subject.arguments())).backward())
    with torch.inference_mode():
        found["inference inputs"] = attempt(lambda: model(*subject.arguments(seed=1)))
    return {**found, **kept(subject.gradients(model))}


@use()
def results_that_are_held(subject: Subject) -> Outcome:
    """A result that is held, and written to, while the next call runs; inputs stay as they were."""
    model, arguments = subject.new(), subject.arguments()
    with torch.no_grad():
        first = attempt(lambda: model(*arguments))
        held = model(*arguments)
        for each in pytree.tree_leaves(held):
            each.add_(1)
        second = attempt(lambda: model(*subject.arguments(seed=3)))
        return {"first": first, "second": second, "held": kept(held), "inputs": kept(arguments)}


@use()
def keywords(subject: Subject) -> Outcome:
    """Arguments by name."""
    import inspect

    model, arguments = subject.new(), subject.arguments()
    names = list(inspect.signature(type(subject.sample.build()).forward).parameters)[1 : 1 + len(arguments)]
    with torch.no_grad():
        return {"result": attempt(lambda: model(**dict(zip(names, arguments, strict=True))))}


@use()
def another_routing(subject: Subject) -> Outcome:
    """Mixtures whose router was changed: other experts are chosen, and one gets all tokens."""
    if not subject.sample.gate:
        raise NotForThis
    model, found = subject.new(), {}
    gate = subject.parameters(model)[subject.sample.gate]
    original, one = gate.detach().clone(), subject.arguments(1)
    for turn in range(len(original)):
        with torch.no_grad():
            gate.copy_(original.roll(turn, 0))
            found[f"turned {turn}"] = attempt(lambda turn=turn: model(*subject.arguments(seed=turn)))
            gate.copy_(torch.zeros_like(original).index_fill_(0, torch.tensor([turn]), 1.0) + 0.01 * original)
            found[f"all to {turn}"] = attempt(lambda turn=turn: model(*subject.arguments(seed=turn)))
            found[f"one to {turn}"] = attempt(lambda: model(*one))
        found[f"backward {turn}"] = attempt(lambda: loss(model(*subject.arguments())).backward())
    return {**found, **kept(subject.gradients(model))}


@use()
def another_graph(subject: Subject) -> Outcome:
    """Other edges: none, loops, repeated ones, and ones that are written in place."""
    if not subject.sample.extra.get("graph"):
        raise NotForThis
    model = subject.new()
    x, edges, *batch = subject.arguments()
    found = {}
    with torch.no_grad():
        for turn in range(3):
            found[f"other {turn}"] = attempt(lambda turn=turn: model(x, subject.arguments(seed=9 + turn)[1], *batch))
        found["none"] = attempt(lambda: model(x, edges[:, :0], *batch))
        found["loops"] = attempt(lambda: model(x, edges[:1].expand(2, -1), *batch))
        found["repeated"] = attempt(lambda: model(x, torch.cat([edges, edges], 1), *batch))
        edges[1] = edges[0]
        found["written"] = attempt(lambda: model(x, edges, *batch))
        edges.fill_(10_000)
        found["wrong nodes"] = attempt(lambda: model(x, edges, *batch))
    return found


USES = (
    sizes, no_rows, nan_rows, infinite_rows, large_and_small_rows, strides, no_batch, wrong_inputs, modes,
    inference_mode, results_that_are_held, keywords, another_routing, another_graph,
)  # fmt: skip
