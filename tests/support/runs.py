"""Runs of passes over a program, without the copy and the record that a user's model gets."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from fxopt.passes.driver import Manager, Request, RunContext
from fxopt.passes.timing import TimeBudget
from fxopt.reporting import in_words
from fxopt.settings import Measure
from fxopt.tracing.program import Program


def manager_of(
    program: Program,
    *,
    check: bool = True,
    time: bool = True,
    budget: TimeBudget | None = None,
    trained: Collection[nn.Module] | None = None,
    **request: Any,
) -> Manager:
    """Return a manager that checks and times rewrites if told to; other options are those of a request."""
    asked = Request(in_words, verify=check, measure=Measure.YES if time else Measure.NO, **request)
    return Manager(RunContext.of(program, asked, budget or TimeBudget(), trained))
