"""Pruning units while a model is trained: the weakest shrink first, and go in several steps."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ...errors import StateError, UsageError, expect
from ...runtime.values import is_sharded, tensors_by_name
from ...tracing.program import Program
from .find import units_that_go
from .masks import progress
from .options import Options
from .sites import Chosen, kept_indices

__all__ = ["GroupSparsity", "shares_in_steps"]


def shares_in_steps(amount: float, steps: int, schedule: Literal["linear", "cubic"] = "cubic") -> list[float]:
    """Return what to give as `amount` to each of several structured prunings, so that `amount` is gone after the last.

    Each pruning takes a share of what is left. The curves are those of `PruningSchedule`. Raises UsageError unless the
    amount is from 0 to below 1, and the steps are 1 or more.
    """
    expect(steps, int, "steps", "a whole number from 1")
    if steps < 1 or not 0 <= amount < 1:
        raise UsageError(f"amount={amount}, steps={steps}; give a share from 0 to below 1, and 1 step or more")
    if schedule not in ("linear", "cubic"):
        raise UsageError(f"schedule={schedule!r}; give linear or cubic")
    left = [1 - amount * progress(schedule, step / steps) for step in range(steps + 1)]
    return [1 - after / before for before, after in itertools.pairwise(left)]


class GroupSparsity:
    """Shrink the units that structured pruning will remove, with growing strength, while the model is trained.

    The penalty is half the squared norm of all slices of each of these units, times a strength that grows from zero
    (Wang et al., Neural Pruning via Growing Regularization, 2021, algorithm 1; groups as in Fang et al., DepGraph,
    2023). The model learns to do without them, and pruning it by magnitude afterwards costs little.

    Args:
        model: a plain model, which is trained; it stays as it is but for its gradients.
        prune: which units will go: `Prune(method="structured", ...)` with its amount, criterion, target and so on.
        program: `fxopt.capture(model, example_inputs)`, which shows what belongs together.
        steps: after how many calls of `step` the strength is whole.
        strength: of the penalty in the end, as of a weight decay that is added to gradients.

    Raises:
        UsageError: the pass is none for units, no unit would go, or the numbers are none.
    """

    def __init__(self, model: nn.Module, prune: Options, program: Program, steps: int, strength: float = 1.0) -> None:
        expect(prune, Options, "prune", "a pass: Prune(method='structured', ...)")
        expect(program, Program, "program", "what fxopt.capture(model, example_inputs) gives")
        expect(steps, int, "steps", "a whole number from 1")
        if prune.method != "structured":
            raise UsageError(f"method={prune.method} removes no units; give Prune(method='structured', ...)")
        if steps < 1 or not strength > 0:
            raise UsageError(f"steps={steps}, strength={strength}; give 1 step or more, and a strength above 0")
        self._gone = _gone(units_that_go(program, prune))
        if not any(indices for places in self._gone.values() for indices in places.values()):
            raise UsageError("no unit of this model would go, so nothing can be made sparse; see what prune refuses")
        self.model, self.steps, self.whole, self.done = model, steps, strength, 0

    @property
    def strength(self) -> float:
        """Return the strength of the penalty in the next step."""
        return self.whole * min(1.0, (self.done + 1) / self.steps)

    def step(self) -> None:
        """Add the penalty's gradient; call it between `backward()` and `optimizer.step()`."""
        for weight, part in self._parts():
            added = self.strength * weight.detach() * part
            weight.grad = added if weight.grad is None else weight.grad.add_(added)
        self.done += 1

    def share_left(self) -> float:
        """Return what the units that will go are of the norm of all weights that they are in; zero in the end."""
        sums = [(weight.detach().square() * part, weight.detach().square()) for weight, part in self._parts()]
        of_units, whole = (sum(float(each[number].sum()) for each in sums) for number in (0, 1))
        return (of_units / whole) ** 0.5 if whole else 0.0

    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter that is trained with ones where units will go."""
        found: list[tuple[Tensor, Tensor]] = []
        tensors = tensors_by_name(self.model)
        for name, places in self._gone.items():
            weight = tensors.get(name)
            if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
                continue
            if is_sharded(weight):
                raise UsageError(f"'{name}' is sharded; make units sparse before sharding")
            part = torch.zeros_like(weight, dtype=torch.bool)
            for dim, indices in places.items():
                part.index_fill_(dim, torch.tensor(indices, device=weight.device), 1)
            found.append((weight, part))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return how far it is, and which units will go: plain values, for a checkpoint."""
        gone = {name: {str(dim): list(each) for dim, each in places.items()} for name, places in self._gone.items()}
        return {"done": self.done, "steps": self.steps, "strength": self.whole, "gone": gone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, with the units of then. StateError: it is of another model."""
        if not isinstance(cast("object", state), Mapping) or set(self.state_dict()) - set(state):
            raise StateError(f"this is no state of a GroupSparsity, which has {', '.join(self.state_dict())}")
        other = sorted(set(state["gone"]) ^ set(self._gone))
        if other:
            raise StateError(f"the state is of another model: only one of them has units in '{other[0]}'")
        self.done, self.steps, self.whole = state["done"], state["steps"], state["strength"]
        self._gone = {name: {int(d): list(each) for d, each in of.items()} for name, of in state["gone"].items()}


def _gone(chosen: Sequence[Chosen]) -> dict[str, dict[int, list[int]]]:
    """Return the indices that will go, by the name of a tensor and its dimension."""
    found: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for each in chosen:
        for cut in each.group.cuts:
            stays = kept_indices(cut.units, each.kept)
            found[cut.tensor][cut.dim].update(set(range(len(cut.units))) - set(stays))
    return {name: {dim: sorted(indices) for dim, indices in places.items()} for name, places in found.items()}
