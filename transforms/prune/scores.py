"""How much each unit of a group counts: by weights, norms, gradients, chance or the user's own word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ...errors import UsageError
from ...runtime.values import tensors_by_name
from ...tracing.program import Program
from .dependency_groups import Cut, Group, choices_of
from .gradients import each_batch, summed_over_batches
from .options import Options, check_score

__all__ = ["NoScores", "scores_of_units"]


class NoScores(Exception):  # a signal between two modules, turned into a refusal by one
    """A group has nothing that its units can be judged by."""


def scores_of_units(program: Program, groups: Sequence[Group], wanted: Options) -> list[Tensor | NoScores]:
    """Return a score for each unit, of mean one in each group, float64 on the CPU; UsageError: they are not finite."""
    make = _given if wanted.scores is not None else _SCORERS[wanted.criterion]
    scorer = make(program, wanted)
    found: list[Tensor | NoScores] = []
    for number, group in enumerate(groups):
        try:
            found.append(_normalised(scorer(number, group), group))
        except NoScores as reason:
            found.append(reason)
    return found


_Scorer = Callable[[int, Group], Tensor]


def _normalised(scores: Tensor, group: Group) -> Tensor:
    if not scores.isfinite().all():
        raise UsageError(f"the scores of '{group.name}' are not finite: NaN or infinity is in its weights or scores")
    mean = float(scores.mean())
    return scores / mean if mean > 0 else scores


def _by_unit(values: Tensor, cut: Cut, size: int) -> Tensor:
    """Return the sum of a tensor's values over all slices of each unit."""
    others = [dim for dim in range(values.dim()) if dim != cut.dim]
    along = values.detach().double().cpu()
    along = along.sum(others) if others else along
    units = torch.tensor(cut.units)
    return torch.zeros(size, dtype=torch.float64).index_add_(0, units[units >= 0], along[units >= 0])


def _weights(model: nn.Module, group: Group) -> list[tuple[Cut, Tensor]]:
    """Return the weights whose slices a group cuts; biases and norms only where there is nothing else."""
    tensors = tensors_by_name(model)
    cuts = [(cut, tensors[cut.tensor]) for cut in group.cuts if isinstance(tensors[cut.tensor], nn.Parameter)]
    parameters = [(cut, tensor) for cut, tensor in cuts if tensor.is_floating_point()]
    return [(cut, tensor) for cut, tensor in parameters if tensor.dim() > 1] or parameters


def _sums(model: nn.Module, group: Group, of: Callable[[str, Tensor], Tensor]) -> Tensor:
    parts = [_by_unit(of(cut.tensor, tensor), cut, group.size) for cut, tensor in _weights(model, group)]
    if not parts:
        raise NoScores("none of its tensors is a weight that says how much a unit counts")
    return torch.stack(parts).sum(0)


def _magnitude(program: Program, wanted: Options) -> _Scorer:
    power = 1 if wanted.norm == "l1" else 2

    def size(_name: str, weight: Tensor) -> Tensor:
        return weight.detach().abs() ** power

    return lambda _, group: _sums(program.model, group, size) ** (1 / power)


def _batchnorm(program: Program, _wanted: Options) -> _Scorer:
    def score(_number: int, group: Group) -> Tensor:
        parts: list[Tensor] = []
        for cut in group.cuts:
            path, last = cut.tensor.rpartition(".")[::2]
            module = program.module(path)
            if isinstance(module, _BatchNorm) and last == "weight":
                parts.append(_by_unit(cast("Tensor", module.weight).detach().abs(), cut, group.size))
        if not parts:
            raise NoScores("no batch norm scales its units")
        return torch.stack(parts).mean(0)

    return score


def _random(_: Program, wanted: Options) -> _Scorer:
    def score(number: int, group: Group) -> Tensor:
        generator = torch.Generator().manual_seed(wanted.seed + number)
        return torch.rand(group.size, generator=generator, dtype=torch.float64)

    return score


def _taylor(program: Program, wanted: Options) -> _Scorer:
    """Sum, batch by batch, by how much the loss would change without each weight, to first order.

    Molchanov et al., Importance Estimation for Neural Network Pruning, 2019, equation 8, with magnitudes for squares.
    A sum with signs would cancel: over batches, and over the weights of a unit, where the loss is at its lowest.
    """
    changes = summed_over_batches(program, wanted, lambda weight, gradient: (weight * gradient).abs())
    return lambda _, group: _sums(program.model, group, _named(changes))


def _named(values: Mapping[str, Tensor]) -> Callable[[str, Tensor], Tensor]:
    return lambda name, tensor: values[name] if name in values else torch.zeros_like(tensor)


def _routing(program: Program, wanted: Options) -> _Scorer:
    """Count how often each expert is chosen, on the user's batches or the example inputs."""
    loss = cast("Any", wanted.loss)

    def run(model: nn.Module) -> None:
        for _ in each_batch(wanted, lambda batch: loss(model, batch)):
            pass

    choices = choices_of(program, None if wanted.data is None else run)

    def score(_: int, group: Group) -> Tensor:
        if group.router is None:
            raise NoScores("criterion=routing counts the tokens of experts, and these are none")
        routing = choices.routings.get(group.router.place, {}).get(group.size)
        if routing is None:
            raise NoScores("no token was routed to its experts in the run")
        return routing.counts.double()

    return score


def _given(program: Program, wanted: Options) -> _Scorer:
    scores = wanted.scores

    def of(name: str, tensor: Tensor) -> Tensor:
        if isinstance(scores, Mapping):
            return cast("Mapping[str, Tensor]", scores).get(name, torch.zeros_like(tensor))
        return check_score(f"what scores= gives for '{name}'", _asked(scores, name, tensor), tensor)

    def score(_: int, group: Group) -> Tensor:
        if isinstance(scores, Mapping) and not any(cut.tensor in scores for cut in group.cuts):
            raise NoScores("no scores were given for it")
        return _sums(program.model, group, of)

    return score


def _asked(scores: Any, name: str, tensor: Tensor) -> Any:
    """Return what the user's function says of a weight."""
    try:
        return scores(name, tensor.detach())
    except Exception as error:  # whatever it raises
        raised = f"{type(error).__name__}: {error}"
        raise UsageError(f"pass 'prune': the function scores= raises for '{name}': {raised}") from error


_SCORERS: dict[str, Callable[[Program, Options], _Scorer]] = {
    "magnitude": _magnitude, "batchnorm": _batchnorm, "taylor": _taylor, "random": _random,
    "routing": _routing,
}  # fmt: skip
