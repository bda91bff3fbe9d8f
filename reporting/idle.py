"""What was asked for and came to nothing: each pass or preset that changed nothing, and why."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import NothingDoneWarning, UnverifiedWarning

if TYPE_CHECKING:
    from ..passes.driver import Record
    from ..passes.pipeline import Decision

__all__ = ["in_one_line", "warn_of"]


_NO_PLACE = "it found no place for it in this model"


def warn_of(record: Record, asked: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Warn whoever called `optimize` of what nothing was compared for, and of what was asked for and changed nothing.

    The record keeps what the report does not say by its decisions.

    Args:
        record: of the optimized model.
        asked: each name that the user gave, and the passes that it stands for, as texts.
    """
    from .notes import in_fewer_bits, unverified

    said = list(dict.fromkeys(filter(None, (_said(record, name, texts) for name, texts in asked))))
    idle = "; ".join(said) or in_fewer_bits(record)
    for kind, text in ((UnverifiedWarning, unverified(record)), (NothingDoneWarning, idle)):
        if text:
            warnings.warn(text, kind, stacklevel=3)
    record.idle[:] = [each for each in said if each.endswith(_NO_PLACE) or "nothing was done" in each]


def _said(record: Record, name: str, texts: Sequence[str]) -> str:
    if name == "training" and record.plan.phase == "eval":
        return (
            "nothing was done for training: the model is in evaluation, and 'training' was run for inference; call "
            "model.train() first, or give phase='train'"
        )
    earlier, wanted = record.earlier_passes, set(texts)
    steps = {step for step, text in enumerate(record.plan.pipeline) if step >= earlier and text in wanted}
    mine = [decision for decision in record.plan.decisions if decision.step in steps]
    if not steps or any(decision.status == "applied" for decision in mine):
        return ""
    return f"{name} changed nothing: {_why(mine)}"


def _why(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return _NO_PLACE
    first, others = decisions[0], len(decisions) - 1
    return f"{first.reason} (at {first.label or '(root)'}{f', the first of {others + 1} places' if others else ''})"


@contextmanager
def in_one_line(*ignored: type[Warning]) -> Generator[None]:
    """Write each warning as one line to standard error, without the line of code that raised it; ignore some."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        sys.stderr.write(f"warning: {message}\n")

    with warnings.catch_warnings():
        for each in ignored:
            warnings.simplefilter("ignore", each)
        warnings.showwarning = show
        yield
