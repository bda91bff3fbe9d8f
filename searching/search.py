"""The public call: what a user gives becomes a bench, an aim, a space and trials, and a search over them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..compat import modules_by_name
from ..errors import UsageError, expect, positive_integer
from ..layers.delegated import sum_of
from ..passes.driver import check_kind
from ..passes.sites import Goal, Phase
from ..storage import as_folder
from ..tracing.examples import check_whole, normalize_inputs
from .bench import Bench
from .course import Search
from .demands import Demands
from .front import Front
from .points import Aim
from .sensitivity import Sensitivities, sensitivities, weighted
from .space import Space
from .trials import Trials, check_optuna

__all__ = ["search"]

_SHARE_FOR_LAYERS = 0.1
"""Of the time: looking at layers one by one takes no more."""
_BYTES = ("memory", "size")


def search(
    model: nn.Module,
    *,
    example_inputs: object,
    evaluate: Callable[[nn.Module], float] | None = None,
    minimize: bool = False,
    objective: str = "latency",
    constraints: Mapping[str, float | str] | None = None,
    time_budget: float | str = "10 min",
    trials: int | None = None,
    finetune: Callable[[nn.Module], object] | None = None,
    storage: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Front:
    """Find the pipelines by which a model is best in an objective for what is lost.

    Tried are presets with their options, and the options that passes name (`Pass.searched`), alone and together. Every
    point is optimized by `fxopt.optimize`, so rewrites are checked, and timed beside the original. Each choice is tried
    alone first. Combinations that are predicted to be beaten are left out. Ctrl-C ends the search with what it has.

    Args:
        model: any module; it is left untouched.
        example_inputs: as for `optimize`; points are timed and compared on them.
        evaluate: takes a model in evaluation mode and returns a number, larger for better: accuracy, say. It is called
            without gradients, and may change nothing. Without it, the distance of the results on the example inputs
            from the original's, their error, is the metric.
        minimize: less of `evaluate` is better: a loss.
        objective: `latency` (seconds a call), `throughput` (rows a second), `memory` (bytes held, and more in a call),
            `size` (bytes held), or `training_step` (seconds of a forward and a backward).
        constraints: figure -> what it may be: {"metric": "-1%", "memory": "500 MB", "latency": "20 ms", "error": 0.02}.
            A number with a sign and "%" is a change of what the original has; "<=" and ">=" may stand before others.
            Without `evaluate`, "-1%" of the metric allows an error of 0.01, and no other bound of it has a meaning.
        time_budget: seconds, or a text such as "10 min". The trial that runs then is finished.
        trials: how many trials are made at most, counted in this call, without those that rewrite the same as another;
            by default as many as there is time for.
        finetune: trains a model in place, which is in training mode; called for points that are pruned, or rounded in
            training (`qat`).
        storage: a folder for the trials. A search goes on from it, and several processes may search in it together.
        seed: of what is chosen, and of what verification draws.

    Raises:
        UsageError: a wrong argument; a time budget shorter than one trial; optuna is not installed.
        InputError: the model refuses its inputs, or `evaluate` raises, returns no number for the original, or changes
            parameters.
    """
    check_kind(model)
    for given, name in ((evaluate, "evaluate"), (finetune, "finetune")):
        if given is not None and not callable(given):
            raise UsageError(f"{name} is of type {type(given).__name__}; give a function that takes a model")
    expect(minimize, bool, "minimize", "True or False")
    demands = Demands.read(objective, constraints, time_budget, minimize=minimize, has_metric=evaluate is not None)
    positive_integer(seed, "seed", least=0)
    folder = None if storage is None else as_folder(storage, "storage")
    most = None if trials is None else positive_integer(trials, "trials")
    check_optuna()
    calls = normalize_inputs(example_inputs, model)
    if not calls:
        raise UsageError("there are no example inputs, on which points are timed; give example_inputs=")
    check_whole(calls)
    start, phase = time.perf_counter(), Phase.TRAIN if demands.training else Phase.EVAL
    bench = Bench(model, calls, training=demands.training, evaluate=evaluate, finetune=finetune, seed=seed)
    aim = Aim(objective, demands.bounds, bench.original.figures, evaluate is not None, minimize)
    goals = {Goal.SPEED, *([Goal.MEMORY, Goal.SIZE] if _asks_for_bytes(aim) else [])}
    layers = _measured(bench, demands.seconds)
    space = Space(phase, goals, layers, error=aim.limit("error"), trains=finetune is not None)
    made = Trials(space, aim, of=_said(bench, objective, evaluate), folder=folder, seed=seed)
    return Search(bench, space, aim, made, folder=folder, deadline=start + demands.seconds, most=most).run()


def _measured(bench: Bench, seconds: float) -> Sensitivities | None:
    """Return how sensitive layers are, where there is time for it."""
    layers = len(weighted(bench.base))
    if bench.training or 2 * layers * bench.forward_seconds > _SHARE_FOR_LAYERS * seconds:
        return None
    return sensitivities(bench.base, bench.calls)


def _asks_for_bytes(aim: Aim) -> bool:
    return any(name in _BYTES for name in (aim.objective, *(bound.name for bound in aim.bounds)))


def _said(bench: Bench, objective: str, evaluate: object) -> str:
    """Say what is searched: a folder holds one search."""
    model, weights = bench.base, 0
    with suppress(RuntimeError):  # of tensors that are not in one piece
        weights = sum_of([each.detach().cpu() for each in (*model.parameters(), *model.buffers())])
    count = sum(each.numel() for each in model.parameters())
    kinds = len(modules_by_name(model))
    metric = (
        f"the metric {getattr(evaluate, '__qualname__', type(evaluate).__name__)}"
        if evaluate is not None
        else "the error"
    )
    given = pytree.tree_leaves([(call.args, call.kwargs) for call in bench.calls])
    called = f"called with {', '.join(str(list(each.shape)) for each in given if isinstance(each, Tensor))}"
    of = f"{type(model).__name__} of {kinds} modules and {count} parameters ({weights:08x})"
    return f"{of}, {called}, {objective} for {metric}"
