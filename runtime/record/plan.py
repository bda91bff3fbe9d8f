"""The decisions behind an optimized model, as a versioned JSON file that can be read, kept and replayed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, cast

import torch

from ...errors import PlanError
from ...storage import as_path, write_atomically
from ...version import VERSION

__all__ = ["SCHEMA_VERSION", "STATUSES", "Decision", "Measured", "Plan"]

SCHEMA_VERSION = 1
"""Of the file; it grows when a key changes its meaning or goes, not when one is added."""

STATUSES = ("applied", "refused", "undone", "skipped")


@dataclass(frozen=True)
class Measured:
    """The figures of a decision that later decisions of the same run rest on; None or "" where there are none."""

    speedup: float | None = None  # how many times faster it is
    speedup_low: float | None = None  # at least, with 95% confidence
    before_us: float | None = None  # microseconds of a call
    after_us: float | None = None
    precision_error: float | None = None  # what verification found, relative to the scale
    untimed: str = ""  # why it was not timed, though it is for speed
    follows: str = ""  # the label of the equal group whose decision it takes; `as` among the figures

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Measured:
        """Read figures as plans have them."""
        return cls(**{name: figures[key] for name, key in _measured_keys().items() if key in figures})

    def figures(self) -> dict[str, Any]:
        """Return what is there as plans have it."""
        known = {key: getattr(self, name) for name, key in _measured_keys().items()}
        return {key: value for key, value in known.items() if value is not None and value != ""}

    @property
    def saved_us(self) -> float | None:
        """Return the microseconds that a call takes less; None where that was not timed."""
        return None if self.before_us is None or self.after_us is None else self.before_us - self.after_us

    @property
    def saved_per_error(self) -> float:
        """Return what is saved for the error that is made; where nothing was timed, only the error counts."""
        saved = 1.0 if self.saved_us is None else self.saved_us
        return saved / max(self.precision_error or 0.0, 1e-12)


def _measured_keys() -> dict[str, str]:
    """Return what figures are called in plans."""
    return {field.name: "as" if field.name == "follows" else field.name for field in fields(Measured)}


@dataclass(frozen=True)
class Decision:
    """What became of one site.

    Attributes:
        step: position of the pass in the pipeline, from 0.
        pass_name: the pass's name without its options.
        key: names the site, the same in every run on the same model; replaying looks it up.
        status: `applied`, `refused` by the pass, `undone` after a check or a measurement, or `skipped`.
        label: names the site for people.
        reason: one clause, why it was not applied; empty if it was.
        choice: the lowering taken, where there are several.
        detail: one clause about the site.
        figures: errors, times and ratios by name.
        site: where the site is and what was decided on there, where replaying must not look for it anew.
        cause: the kind of reason, `stage.code` as in `fxopt.Cause`; "" if it was applied.
        values: what led to it, plain values by name, where the driver decided.
        numerics, goal: what the pass promised and what it was for, with its options, each as its word; "" where a plan
            of an earlier release does not tell.
    """

    step: int
    pass_name: str
    key: str
    status: str
    label: str = ""
    reason: str = ""
    choice: str | None = None
    detail: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    site: Mapping[str, Any] | None = None
    numerics: str = ""
    goal: str = ""
    cause: str = ""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", str(self.cause))  # a plan holds plain values, not those of the compiler
        if self.status not in STATUSES:
            raise PlanError(f"a decision's status is one of {', '.join(STATUSES)}, not {self.status!r}")

    @property
    def measured(self) -> Measured:
        """Return those of the figures that the driver decides by."""
        return Measured.of(self.figures)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain JSON values; figures that are not finite become None."""
        return {name: _plain(getattr(self, name)) for name in _DECISION}


_OBJECT = cast("type[object]", dict) | None
_DECISION: Mapping[str, type | UnionType] = {
    "step": int, "pass_name": str, "key": str, "status": str, "label": str, "reason": str, "choice": str | None,
    "detail": str, "figures": dict, "site": _OBJECT, "numerics": str, "goal": str, "cause": str,
    "values": dict,
}  # fmt: skip
_LATER = frozenset({"site", "numerics", "goal", "cause", "values"})
"""What plans of the same version may lack."""


@dataclass(frozen=True)
class Plan:
    """Every decision of one optimization, in the order taken.

    Attributes:
        pipeline: the passes, each as text that parses back.
        phase: `train` or `eval`.
        decisions: one for each site.
        fxopt: the version of fxopt that decided.
        torch: the version of PyTorch that it ran on.
        schema_version: of the file format.
        optimizer_form: the form of the steps of an optimizer, "" if it stayed as it was; None where none was given.
    """

    pipeline: tuple[str, ...]
    phase: str
    decisions: tuple[Decision, ...] = ()
    fxopt: str = VERSION
    torch: str = str(torch.__version__)
    schema_version: int = SCHEMA_VERSION
    optimizer_form: str | None = None

    def check_passes(self, names: Sequence[str]) -> None:
        """Raise a PlanError where what was applied does not belong to passes of these names."""
        for decision in self.decisions:
            if decision.status == "applied" and list(names[decision.step : decision.step + 1]) != [decision.pass_name]:
                raise PlanError(
                    f"the plan is for other passes: '{decision.pass_name}' is number {decision.step + 1} in it, "
                    f"and here they are {', '.join(names) or 'none'}"
                )

    def extended(self, later: Plan) -> Plan:
        """Return the plan that does this one and then `later`."""
        moved = tuple(replace(decision, step=decision.step + len(self.pipeline)) for decision in later.decisions)
        return replace(later, pipeline=self.pipeline + later.pipeline, decisions=self.decisions + moved)

    def last(self, passes: int) -> Plan:
        """Return the part of the plan that its last passes, so many, decided on: `extended` undone."""
        before = len(self.pipeline) - passes
        moved = (
            replace(decision, step=decision.step - before) for decision in self.decisions if decision.step >= before
        )
        return replace(self, pipeline=self.pipeline[before:], decisions=tuple(moved))

    def without(self, steps: Collection[int]) -> Plan:
        """Return the plan without the passes of these numbers, and what they decided on."""
        kept = [step for step in range(len(self.pipeline)) if step not in steps]
        decisions = (replace(d, step=kept.index(d.step)) for d in self.decisions if d.step in kept)
        return replace(self, pipeline=tuple(self.pipeline[step] for step in kept), decisions=tuple(decisions))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file is replaced whole or, with an `OSError`, not at all."""
        write_atomically(as_path(path), json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan.

        Raises a PlanError, which says where, if the file cannot be read, is not a plan or is of a newer version.
        """
        where = f"plan '{as_path(path)}'"
        try:
            data: object = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except OSError as error:
            raise PlanError(f"cannot read {where}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{where} is not JSON: {error}") from error
        return cls.from_json(data, where)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {
            "schema_version": self.schema_version,
            "fxopt": self.fxopt,
            "torch": self.torch,
            "pipeline": list(self.pipeline),
            "phase": self.phase,
            "decisions": [decision.to_json() for decision in self.decisions],
            "optimizer_form": self.optimizer_form,
        }

    @classmethod
    def from_json(cls, data: object, where: str = "the plan") -> Plan:
        """Return the plan that `to_json` described; keys that are not known are passed over.
        Raises a PlanError, which says where, if the description is malformed or of a newer version.
        """
        given = _typed(data, dict, where)
        version = _field(given, "schema_version", int, where)
        if version != SCHEMA_VERSION:
            advice = "upgrade fxopt" if version > SCHEMA_VERSION else "make the plan again"
            raise PlanError(f"{where} is of version {version}, this fxopt reads version {SCHEMA_VERSION}; {advice}")
        phase = _field(given, "phase", str, where)
        if phase not in ("train", "eval"):
            raise PlanError(f"{where}: phase is 'train' or 'eval', not {phase!r}")
        pipeline = enumerate(_field(given, "pipeline", list, where))
        decisions = enumerate(_field(given, "decisions", list, where))
        return cls(
            pipeline=tuple(_typed(text, str, f"{where}: pipeline[{i}]") for i, text in pipeline),
            phase=phase,
            decisions=tuple(_decision(item, f"{where}: decisions[{i}]") for i, item in decisions),
            fxopt=_field(given, "fxopt", str, where),
            torch=_field(given, "torch", str, where),
            optimizer_form=_typed(given.get("optimizer_form"), str | None, f"{where}: optimizer_form"),
        )


def _decision(data: object, where: str) -> Decision:
    given = _typed(data, dict, where)
    present = {name: kind for name, kind in _DECISION.items() if name in given or name not in _LATER}
    values = {name: _field(given, name, kind, where) for name, kind in present.items()}
    try:
        return Decision(**values)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error


def _field(given: Mapping[str, Any], name: str, kind: type | UnionType, where: str) -> Any:
    if name not in given:
        raise PlanError(f"{where}: '{name}' is missing")
    return _typed(given[name], kind, f"{where}: {name}")


def _typed(value: object, kind: type | UnionType, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names: dict[object, str] = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}
        expected = names.get(kind, "an object or null" if kind is _OBJECT else "a string or null")
        raise PlanError(f"{where} must be {expected}, not {str(value)[:60]!r}")
    return value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: no NaN or infinity, no tuples, keys as strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in cast("list[Any]", value)]
    return value


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")
