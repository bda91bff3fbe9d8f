"""How much each unit of a group counts: by weights, norms, gradients, chance or the user's own word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ...errors import UsageError
from ...runtime.values import flatten, requires_grad, tensors_by_name
from ...tracing.examples import Inputs
from ...tracing.isolation import copied_module
from ...tracing.program import Program
from .dependency_groups import Cut, Group, choices_of
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
    gradients = _gradients(program, wanted)
    model = program.model

    def product(name: str, tensor: Tensor) -> Tensor:
        return (tensor.detach() * gradients[name]) if name in gradients else torch.zeros_like(tensor)

    # The change of the loss, to first order, where a unit's slices become zeros; slices of opposite sign cancel.
    return lambda _, group: _sums(model, group, product).abs()


def _routing(program: Program, wanted: Options) -> _Scorer:
    """Count how often each expert is chosen, on the user's batches or the example inputs."""
    batches, loss = wanted.data, cast("Any", wanted.loss)

    def run(model: nn.Module) -> None:
        for batch in batches or ():
            loss(model, batch)

    choices = choices_of(program, None if batches is None else run)

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


# -- gradients --------------------------------------------------------------------------------------------------------


def _gradients(program: Program, wanted: Options) -> dict[str, Tensor]:
    """Return the gradients of all parameters, summed over the batches; a copy of the model runs."""
    model = copied_module(program.model).requires_grad_(True)
    model.zero_grad()
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(wanted.seed)
        for loss in _losses(model, program, wanted):
            loss.backward()
    found = {name: tensor.grad for name, tensor in tensors_by_name(model).items() if tensor.grad is not None}
    if not found:
        raise UsageError("criterion=taylor: no gradient reached any parameter; give loss=, or example inputs")
    return found


def _losses(model: nn.Module, program: Program, wanted: Options) -> Iterable[Tensor]:
    """Yield the losses of the user's batches, or how large the outputs of the example calls are."""
    if wanted.data is not None:
        for batch in wanted.data:
            yield _scalar(cast("Any", wanted.loss)(model, batch))
        return
    if not program.whole_calls:
        raise UsageError("criterion=taylor needs example_inputs, or data= with loss=")
    for call in program.whole_calls:
        yield _scalar(_loss(model, call, wanted.loss))


def _loss(model: nn.Module, call: Inputs, loss: Any) -> Tensor:
    output = model(*call.args, **call.kwargs)
    if loss is not None:
        return loss(output)
    leaves = [leaf for leaf in flatten(output).values() if requires_grad(leaf)]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum() if leaves else torch.zeros(())


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError("loss= must give one number with a gradient")
    return loss
