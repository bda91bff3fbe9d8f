"""Children and parameters that are replaced afterwards, in every way that Python has; tying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.outcomes import Outcome, attempt, kept, loss
from support.samples import NotForThis, Subject
from support.using import Use, use
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree


class Doubled(nn.Module):
    """What another module gives, twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda x: 2 * x, self.inner(*given))


class Squares(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.square()


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    holder, _, last = name.rpartition(".")
    return model.get_submodule(holder), last


def _by_setattr(model: nn.Module, name: str) -> None:
    holder, last = _holder(model, name)
    setattr(holder, last, Doubled(getattr(holder, last)))


def _by_item(model: nn.Module, name: str) -> None:
    holder, last = _holder(model, name)
    if not isinstance(holder, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        raise NotForThis
    key: Any = last if isinstance(holder, nn.ModuleDict) else int(last)
    holder[key] = Doubled(holder[key])


def _by_dictionary(model: nn.Module, name: str) -> None:
    holder, last = _holder(model, name)
    holder._modules[last] = Doubled(getattr(holder, last))


def _by_registration(model: nn.Module, name: str) -> None:
    holder, last = _holder(model, name)
    holder.register_module(last, Doubled(getattr(holder, last)))


def _by_class(model: nn.Module, name: str) -> None:
    child = model.get_submodule(name)
    before = type(child)

    def forward(self: Any, *given: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda x: 2 * x, before.forward(self, *given))

    child.__class__ = type("Doubled", (before,), {"forward": forward})


def _by_forward(model: nn.Module, name: str) -> None:
    child = model.get_submodule(name)
    before = child.forward
    child.__dict__["forward"] = lambda *given: pytree.tree_map_only(Tensor, lambda x: 2 * x, before(*given))


def _by_attribute(model: nn.Module, name: str) -> None:
    child = model.get_submodule(name)
    before = child.forward
    child.forward = lambda *given: pytree.tree_map_only(Tensor, lambda x: 2 * x, before(*given))


def _parametrized(model: nn.Module, name: str) -> None:
    child = model.get_submodule(name)
    if not isinstance(getattr(child, "weight", None), nn.Parameter) and "weight" not in child._parameters:
        raise NotForThis
    parametrize.register_parametrization(child, "weight", Squares())


def _new_parameter(model: nn.Module, name: str) -> None:
    child = model.get_submodule(name)
    weight = getattr(child, "weight", None)
    if not isinstance(weight, Tensor):
        raise NotForThis
    child.weight = nn.Parameter(2 * weight.detach().clone())


def _new_parameter_in_the_dictionary(model: nn.Module, name: str) -> None:
    child = model.get_submodule(name)
    weight = getattr(child, "weight", None)
    if not isinstance(weight, Tensor):
        raise NotForThis
    child._parameters["weight"] = nn.Parameter(2 * weight.detach().clone())


def _settings(model: nn.Module, name: str) -> None:
    child = model.get_submodule(name)
    changed = {"eps": 0.5, "negative_slope": 0.7, "padding": (0, 0), "approximate": "tanh", "inplace": True, "heads": 1}
    known = [key for key in changed if key in vars(child)]
    if not known:
        raise NotForThis
    for key in known:
        setattr(child, key, changed[key])


def _removed(model: nn.Module, name: str) -> None:
    holder, last = _holder(model, name)
    delattr(holder, last)


WAYS: dict[str, Callable[[nn.Module, str], None]] = {
    "child_by_setattr": _by_setattr, "child_by_item": _by_item, "child_in_modules": _by_dictionary,
    "child_by_register_module": _by_registration, "class_of_a_child": _by_class, "forward_in_dict": _by_forward,
    "forward_of_a_child": _by_attribute, "parametrized_child": _parametrized, "parameter_by_setattr": _new_parameter,
    "parameter_in_parameters": _new_parameter_in_the_dictionary, "settings_of_a_child": _settings,
    "child_removed": _removed,
}  # fmt: skip


def _results(model: nn.Module, subject: Subject) -> dict[str, Any]:
    with torch.no_grad():
        found = {"without gradients": attempt(lambda: model(*subject.arguments()))}
    found["result"] = attempt(lambda: model(*subject.arguments(seed=1)))
    return {**found, "backward": attempt(lambda: loss(model(*subject.arguments())).backward())}


def _replaced(way: str) -> Use:
    def run(subject: Subject) -> Outcome:
        names = subject.random.sample(subject.children, min(2, len(subject.children)))
        found: dict[str, Any] = {}
        for name in names:
            model = subject.new()
            try:
                changed = attempt(lambda name=name, model=model: WAYS[way](model, name))
            except NotForThis:
                continue
            found[f"'{name}': change"] = changed
            if changed is None:
                found.update({f"'{name}': {label}": each for label, each in _results(model, subject).items()})
        if not found:
            raise NotForThis
        return found

    run.__doc__ = f"Replaced afterwards: {way.replace('_', ' ')}."
    return Use(way, run, writes=way.startswith("parameter"), ranges=True)


@use(writes=True)
def tied_afterwards(subject: Subject) -> Outcome:
    """Two parameters of one shape that become one."""
    model, found = subject.new(), {}
    shapes: dict[Any, list[str]] = {}
    for name, each in subject.build().named_parameters():
        shapes.setdefault(each.shape, []).append(name)
    pairs = [names[:2] for names in shapes.values() if len(names) > 1]
    if not pairs:
        raise NotForThis
    first, second = subject.random.choice(pairs)
    holder, last = _holder(model, second)
    found["tie"] = attempt(lambda: setattr(holder, last, subject.parameters(model)[first]))
    found.update(_results(model, subject))
    found["step"] = attempt(lambda: torch.optim.SGD(model.parameters(), lr=0.01).step())
    return {**found, **_results(model, subject), **kept(subject.gradients(model))}


USES = (*(_replaced(way) for way in WAYS), tied_afterwards)
