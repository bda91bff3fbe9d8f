"""The search: what is tried, in which order, until when."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..compat import modules_by_name
from ..errors import UsageError, expect, positive_integer
from ..interrupts import interruptible
from ..layers.delegated import sum_of
from ..passes.driver import check_kind
from ..passes.sites import Goal, Phase
from ..progress_bar import progress_bar
from ..reporting.wording import counted, duration
from ..storage import as_path
from ..tracing.examples import check_whole, normalize_inputs
from .bench import Bench
from .demands import parse_bounds, parse_objective, parse_seconds
from .front import Front, load_state, save_state
from .points import Aim, Point
from .predictions import Predictions
from .sensitivity import Sensitivities, sensitivities, weighted
from .space import Choice, Space, pipeline_of
from .trials import Trials

if TYPE_CHECKING:
    from optuna.trial import Trial

__all__ = ["Search", "search"]

_LOG = logging.getLogger("fxopt")
_PROMISING = 8
"""So many combinations that are predicted to be good are tried before the sampler chooses."""
_MENDED = 2
"""Of a point that loses too much, so many with more of its layers left alone are tried."""
_CLEARLY = 0.95
"""What takes less than this part of another's time is faster beyond the noise of timing."""
_CHEAP = 1.0
"""A metric that takes less than a second is evaluated in any case: what it says guides the sampler."""
_SHARE_FOR_LAYERS = 0.1
"""Of the time: looking at layers one by one takes no more."""
_LITTLE = 0.5
"""A point that loses less than this part of what is allowed is tried with larger numbers."""
_BYTES, _LOSSES = ("memory", "size"), ("metric", "error")


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
            without gradients, and may change nothing. Without it, the error of the results on the example inputs says
            what is lost.
        minimize: less of `evaluate` is better: a loss.
        objective: `latency` (seconds a call), `throughput` (rows a second), `memory` (bytes held, and more in a call),
            `size` (bytes held), or `training_step` (seconds of a forward and a backward).
        constraints: figure -> what it may be: {"metric": "-1%", "memory": "500 MB", "latency": "20 ms", "error": 0.02}.
            A number with a sign and "%" is a change of what the original has; "<=" and ">=" may stand before others.
        time_budget: seconds, or a text such as "10 min". The trial that runs then is finished.
        trials: how many points are made at most; by default as many as there is time for.
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
    phase = Phase.TRAIN if parse_objective(objective) == "training_step" else Phase.EVAL
    for given, name in ((evaluate, "evaluate"), (finetune, "finetune")):
        if given is not None and not callable(given):
            raise UsageError(f"{name} is of type {type(given).__name__}; give a function that takes a model")
    expect(minimize, bool, "minimize", "True or False")
    positive_integer(seed, "seed", least=0)
    folder = None if storage is None else as_path(storage, "storage")
    most = None if trials is None else positive_integer(trials, "trials")
    calls = normalize_inputs(example_inputs, model)
    if not calls:
        raise UsageError("there are no example inputs, on which points are timed; give example_inputs=")
    check_whole(calls)
    bounds = parse_bounds(
        constraints, training=phase is Phase.TRAIN, minimize=minimize, has_metric=evaluate is not None
    )
    start, seconds = time.perf_counter(), parse_seconds(time_budget)
    bench = Bench(model, calls, training=phase is Phase.TRAIN, evaluate=evaluate, finetune=finetune, seed=seed)
    aim = Aim(objective, bounds, bench.original.figures, evaluate is not None, minimize)
    goals = {Goal.SPEED, *([Goal.MEMORY, Goal.SIZE] if _asks_for_bytes(aim) else [])}
    space = Space(phase, goals, _measured(bench, seconds), trains=finetune is not None)
    made = Trials(space, aim, of=_said(bench, objective, evaluate), folder=folder, seed=seed)
    return Search(bench, space, aim, made, folder=folder, deadline=start + seconds, most=most).run()


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


@dataclass
class Search:
    """Try points until the time is up, in the order of predictions, and without what they rule out."""

    bench: Bench
    space: Space
    aim: Aim
    trials: Trials
    folder: Path | None
    deadline: float
    most: int | None

    def run(self) -> Front:
        """Return what was found, also where Ctrl-C ends the search."""
        notes = self._notes_before()
        predictions = Predictions(self.space, self.aim)
        self.bench.recall(self.trials.points().values())
        for point in self.trials.points().values():
            predictions.learn(point)
        self.trials.plan(self.space.singles())
        made, were_planned, took = 0, False, list[float]()
        try:
            with progress_bar("fxopt: searching", self.most) as move:
                while (self.most is None or made < self.most) and self._has_time(took):
                    if not (were_planned or self.trials.are_planned):
                        self.trials.plan(self._combinations(predictions))
                        were_planned = True
                    chosen = self._chosen(predictions)
                    if chosen is None:
                        notes.append("every pipeline of the space was tried, or is predicted not to be better")
                        break
                    point = self._tried(*chosen)
                    predictions.learn(point)
                    took.append(point.seconds)
                    if were_planned:
                        self.trials.plan(self._further([point]))
                    if point.repeats is None:  # what rewrites the same as another point is none of its own
                        made += 1
                        move(1)
        except KeyboardInterrupt:
            notes.append(f"the search was stopped after {counted(made, 'trial')}")
        return self._front(notes)

    def _chosen(self, predictions: Predictions) -> tuple[Trial, Choice] | None:
        """Return what is tried next; None where nothing is left."""
        points = self.trials.points()
        near = [point.choice for point in self.aim.unbeaten(points.values())]
        return self.trials.next(near, lambda choice: self._ruled_out(choice, points, predictions))

    def _combinations(self, predictions: Predictions) -> list[Choice]:
        """Return what is tried once each choice was tried alone."""
        points = list(self.trials.points().values())
        return [*self._further(points), *self._mended(points), *predictions.promising(_PROMISING)]

    def _notes_before(self) -> list[str]:
        """Say what can be told beforehand: how many trials fit, and bounds that the original does not meet."""
        left, each = self.deadline - time.perf_counter(), self.bench.trial_seconds
        metric = self.bench.evaluate_seconds
        if left < each:
            takes = f", {duration(metric)} of it evaluate" if metric > each / 2 else ""
            raise UsageError(
                f"time_budget: one trial takes about {duration(each)}{takes}, and {duration(max(left, 0.0))} are left "
                "of it once the original is measured; give more"
            )
        notes: list[str] = []
        wanted, fit = len(self.space.singles()), left / each
        if fit < wanted and (self.most is None or self.most > fit):
            why = f"evaluate takes {duration(metric)}" if metric > each / 2 else f"a trial takes about {duration(each)}"
            notes.append(
                f"{why}, so about {counted(int(fit), 'trial')} fit into the time budget; {wanted} try each choice once"
            )
            _LOG.warning("%s", notes[-1])
        original = self.bench.original.figures
        lossy = [bound for bound in self.aim.lacks(original) if bound.name in _LOSSES]
        notes += [f"the original itself does not meet a constraint: {each.said(original, original)}" for each in lossy]
        return notes

    def _has_time(self, took: list[float]) -> bool:
        """Say whether another trial fits; the first one does."""
        typical = median(took) if took else 0.0
        return time.perf_counter() + typical / 2 < self.deadline

    def _tried(self, trial: Trial, choice: Choice) -> Point:
        """Return the point of a trial."""
        others = self.trials.points()
        try:
            with interruptible():
                point = self.bench.point(
                    trial.number, pipeline_of(choice), choice, lambda found: self._unwanted(found, others)
                )
        except KeyboardInterrupt:
            self.trials.forget(trial)
            raise
        _LOG.info("%s: %s", point.pipeline or "as it was", point.reason or dict(point.figures))
        if self.folder is not None and point.finetuned:
            save_state(self.folder, point.number, self.bench.states[point.number])
        self.trials.tell(trial, point)
        return point

    def _ruled_out(self, choice: Choice, others: Mapping[int, Point], predictions: Predictions) -> str:
        """Return why a point is not made, if so."""
        same = predictions.same_as(choice)
        if same is not None:
            return f"not made: predicted to rewrite the same as {pipeline_of(same) or 'nothing'!r}"
        refused = predictions.refused(choice)
        if refused is not None:
            return f"not made: {refused.pipeline!r} is refused already"
        beaten = predictions.beaten_by(choice, others)
        if beaten is not None:
            return f"not made: predicted to be beaten by {beaten.pipeline or 'the original'!r}"
        lossy = predictions.hopeless(choice)
        return "" if lossy is None else f"not made: {lossy.pipeline!r} loses far too much already"

    def _mended(self, points: Iterable[Point]) -> list[Choice]:
        """Return, of points that lose too much, what leaves their most sensitive layers alone."""
        wrong = [
            point for point in points
            if point.is_known and any(bound.name in _LOSSES for bound in self.aim.lacks(point.figures))
        ]  # fmt: skip
        return [choice for point in wrong for choice in self.space.keeping_more(point.choice)[:_MENDED]]

    def _further(self, points: Iterable[Point]) -> list[Choice]:
        """Return, of points that lose nothing, or little of what is allowed, what has larger numbers."""
        allowed = self.aim.allowed_loss
        most = _LITTLE * allowed if math.isfinite(allowed) else 0.0
        mild = [each for each in points if each.is_known and self.aim.loss(each.figures) <= most]
        return [choice for point in mild for choice in self.space.further(point.choice)]

    def _unwanted(self, figures: Mapping[str, float], others: Mapping[int, Point]) -> str:
        """Say why the metric of a point need not be known: another one is clearly better and nearer to the original."""
        if self.bench.evaluate_seconds < _CHEAP:
            return ""
        for other in others.values():
            is_good = other.is_known and self.aim.loss(other.figures) <= 0 and not self.aim.lacks(other.figures)
            is_better = is_good and self.aim.cost(other.figures) < _CLEARLY * self.aim.cost(figures)
            if is_better and other.figures["error"] < figures["error"]:
                return f"not evaluated: {other.pipeline or 'the original'!r} is better, errs less and loses nothing"
        return ""

    def _front(self, notes: list[str]) -> Front:
        points = self.trials.points()
        states = dict(self.bench.states)
        for number, point in points.items():
            if point.finetuned and number not in states and self.folder is not None:
                states[number] = load_state(self.folder, number)
        return Front(
            self.aim, self.bench.original, list(points.values()), notes=notes, states=states, model=self.bench.base,
            calls=self.bench.calls,
        )  # fmt: skip
