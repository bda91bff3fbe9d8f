"""Make points: run a pipeline on the model, measure what the result costs, and what it is worth."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import api
from ..compat import all_modules
from ..errors import (
    FxoptError,
    GuardWarning,
    InputError,
    NothingDoneWarning,
    StateWarning,
    UnverifiedWarning,
    one_line,
)
from ..freed_memory import give_memory_back
from ..passes.contract import Pass
from ..passes.driver import copied
from ..passes.kinds import error_of
from ..passes.pipeline import chosen_passes
from ..passes.sites import Numerics
from ..passes.timing import (
    Interval,
    Runner,
    budget_clock,
    call_bytes,
    held_memory,
    memory_use,
    one_thread,
    time_candidates,
)
from ..reporting.wording import Left, left_alone, turned_away
from ..runtime.graphs import misses_in
from ..runtime.record import needed_record, record_of
from ..runtime.values import flatten
from ..tracing.examples import Inputs
from ..tracing.isolation import in_phase, preserved
from ..tracing.recording import copy_inputs
from ..transforms.comparing import number_of
from .form import form_of
from .points import Point
from .space import Choice

__all__ = ["Bench"]

_SECONDS, _ROUNDS = 0.5, 25
"""Each point is timed beside the original for so long, in so many rounds at least: an interval of a few percent."""
_WHILE = 0.1
"""So many seconds of calls show how much of the cores other programs have."""
_LEAST, _CALLS = 1.0, 40
"""`optimize` takes a second at the least, and as long as so many calls: for its checks and timing."""
_MOST_LEFT = 12
"""A point says of so many rewrites why they were not made."""
_LARGE = 4 * 2**20
"""Bytes of a model from which on its memory is worth a collection, which takes a tenth of a second."""


class Bench:
    """The model as it was given, and what it takes to measure others beside it.

    Args:
        model: it is copied; the copy is put in the mode of the search.
        calls: the example inputs.
        training: whether steps of training are measured.
        evaluate: the user's metric, or None.
        finetune: trains a model whose function was changed, or None.
        seed: of what verification draws.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[Inputs],
        *,
        training: bool,
        evaluate: Callable[[nn.Module], float] | None,
        finetune: Callable[[nn.Module], object] | None,
        seed: int,
    ) -> None:
        self.calls, self.training, self.seed = calls, training, seed
        self._evaluate, self._finetune = evaluate, finetune
        self.base = copied(model)
        if self.base.training != training:
            self.base.train(training)
        self._rows = sum(map(_rows, calls))
        self._expected = self._first_results()
        start = time.perf_counter()
        worth = {} if evaluate is None else {"metric": self._worth(self.base)}
        self.evaluate_seconds = time.perf_counter() - start
        self._runner = Runner(self.base, calls, training=training)
        timed = time_candidates({"before": self._runner}, seconds=_SECONDS, least_rounds=_ROUNDS)
        self._seconds = timed.seconds("before")
        with one_thread() if timed.in_one_thread else nullcontext():
            self._waiting = _seconds_by_the_clock(self._runner)
        self.original = Point(-1, "", {**self._costs(self.base, self._seconds), "error": 0.0, **worth})
        earlier = record_of(self.base)
        self._earlier = 0 if earlier is None else len(earlier.plan.pipeline)
        decided = () if earlier is None else earlier.plan.decisions
        self.earlier = tuple(dict.fromkeys(each.pass_name for each in decided if each.status == "applied"))
        """The passes that had rewritten the model before it was given."""
        self._measured: dict[str, dict[str, Any]] = {}
        """Form of a model -> what was measured of it: another pipeline that rewrites the same is not timed again."""
        self.states: dict[int, Mapping[str, Tensor]] = {}
        """Number of a point -> its weights, where they were trained."""

    @property
    def forward_seconds(self) -> float:
        """Return what all calls of the original take."""
        return self._seconds

    @property
    def trial_seconds(self) -> float:
        """Return about how long a trial takes by the clock: what `optimize` may take at least, and evaluating."""
        return self.evaluate_seconds + self._waiting * max(_LEAST, _CALLS * self._seconds)

    def recall(self, points: Iterable[Point]) -> None:
        """Take in points that were measured before: what rewrites the same is not measured again."""
        for point in points:
            if point.is_known and point.form and point.repeats is None:
                made = {"figures": point.figures, "interval": point.interval, "repeats": point.number}
                self._measured.setdefault(point.form, made)

    def point(
        self, number: int, pipeline: str, choice: Choice, unwanted: Callable[[Mapping[str, float]], str] = lambda _: ""
    ) -> Point:
        """Return the point of a pipeline. `unwanted` says of figures without a metric why that need not be known."""
        start = time.perf_counter()
        made: dict[str, Any] = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GuardWarning)  # `left` tells of it
                made = self._made(number, chosen_passes(pipeline) if pipeline else (), unwanted)
        except (FxoptError, RuntimeError) as error:
            made = {"reason": f"{type(error).__name__}: {one_line(error)}"}
        if self.original.figures["size"] > _LARGE:
            gc.collect()  # optimized models are in circles of references, and the next one needs their memory
            give_memory_back()
        return Point(number, pipeline, **made, seconds=time.perf_counter() - start, choice=dict(choice))

    def _made(
        self, number: int, passes: Sequence[Pass], unwanted: Callable[[Mapping[str, float]], str]
    ) -> dict[str, Any]:
        fast, finetuned = self._optimized(number, passes)
        record = needed_record(fast) if passes else None
        plan = None if record is None else record.plan.last(len(record.plan.pipeline) - self._earlier)
        left = [] if record is None else _said(left_alone(record))
        made: dict[str, Any] = {"plan": plan, "left": tuple(left[:_MOST_LEFT]), "finetuned": finetuned}
        if plan is None or all(each.status != "applied" for each in plan.decisions):
            return {**made, "figures": self.original.figures, "repeats": self.original.number}
        with in_phase(fast, self.training):
            results = self._results(fast)
            missed = _said(turned_away(misses_in(all_modules(fast))))
            made["left"] = tuple([*missed, *left][:_MOST_LEFT])
            made["form"] = "" if finetuned else form_of(fast, results)
            known = self._measured.get(made["form"])
            if known is not None:
                return {**made, **known}
            figures, interval = self._figures(fast, results)
        reason = "" if self._evaluate is None else unwanted(figures)
        if self._evaluate is not None and not reason:
            figures["metric"] = self._worth(fast)
        if made["form"] and not reason:
            self._measured[made["form"]] = {"figures": figures, "interval": interval, "repeats": number}
        return {**made, "figures": figures, "interval": interval, "reason": reason}

    def _figures(self, fast: nn.Module, results: Sequence[Any]) -> tuple[dict[str, float], tuple[float, float]]:
        """Return what a model costs and errs, and where the seconds of a call lie."""
        error = self._error(results)
        speed = self._speed(fast)
        interval = self._seconds / speed.high / len(self.calls), self._seconds / speed.low / len(self.calls)
        return {**self._costs(fast, self._seconds / speed.mid), "error": error}, interval

    def _optimized(self, number: int, passes: Sequence[Pass]) -> tuple[nn.Module, bool]:
        """Return the model after some passes; it is trained behind those that change what it computes."""
        if not passes:
            return self.base, False
        changing = [each for each in passes if each.numerics is Numerics.SEMANTIC]
        if self._finetune is None or not changing:
            return self._run(self.base, passes), False
        changed = self._run(self.base, changing)
        is_changed = any(each.status == "applied" for each in needed_record(changed).plan.last(len(changing)).decisions)
        if is_changed:
            self._train(changed)
            self.states[number] = self._trained_state(changed)
        rest = [each for each in passes if each not in changing]
        return (self._run(changed, rest) if rest else changed), is_changed

    def _trained_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights of a trained model by their original names, without what passes have added to them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StateWarning)
            names, trained = self.base.state_dict().keys(), api.state_dict(model)
        return {name: each.clone() for name, each in trained.items() if name in names}

    def _train(self, model: nn.Module) -> None:
        assert self._finetune is not None  # noqa: S101 - whoever calls this has looked
        model.train()
        try:
            self._finetune(model)
        except Exception as error:  # whatever the user's function raises
            raise InputError(f"finetune raised {type(error).__name__}: {one_line(error)}") from error
        model.train(self.training)

    def _run(self, model: nn.Module, passes: Sequence[Pass]) -> nn.Module:
        with warnings.catch_warnings():
            for expected in (NothingDoneWarning, UnverifiedWarning):
                warnings.simplefilter("ignore", expected)
            return api.optimize(model, list(passes), example_inputs=list(self.calls), seed=self.seed)

    def _speed(self, fast: nn.Module) -> Interval:
        runs = {"before": self._runner, "after": Runner(fast, self.calls, training=self.training)}
        return time_candidates(runs, seconds=_SECONDS, least_rounds=_ROUNDS).ratio("before", "after")

    def _costs(self, model: nn.Module, seconds: float) -> dict[str, float]:
        held = held_memory(model)
        if self.training:
            more, times = memory_use(model, self.calls).peak, {"training_step": seconds / len(self.calls)}
        else:
            more = call_bytes(model, self.calls)
            times = {"latency": seconds / len(self.calls), "throughput": self._rows / seconds}
        return {**times, "memory": float(held + more), "size": float(held)}

    def _first_results(self) -> list[Any]:
        try:
            return self._results(self.base)
        except FxoptError:
            raise
        except Exception as error:  # whatever the user's forward raises
            raise InputError(
                f"the model raised {type(error).__name__} on the example inputs: {one_line(error)}"
            ) from error

    def _results(self, model: nn.Module) -> list[Any]:
        with torch.no_grad(), in_phase(model, training=False), preserved(model):
            return [copy_inputs(call).run(model) for call in self.calls]

    def _error(self, results: Sequence[Any]) -> float:
        """Return how far results are off in evaluation, relative to the scale of each."""
        error = max(map(error_of, self._expected, results), default=0.0)
        if not math.isfinite(error):
            raise InputError("its results are not finite")
        return error

    def _worth(self, model: nn.Module) -> float:
        """Return the user's metric of a model in evaluation mode."""
        assert self._evaluate is not None  # noqa: S101 - whoever calls this has looked
        with in_phase(model, training=False):
            return number_of(self._evaluate, model, "evaluate")


def _seconds_by_the_clock(run: Runner) -> float:
    """Return how many seconds the clock shows for one that `optimize` counts: more if other programs have the cores."""
    start, counted = time.perf_counter(), budget_clock()
    with run.leaving_no_trace():
        while time.perf_counter() - start < _WHILE:
            run()
    return (time.perf_counter() - start) / counted()


def _said(left: Iterable[Left]) -> list[str]:
    return [f"{each.status} {each.what}: {each.reason}" for each in left]


def _rows(call: Inputs) -> int:
    """Return the rows of a call: the first size of its first tensor."""
    shapes = [each.shape for each in flatten((call.args, call.kwargs)).values() if isinstance(each, Tensor)]
    return next((shape[0] for shape in shapes if shape), 1)
