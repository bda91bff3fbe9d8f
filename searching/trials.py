"""Which point is tried next: a study of optuna, in memory or in a folder that several processes share."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import math
import random
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, UsageError, one_line
from .groups import Group, Option
from .points import Aim, Point
from .space import Choice, Space, can_be, key_of, pipeline_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

__all__ = ["Trials", "check_optuna"]

_NO_OPTUNA = 'a search needs optuna; install it with: pip install "fxopt[search]"'
_POINT, _OF = "point", "of"
_NAME = "fxopt"
_FIXED = "fixed_params"
"""Where optuna keeps what a planned trial will be."""
_SEEDS = 2**32
"""Samplers take so many seeds."""
_STALE = timedelta(minutes=10)
"""A trial that began earlier is taken for that of a process that has died."""
_OPENINGS, _PAUSE = 5, 0.3
"""A database is opened so often, with so many seconds between."""
_TRIES = 8
"""After so many choices that were tried already, or cannot be, any other one is taken."""
_MOST = 2000
"""So many others are looked at: where all of these are ruled out, the search is at its end."""


class Trials:
    """The points that were tried, and the choice of the next.

    Args:
        of: what is searched, and for what: a folder is of one search.
        folder: where trials are kept; None: nowhere.
    """

    def __init__(self, space: Space, aim: Aim, *, of: str, folder: Path | None, seed: int) -> None:
        self._space, self._aim = space, aim
        self._random = random.Random(seed)  # noqa: S311 - it hides no secret
        with _quiet():
            self._study = _opened(f"{of}, choices {_digest(space)}", folder, seed)
        self._tried: set[tuple[str, ...]] = set()
        self._impossible: set[tuple[str, ...]] = set()
        self._all = self._shuffled(space.all())
        self._points: dict[int, Point] = {}
        self.points()

    def points(self) -> dict[int, Point]:
        """Return every point that was tried, by number, those of other processes too."""
        for trial in self._study.get_trials(deepcopy=False):
            if _POINT in trial.user_attrs and trial.number not in self._points:
                point = Point.from_json(json.loads(trial.user_attrs[_POINT]), f"trial {trial.number}")
                self._points[trial.number] = point
                self._tried.add(key_of(point.choice))
        return dict(sorted(self._points.items()))

    def plan(self, choices: Iterable[Choice]) -> None:
        """Let these be tried next, in this order; those that were tried, or are planned, are passed over."""
        with _quiet():
            planned = [trial.system_attrs[_FIXED] for trial in self._waiting()] + self._running()
            for choice in filter(self._is_new, choices):
                parameters = self._parameters(choice)
                if parameters not in planned:
                    self._study.enqueue_trial(parameters)
                    planned.append(parameters)

    @property
    def are_planned(self) -> bool:
        """Say whether something is planned that was not tried yet."""
        return bool(self._waiting())

    def next(
        self, near: Sequence[Choice] = (), ruled_out: Callable[[Choice], str] = lambda _: ""
    ) -> tuple[Trial, Choice] | None:
        """Return what is to be tried; None where nothing is left. What is planned comes first, then what the sampler
        proposes. Where that is not new, it is something that differs in one choice from what is given as `near`, or
        else anything. `ruled_out` says why a choice is not to be tried.
        """
        tries = _TRIES
        while tries or self.are_planned:
            tries -= not self.are_planned
            with _quiet():
                trial, choice = self._asked()
            self.points()  # those that other processes have told by now
            if choice is None or not self._is_new(choice) or trial.params in self._running(trial):
                self.forget(trial)
                continue
            self._tried.add(key_of(choice))
            reason = ruled_out(choice)
            if not reason:
                return trial, choice
            self.tell(trial, Point(trial.number, pipeline_of(choice), reason=reason, choice=dict(choice)))
        others = filter(self._is_new, itertools.chain(self._shuffled(self._space.near(near)), self._all))
        running = self._running()  # another process may be trying the last that is left
        free = (choice for choice in itertools.islice(others, _MOST) if self._parameters(choice) not in running)
        left = next((choice for choice in free if not ruled_out(choice)), None)
        if left is None:
            return None
        self.plan([left])
        return self.next(near, ruled_out)

    def _waiting(self) -> list[FrozenTrial]:
        from optuna.trial import TrialState

        return self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))

    def _running(self, before: Trial | None = None) -> list[dict[str, Any]]:
        """Return what is being tried now, in any process, and was begun before a trial."""
        from optuna.trial import TrialState

        first, now = datetime.now() - _STALE, datetime.now()
        last = (now, math.inf) if before is None else (before.datetime_start or now, before.number)
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [each.params for each in running if first < (each.datetime_start or now) and _begun(each, now) < last]

    def tell(self, trial: Trial, point: Point) -> None:
        """Note what became of a trial."""
        from optuna.trial import TrialState

        trial.set_user_attr(_POINT, json.dumps(point.to_json()))
        with _quiet():
            if not point.is_known:
                self._study.tell(trial, state=TrialState.FAIL)
                return
            for bound in self._aim.bounds:
                trial.set_constraint(bound.name, bound.lack(point.figures, self._aim.original))
            self._study.tell(trial, [self._aim.cost(point.figures), self._aim.loss(point.figures)])

    def forget(self, trial: Trial) -> None:
        """Take back a trial that was interrupted, so that it can be tried again."""
        from optuna.trial import TrialState

        with _quiet():
            self._study.tell(trial, state=TrialState.FAIL)

    def _shuffled(self, choices: Iterable[Choice]) -> list[Choice]:
        every = list(choices)
        return self._random.sample(every, len(every))

    def _is_new(self, choice: Choice) -> bool:
        """Say whether a choice was not tried yet, and can be."""
        key = key_of(choice)
        if key in self._tried or key in self._impossible:
            return False
        if not can_be(choice):
            self._impossible.add(key)
            return False
        return True

    def _asked(self) -> tuple[Trial, Choice | None]:
        trial = self._study.ask()
        texts = {name: _text(trial, group) for name, group in self._space.groups.items()}
        choice = {name: text for name, text in texts.items() if text is not None}
        return trial, choice if len(choice) == len(texts) else None

    def _parameters(self, choice: Choice) -> dict[str, Any]:
        """Return what optuna is told that a choice is."""
        found: dict[str, Any] = {}
        for name, group in self._space.groups.items():
            if not group.options:
                found[name] = choice[name]
                continue
            found[name] = bool(choice[name])
            for (key, option), value in zip(group.options.items(), group.values_of(choice[name]), strict=False):
                found[f"{name}.{key}"] = option.texts.index(value) if option.is_ordered else value
        return found


def _begun(trial: FrozenTrial, now: datetime) -> tuple[datetime, float]:
    return trial.datetime_start or now, trial.number


def _text(trial: Trial, group: Group) -> str | None:
    """Return what a trial chooses of a group; None if its options do not go together."""
    if not group.options:
        return str(trial.suggest_categorical(group.name, group.texts))
    if not trial.suggest_categorical(group.name, (False, True)):
        return ""
    values = tuple(_value(trial, f"{group.name}.{name}", option) for name, option in group.options.items())
    return group.by_options.get(values)


def _value(trial: Trial, name: str, option: Option) -> str:
    if option.is_ordered:
        return option.texts[trial.suggest_int(name, 0, len(option.texts) - 1)]
    return str(trial.suggest_categorical(name, option.texts))


def _opened(of: str, folder: Path | None, seed: int) -> Study:
    import optuna

    storage = None
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            storage = f"sqlite:///{(folder / 'trials.sqlite').resolve()}"
        study = _created(storage)
        done = len(study.get_trials(deepcopy=False))
        if study.user_attrs.setdefault(_OF, of) != of:
            raise UsageError(
                f"storage={str(folder)!r} holds another search ({study.user_attrs[_OF]}); name a new folder"
            )
        study.set_user_attr(_OF, of)
    except UsageError:
        raise
    except Exception as error:  # of optuna, alembic or sqlalchemy: a file that is none of theirs
        said = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"storage={str(folder)!r} cannot be used: {said}; name another folder") from error
    study.sampler = optuna.samplers.TPESampler(seed=(seed + done) % _SEEDS)
    return study


def _created(storage: str | None) -> Study:
    """Return the study of a database; where several processes make its tables at once, late ones try again."""
    import optuna
    from sqlalchemy.exc import IntegrityError, OperationalError

    make = partial(
        optuna.create_study, storage=storage, study_name=_NAME, load_if_exists=True, directions=["minimize", "minimize"]
    )
    for _ in range(_OPENINGS - 1):
        with suppress(IntegrityError, OperationalError):
            return make()
        time.sleep(_PAUSE)
    return make()


def _digest(space: Space) -> str:
    """Tell spaces apart: optuna takes no other words for a choice within a study."""
    words = {
        name: {key: option.texts for key, option in group.options.items() if not option.is_ordered} or group.texts
        for name, group in space.groups.items()
    }
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]


def check_optuna() -> None:
    """Raise UsageError where optuna is missing."""
    try:
        importlib.import_module("optuna")
    except ImportError as error:
        raise UsageError(_NO_OPTUNA) from error


@contextmanager
def _quiet() -> Generator[None]:
    """Keep optuna from telling of each trial, and of what it calls experimental."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
