"""From what users give as passes to passes: names, text, values, classes and functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeGuard, cast

from torch import fx, nn

from ...errors import PipelineError, PlanError, UsageError
from ...runtime.record import Plan
from ...tracing.examples import is_input
from ..contract import FunctionPass, Pass
from .order import beside_presets, check_order
from .pipeline import parse, parse_groups

__all__ = ["PassLike", "asked_for", "chosen_passes", "refuse_unfit", "unfinished"]

_OPTIONS = re.compile(r"""\{(?:[^{}"']|'[^']*'|"[^"]*")*\}""")
PassLike = str | Pass | Callable[[fx.GraphModule], fx.GraphModule]
"""What one pass may be given as."""


def chosen_passes(passes: PassLike | Iterable[PassLike] | None, plan: Plan | None = None) -> tuple[Pass, ...]:
    """Return the passes that a user means, in an order that can be: without any, the plan's, or those of `inference`.

    What is listed beside a preset runs among its passes. Raises PlanError for an unknown pass or option of the plan,
    UsageError for what is no pass, or an order that cannot be.
    """
    if passes is None:
        passes = "inference" if plan is None else [pass_ for text in plan.pipeline for pass_ in _planned(text)]
    if is_input(passes):
        raise UsageError(
            f"passes is of type {type(passes).__name__}, which is an example input; give it by name: "
            "optimize(model, example_inputs=...)"
        )
    found = beside_presets([group for item in _listed(passes) for group in _meant(item)])
    check_order(found)
    return tuple(found)


def _planned(text: str) -> tuple[Pass, ...]:
    try:
        return parse(text)
    except PipelineError as error:
        raise PlanError(f"the plan names {text!r}: {error.message}") from error


def asked_for(passes: PassLike | Iterable[PassLike] | None) -> list[tuple[str, tuple[str, ...]]]:
    """Return each name that a user gave, and the passes that it stands for, as texts; of a preset several."""
    asked: list[tuple[str, tuple[str, ...]]] = []
    for item in _listed("inference" if passes is None else passes):
        groups = _meant(item)
        names = _OPTIONS.sub("", item).split(",") if isinstance(item, str) else [each[0].name for each in groups]
        asked += [(name.strip(), tuple(map(str, group))) for name, group in zip(names, groups, strict=False)]
    return asked


def _listed(passes: PassLike | Iterable[PassLike]) -> list[object]:
    single = isinstance(passes, (str, Pass)) or not isinstance(passes, Iterable)
    return [passes] if single else list(cast("Iterable[object]", passes))


def refuse_unfit(passes: Iterable[Pass], *, inplace: bool, trains: bool) -> None:
    """Raise UsageError for passes that cannot be asked for so: `inplace`, or where an optimizer `trains` the result."""
    for pass_ in passes:
        if inplace and pass_.finishes:
            raise UsageError(f"'{pass_.name}' works on a copy: leave inplace=True out, and use what optimize returns")
        if trains and not pass_.trainable:
            raise UsageError(
                f"pass '{pass_.name}' is for inference: nothing of it can be trained; leave optimizer= out"
            )


def unfinished(plan: Plan) -> Plan:
    """Return a plan without what it did to the finished model, which needs other processes; PlanError as `parse`."""
    return plan.without({step for step, text in enumerate(plan.pipeline) if any(p.finishes for p in _planned(text))})


def _meant(item: object) -> tuple[tuple[Pass, ...], ...]:
    """Return what each name in an item stands for."""
    if isinstance(item, str):
        return parse_groups(item)
    if isinstance(item, Pass):
        return ((item,),)
    if _is_pass_class(item):
        return ((item(),),)
    if callable(item) and not isinstance(item, (type, nn.Module)):
        return ((FunctionPass(cast("Callable[[fx.GraphModule], fx.GraphModule]", item)),),)
    shown = f": {item!r}" if isinstance(item, (int, float)) else ""
    raise UsageError(f"a pass is a name, a pass value or a function, not {type(item).__name__}{shown}")


def _is_pass_class(item: object) -> TypeGuard[type[Pass]]:
    return isinstance(item, type) and issubclass(item, Pass)
