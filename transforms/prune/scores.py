"""How much each weight, or each unit of a group, counts: the criteria, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ...errors import UsageError
from ...runtime.values import tensors_by_name
from ...tracing.program import Program
from .batches import gradients_of_batches, input_norms, run_batches
from .blocks import influences
from .dependency_groups import Cut, Group, choices_of
from .masks import layer_adaptive
from .options import Options, check_score

__all__ = ["CRITERIA", "Criterion", "NoScores", "check_criterion", "scores_of_units"]


class NoScores(Exception):  # a signal between two modules, turned into a refusal by one
    """A group has nothing that its units can be judged by."""


def scores_of_units(program: Program, groups: Sequence[Group], wanted: Options) -> list[Tensor | NoScores]:
    """Return a score for each unit, of mean one in each group unless the criterion compares groups itself.

    Scores are float64 on the CPU. UsageError: they are not finite.
    """
    criterion = CRITERIA[wanted.criterion] if wanted.scores is None else Criterion(_given)
    scorer = cast("_Units", criterion.units)(program, wanted, groups)
    found: list[Tensor | NoScores] = []
    for number, group in enumerate(groups):
        try:
            found.append(_checked(scorer(number, group), group, normalised=not criterion.is_relative))
        except NoScores as reason:
            found.append(reason)
    return found


_Scorer = Callable[[int, Group], Tensor]
_Values = Callable[[str, Tensor], Tensor]
_Units = Callable[[Program, Options, Sequence[Group]], _Scorer]


@dataclass(frozen=True)
class Criterion:
    """What units, or single weights, are judged by; None where they cannot be.

    Attributes:
        units: gives, for groups, what scores the units of one of them, by its number.
        weights: gives what scores each element of a weight, by its name.
        runs: it runs the model, on the user's batches or the example inputs.
        is_relative: scores of different groups are compared as they are.
    """

    units: _Units | None
    weights: Callable[[Program, Options], _Values] | None = None
    runs: bool = False
    is_relative: bool = False

    def judges(self, method: str) -> bool:
        """Say whether it judges what a method prunes: units, or single weights."""
        return (self.units if method == "structured" else self.weights) is not None


def check_criterion(wanted: Options) -> None:
    """Raise UsageError where a criterion does not go with the method, or has not what it needs to run the model."""
    criterion, name, loss, data = CRITERIA[wanted.criterion], wanted.criterion, wanted.loss, wanted.data
    if not criterion.judges(wanted.method):
        able = [n for n, each in CRITERIA.items() if each.judges(wanted.method)]
        raise UsageError(f"pass 'prune': method={wanted.method} has no criterion={name}; it has {', '.join(able)}")
    if wanted.schedule != "one_shot" and criterion.runs:
        raise UsageError(f"pass 'prune': criterion={name} runs the model now, a schedule ranks later; leave one out")
    if loss is not None and not callable(loss):
        raise UsageError(f"pass 'prune': loss={loss!r}; give a function")
    if (loss is not None or data is not None) and not criterion.runs:
        able = [n for n, each in CRITERIA.items() if each.runs]
        raise UsageError(f"pass 'prune': loss= and data= are for criterion={', '.join(able)}; leave them out")
    if name in ("routing", "wanda", "influence") and loss is not None and data is None:
        raise UsageError(f"pass 'prune': loss= of criterion={name} runs the model on batches; give these as data=")
    if data is not None and loss is None:
        raise UsageError("pass 'prune': data= needs loss=, a function of the model and a batch")


def _checked(scores: Tensor, group: Group, *, normalised: bool) -> Tensor:
    if not scores.isfinite().all():
        raise UsageError(f"the scores of '{group.name}' are not finite: NaN or infinity is in its weights or scores")
    mean = float(scores.mean())
    return scores / mean if mean > 0 and normalised else scores


_NO_WEIGHT = "none of its tensors is a weight that says how much a unit counts"


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
        raise NoScores(_NO_WEIGHT)
    return torch.stack(parts).sum(0)


def _sizes(_program: Program, _wanted: Options) -> _Values:
    return lambda _, weight: weight.detach().abs()  # squares would rank them alike


def _magnitude(program: Program, wanted: Options, _groups: Sequence[Group]) -> _Scorer:
    power = 1 if wanted.norm == "l1" else 2

    def size(_name: str, weight: Tensor) -> Tensor:
        return weight.detach().abs() ** power

    return lambda _, group: _sums(program.model, group, size) ** (1 / power)


def _shares(_program: Program, _wanted: Options) -> _Values:
    return lambda _, weight: layer_adaptive(weight)


def _lamp(program: Program, wanted: Options, groups: Sequence[Group]) -> _Scorer:
    magnitude = _magnitude(program, wanted, groups)
    return lambda number, group: layer_adaptive(magnitude(number, group))


_ROWS = 256
"""Distances of so many units are computed at once."""


def _fpgm(program: Program, _wanted: Options, _groups: Sequence[Group]) -> _Scorer:
    """Sum the distances of a unit's weights to those of all others of its group: near the middle others stand for it.

    He et al., Filter Pruning via Geometric Median, 2019, equation 6; here over all slices of a unit.
    """

    def score(_number: int, group: Group) -> Tensor:
        parts = [_slices(tensor, cut, group.size) for cut, tensor in _weights(program.model, group)]
        if not parts:
            raise NoScores(_NO_WEIGHT)
        units = torch.cat(parts, 1)
        return torch.cat([torch.cdist(some, units).sum(1) for some in torch.split(units, _ROWS)]).double()

    return score


def _slices(tensor: Tensor, cut: Cut, size: int) -> Tensor:
    """Return all values of each unit in a tensor: [units, values]."""
    units = torch.tensor(cut.units)
    order = torch.argsort(units, stable=True)[(units < 0).sum() :]
    if not bool((units[units >= 0].bincount(minlength=size) == len(order) // size).all()):
        raise NoScores("its units have slices of different sizes, between which there is no distance")
    return tensor.detach().float().cpu().movedim(cut.dim, 0).index_select(0, order).reshape(size, -1)


def _batchnorm(program: Program, _wanted: Options, _groups: Sequence[Group]) -> _Scorer:
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


def _random(_: Program, wanted: Options, _groups: Sequence[Group]) -> _Scorer:
    def score(number: int, group: Group) -> Tensor:
        generator = torch.Generator().manual_seed(wanted.seed + number)
        return torch.rand(group.size, generator=generator, dtype=torch.float64)

    return score


def _taylor(program: Program, wanted: Options) -> _Values:
    """Sum, batch by batch, by how much the loss would change without each weight, to first order.

    Molchanov et al., Importance Estimation for Neural Network Pruning, 2019, equation 8, with magnitudes for squares.
    A sum with signs would cancel over batches, where the loss is at its lowest.
    """
    return _summed_over_batches(program, wanted, torch.abs)


def _taylor_of_units(program: Program, wanted: Options, groups: Sequence[Group]) -> _Scorer:
    """Sum the squares of what the loss of each batch would change by without each unit, to first order.

    Molchanov et al., 2019, equations 7 and 8: the weights of a unit go together, so they are summed with their signs.
    """
    found = [torch.zeros(group.size, dtype=torch.float64) for group in groups]
    weights = [_weights(program.model, group) for group in groups]
    for batch in gradients_of_batches(program, wanted):
        for total, group, mine in zip(found, groups, weights, strict=True):
            pairs = [(cut, batch[cut.tensor]) for cut, _ in mine if cut.tensor in batch]
            parts = [_by_unit(weight * gradient, cut, group.size) for cut, (weight, gradient) in pairs]
            total += torch.stack(parts).sum(0).square() if parts else 0

    def score(number: int, _: Group) -> Tensor:
        if not weights[number]:
            raise NoScores(_NO_WEIGHT)
        return found[number]

    return score


def _hessian(program: Program, wanted: Options) -> _Values:
    """Give by how much the loss would rise without each weight, to second order: half its square times its curvature.

    LeCun et al., Optimal Brain Damage, 1990, equation 5. The diagonal of the Hessian is taken from squared gradients of
    batches: Theis et al., Faster gaze prediction with dense networks and Fisher pruning, 2018, equation 7.
    """
    return _summed_over_batches(program, wanted, lambda change: change.square() / 2)


def _summed_over_batches(program: Program, wanted: Options, of: Callable[[Tensor], Tensor]) -> _Values:
    """Sum over batches what is made of the first-order change of each weight; 0 where no gradient reaches one."""
    sums: dict[str, Tensor] = {}
    for batch in gradients_of_batches(program, wanted):
        for name, (weight, gradient) in batch.items():
            value = of(weight * gradient)
            sums[name] = sums[name] + value if name in sums else value
    return lambda name, tensor: sums[name] if name in sums else torch.zeros_like(tensor)


def _wanda(program: Program, wanted: Options) -> _Values:
    """Give the size of each weight times the norm of the inputs that it meets.

    Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2023, equation 1. In layers that do
    not run it is the size alone.
    """
    norms = input_norms(program, wanted)
    return lambda name, weight: weight.detach().abs() * norms[name] if name in norms else weight.detach().abs()


def _summed(weights: Callable[[Program, Options], _Values]) -> _Units:
    """Return what judges a unit by the sum over its weights."""

    def make(program: Program, wanted: Options, _groups: Sequence[Group]) -> _Scorer:
        of = weights(program, wanted)
        return lambda _, group: _sums(program.model, group, of)

    return make


def _routing(program: Program, wanted: Options, _groups: Sequence[Group]) -> _Scorer:
    """Count how often each expert is chosen, on the user's batches or the example inputs."""
    choices = choices_of(program, None if wanted.data is None else partial(run_batches, wanted=wanted))

    def score(_: int, group: Group) -> Tensor:
        if group.router is None:
            raise NoScores("criterion=routing counts the tokens of experts, and these are none")
        routing = choices.routings.get(group.router.place, {}).get(group.size)
        if routing is None:
            raise NoScores("no token was routed to its experts in the run")
        return routing.counts.double()

    return score


def _influence(program: Program, wanted: Options, _groups: Sequence[Group]) -> _Scorer:
    def score(_: int, group: Group) -> Tensor:
        if not group.blocks:
            raise NoScores("criterion=influence compares what blocks are given and give, and these are none")
        return torch.tensor(influences(program, wanted, [name for name, _ in group.blocks]), dtype=torch.float64)

    return score


def _given(program: Program, wanted: Options, _groups: Sequence[Group]) -> _Scorer:
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


CRITERIA: Mapping[str, Criterion] = {
    "magnitude": Criterion(_magnitude, _sizes),
    "lamp": Criterion(_lamp, _shares, is_relative=True),
    "fpgm": Criterion(_fpgm),
    "batchnorm": Criterion(_batchnorm),
    "taylor": Criterion(_taylor_of_units, _taylor, runs=True),
    "hessian": Criterion(_summed(_hessian), _hessian, runs=True),
    "wanda": Criterion(None, _wanda, runs=True),
    "routing": Criterion(_routing, runs=True),
    "influence": Criterion(_influence, runs=True),
    "random": Criterion(_random),
}
"""Name -> what it judges, and how."""
