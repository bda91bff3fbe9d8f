"""Check a captured model against its original forward, and find the modules that differ."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import children_of, has_hooks
from ...errors import ModeError
from ...runtime.graphs import Capture, install, uninstall
from ...runtime.values import copied, is_container, is_leaf, objects_in, runs_as_sequential, tensors_in, tensors_within
from ..examples import Inputs
from ..isolation import ModelState, in_phase, restoring
from .record import Recording, copy_inputs

__all__ = ["Expectation", "disagreeing", "expectations"]


@dataclass(frozen=True)
class Expectation:
    """What the model's original forward gives on one of its inputs, in one mode, and the seconds that the graphs took.
    If calls keep something on the model, `twice` says that a backward pass after each of two calls in a row works.
    """

    inputs: Inputs
    training: bool
    output: Any
    twice: bool = False
    seconds: list[float] = field(default_factory=list[float], compare=False)


def expectations(
    model: nn.Module, captured: Mapping[str, Capture], inputs: Sequence[Inputs], recording: Recording, state: ModelState
) -> list[Expectation]:
    """Return what was recorded and, where a graph may depend on it, what the model gives in the other mode."""
    pairs = zip(inputs, recording.outputs, strict=True)
    keeps = bool(recording.assigning)
    expected = [
        Expectation(given, model.training, output, twice=keeps and _trains_twice(model, given, state))
        for given, output in pairs
    ]
    known = {model.get_submodule(name): capture for name, capture in captured.items()}
    distinct = {id(capture): (module, capture) for module, capture in known.items()}  # equal modules share theirs
    if any(_depends_on_mode(module.get_submodule, capture, known) for module, capture in distinct.values()):
        with (
            contextlib.suppress(ModeError),  # it was rewritten for evaluation, and is in no other mode
            restoring(state),
            in_phase(model, not model.training),
            torch.set_grad_enabled(recording.grad),
        ):
            for given in inputs:
                try:
                    output = _run(model, given, recording.grad)
                except Exception:
                    break
                expected.append(Expectation(given, model.training, copied(output)))
    return expected


def disagreeing(
    model: nn.Module, captured: Mapping[str, Capture], expected: Sequence[Expectation], state: ModelState, *, grad: bool
) -> list[str]:
    """Return the names of the captured modules without which the model gives what its original forward gives. Installed
    graphs are taken out, and come back in groups, innermost first; a group that disagrees is halved.
    """
    if _agrees(model, expected, state, grad):
        return []
    modules = {name: model.get_submodule(name) for name in captured}
    for name, module in modules.items():
        uninstall(module, keep_regions=captured[name].rewritten)
    guilty: list[str] = []
    names = list(captured)[::-1]
    middle = len(names) // 2  # all of them together do not agree
    groups = [names[middle:], names[:middle]] if middle else [names]
    while groups:
        group = groups.pop()
        for name in group:
            install(modules[name], captured[name])
        if _agrees(model, expected, state, grad):
            continue
        for name in group:
            uninstall(modules[name], keep_regions=captured[name].rewritten)
        middle = len(group) // 2
        if middle:
            groups += [group[middle:], group[:middle]]
        else:
            guilty += group
    return guilty


def _depends_on_mode(find: Callable[[str], nn.Module], capture: Capture, known: Mapping[nn.Module, Capture]) -> bool:
    """Tell whether a graph has other code for the other mode, or takes apart what a child may give in another form."""
    if len(capture.specializations) != 1:
        return bool(capture.specializations)
    for node in capture.specializations[0].graph.find_nodes(op="call_module"):
        plan = capture.regions.get(str(node.target))
        if plan is not None:
            if _depends_on_mode(find, plan.capture, known):
                return True
            continue
        takes_apart = any(user.target is getattr or (user.target is not len and _is_item(user)) for user in node.users)
        if takes_apart and not _keeps_its_form(find(str(node.target)), known):
            return True
    return False


def _keeps_its_form(module: nn.Module, known: Mapping[nn.Module, Capture]) -> bool:
    """Say whether a module's result has one form in both modes: no code asks for the mode, all is captured."""
    if has_hooks(module):
        return False
    if is_leaf(module):
        return True
    capture = known.get(module)
    if capture is None:
        has_code = not (is_container(module) or runs_as_sequential(module))
    else:
        has_code = len(capture.specializations) != 1 or any(
            guard.asks_for_training for guard in capture.specializations[0].guards
        )
    return not has_code and all(_keeps_its_form(child, known) for child in children_of(module).values() if child)


def _is_item(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in ("getitem", "require")


def _agrees(model: nn.Module, expected: Sequence[Expectation], state: ModelState, grad: bool) -> bool:
    modes = {expectation.training for expectation in expected}
    if not all(_agrees_in(model, [e for e in expected if e.training is mode], mode, state, grad) for mode in modes):
        return False
    return all(_trains_twice(model, expectation.inputs, state) for expectation in expected if expectation.twice)


def _agrees_in(
    model: nn.Module, expected: Sequence[Expectation], training: bool, state: ModelState, grad: bool
) -> bool:
    with restoring(state), in_phase(model, training), torch.set_grad_enabled(grad):
        for expectation in expected:
            start = time.thread_time()
            try:
                given = _run(model, expectation.inputs, grad)
            except Exception:
                return False
            expectation.seconds.append(time.thread_time() - start)
            if not same_outputs(given, expectation.output):
                return False
    return True


def _trains_twice(model: nn.Module, inputs: Inputs, state: ModelState) -> bool:
    """Say whether a backward pass works after each of two calls in a row: what the first keeps may lead back."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with restoring(state), torch.enable_grad():
        for _ in range(2):
            try:
                outputs = [tensor for tensor in _tensors(_run(model, inputs, True)) if tensor.requires_grad]
                torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True)
            except Exception:  # the model's own code may raise anything
                return False
    return True


def _run(model: nn.Module, inputs: Inputs, grad: bool) -> Any:
    return copy_inputs(inputs, grad=grad).run(model)


def same_outputs(given: Any, expected: Any) -> bool:
    """Tell whether two outputs hold the same tensors up to the last bits, in the same structure, in caches too."""
    if type(given) is not type(expected):
        return False
    a, b = _tensors(given), _tensors(expected)
    return len(a) == len(b) and all(map(_same, a, b))


def _tensors(value: Any) -> list[Tensor]:
    return [*tensors_in(value), *(tensor for held in objects_in(value) for tensor in tensors_within(held))]


def _same(given: Tensor, expected: Tensor) -> bool:
    if given.shape != expected.shape or given.dtype != expected.dtype or given.device != expected.device:
        return False
    if given.is_meta or given.layout is not torch.strided:
        return True
    if given.is_floating_point() or given.is_complex():
        tolerance = 64 * torch.finfo(given.dtype).eps
        return torch.allclose(given, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(given, expected)
