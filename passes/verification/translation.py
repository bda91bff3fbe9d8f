"""Put a run of the original under the rewritten module's names, so that the two can be laid side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import FxoptError, VerificationError
from ...runtime.state import StateMap
from .compare import Tolerance, bitwise_difference, distance, form_difference
from .inputs import perturbed_state
from .module_harness import ModuleHarness
from .outcome import Outcome, Quantities, differentiable
from .runs import coarsest_epsilon
from .samples import Reference
from .tolerances import STATE_UNITS

__all__ = ["MapState", "Objection", "Translation"]

MapState = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""From every parameter and buffer under its old name to the same under the new names; `StateMap.forward` is one."""


class Objection(VerificationError):
    """Why a rewrite is not accepted."""


class _Mark(NamedTuple):
    """Where a new tensor is made of old ones that receive a gradient."""

    is_anywhere: bool
    is_everywhere: bool  # where any old tensor could


class Translation:
    """Translate state and runs from the old names to the new ones."""

    def __init__(self, reference: Reference, after: ModuleHarness, map_state: MapState) -> None:
        self.reference, self.after, self.map_state = reference, after, map_state
        self._marks: dict[frozenset[str], Mapping[str, _Mark]] = {}
        self.mapped = self.state(reference.state)  # under the new names
        self._reached = reached = {id(after.state[name]) for name in self.mapped if name in after.state}
        # Where the map does not account for every float tensor, noise on the old state cannot be carried over.
        self.covers = all(id(tensor) in reached or not differentiable(tensor) for tensor in after.state.values())
        plain = (tensor for name, tensor in after.plain.items() if name not in reference.plain)
        # New tensors (a folded constant, say) are computed in the module's own types.
        self.is_rounded = not self.covers or any(differentiable(tensor) for tensor in plain)
        self._slack = Tolerance(STATE_UNITS * coarsest_epsilon(((), {}), reference.state), 0.0)
        steps = getattr(map_state, "__self__", None)
        self.steps = steps if isinstance(steps, StateMap) else None  # they lead back, too
        known = () if self.steps is None else self.steps.steps
        self._fixed = {name for step in known if not step.keeps_gradients for name in step.targets}
        self._by_data = {name for step in known if step.by_data for name in step.targets}
        self._filled = {name for step in known if step.fills_gradients for name in step.targets}

    def state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map whole old state; object where the map does not take it."""
        try:
            return self.map_state(state)
        except FxoptError as error:
            raise Objection(f"the state map does not fit: {error}") from error

    def stand_ins(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map old state to tensors for every name of the rewritten module; a tied tensor goes under all its names."""
        actual = self.after.state
        mapped = {name: tensor for name, tensor in self.state(state).items() if name in actual}
        by_tensor = {id(actual[name]): tensor for name, tensor in mapped.items()}
        return {name: by_tensor.get(id(tensor), tensor) for name, tensor in actual.items()}

    def check_state(self) -> None:
        """Object unless the map yields what the rewritten module really holds."""
        actual = self.after.state
        for name, expected in self.mapped.items():
            if name not in actual:
                raise Objection(f"{name} is missing, but the state map produces it")
            found = actual[name].detach()
            if found.shape != expected.shape:
                raise Objection(
                    f"{name} has shape {list(found.shape)}, but the state map gives it {list(expected.shape)}"
                )
            if name not in self._by_data and distance(expected, found, self._slack).reason:
                raise Objection(f"{name} does not have the values of the original tensors")

    def check_way_back(self) -> None:
        """Object unless any checkpoint comes back from the rewritten module as it went in, bit by bit."""
        if self.steps is None or not self.steps.steps:
            return
        state = _told_apart(self.reference.state, self.reference.conditions.seed)
        state |= {alias: state[name] for alias, name in self.steps.aliases if name in state}
        with _quietly("the state map cannot be reversed"):
            back = self.steps.backward(self.steps.forward(state))
            if self.steps.is_lossy:  # what is left must come back: what was cut away cannot
                state, back = self.steps.forward(state), self.steps.forward(back)
        for name, tensor in state.items():
            reason = form_difference(tensor, back.get(name)) or bitwise_difference(tensor, back[name])
            if reason:
                raise Objection(f"{name} {reason} after the state map is applied and reversed")

    def check_round_trip(self) -> None:
        """Object unless what the rewritten module holds comes back from a checkpoint with the original names."""
        if self.steps is None:
            return
        held = self.after.lasting
        for name, tensor in held.items():
            if id(tensor) not in self._reached:
                raise Objection(
                    f"{name} is in no original checkpoint, and the state map does not say what it is made of"
                )
        with _quietly("the state makes no round trip"):
            back = self.steps.backward({name: tensor.detach() for name, tensor in held.items()})
            found = self.steps.forward(back)
        reached = {id(held[name]) for name in found if name in held}
        for name, tensor in held.items():
            reason = "is gone" if id(tensor) not in reached else ""
            if name in found:
                other = found[name].detach()
                reason = form_difference(tensor, other) or distance(tensor.detach(), other, self._slack).reason
            if reason:
                raise Objection(f"{name} {reason} after it was saved under the original names and loaded")

    def quantities(self, run: Outcome, state: Mapping[str, Tensor]) -> Quantities:
        """Return what a run of the original, on `state`, yielded, under the new names."""
        return run.quantities(self._gradients(run), self._buffers(run, state))

    def _buffers(self, run: Outcome, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not run.buffers:
            return {}
        mapped = self.state({**state, **run.buffers})
        return {name: tensor for name, tensor in mapped.items() if name in self.after.buffers}

    def _gradients(self, run: Outcome) -> dict[str, Tensor | None]:
        if not self.reference.conditions.gradients:
            return {}
        found = run.parameter_gradients
        wide = next((gradient.dtype for gradient in found.values() if gradient is not None), None)
        values = {name: _or_zeros(found.get(name), tensor, wide) for name, tensor in self.reference.state.items()}
        marks = self._marks_of(frozenset(name for name, gradient in found.items() if gradient is not None))
        mapped = self.state(values)
        return {  # of a tensor without elements, which is gone as a whole, there is nothing to compare
            name: _if_present(name, gradient, marks[name], filled=name in self._filled)
            for name, gradient in mapped.items()
            if name not in self._fixed
            and gradient.numel()
            and (name in self.after.parameters or marks[name].is_anywhere)
        }

    def _marks_of(self, present: frozenset[str]) -> Mapping[str, _Mark]:
        """Map ones for old tensors with a gradient and zeros for the others: mixed marks tell mixed members."""
        if present not in self._marks:
            found, whole = self._mapped_ones(present), self._mapped_ones(frozenset(self.reference.state))
            self._marks[present] = {
                name: _Mark(bool(marks.any()), torch.equal(marks, whole[name])) for name, marks in found.items()
            }
        return self._marks[present]

    def _mapped_ones(self, present: frozenset[str]) -> Mapping[str, Tensor]:
        ones = {name: torch.tensor(float(name in present)) for name in self.reference.state}
        return self.state({name: one.expand(self.reference.state[name].shape) for name, one in ones.items()})


@contextmanager
def _quietly(problem: str) -> Generator[None]:
    """Object to whatever a state map raises; warnings that values change on the way are known besides."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise Objection(f"{problem}: {type(error).__name__}: {error}") from error


def _if_present(name: str, gradient: Tensor, mark: _Mark, *, filled: bool) -> Tensor | None:
    if (filled and mark.is_anywhere) or mark.is_everywhere:  # a mask leaves zeros where none can have a gradient
        return gradient
    if not mark.is_anywhere:
        return None
    raise Objection(f"{name} joins tensors that receive a gradient with tensors that do not")


def _told_apart(state: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the state with noise, counters too: members that start out equal can be exchanged without a trace."""
    noisy = perturbed_state(state, seed)
    counts = (torch.int64, torch.int32)
    return {n: t + number if t.dtype in counts else t for number, (n, t) in enumerate(noisy.items())}


def _or_zeros(gradient: Tensor | None, like: Tensor, wide: torch.dtype | None) -> Tensor:
    if gradient is not None:
        return gradient
    dtype = wide if wide is not None and torch.promote_types(wide, like.dtype) == wide else like.dtype
    return torch.zeros((), dtype=dtype, device=like.device).expand(like.shape)
