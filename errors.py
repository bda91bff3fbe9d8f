"""The whole exception taxonomy: every error fxopt raises on purpose is one of these."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = [
    "ArchiveError", "BudgetError", "CalibrationError", "CaptureError", "EngineWarning", "FusedMemberError",
    "FxoptError", "GuardError", "GuardWarning", "InputError", "MatchFailure", "ModeError", "NothingDoneWarning",
    "OrderError", "PassError", "PipelineError", "PlanError", "StateError", "StateWarning", "UnverifiedWarning",
    "UsageError", "VerificationError", "did_you_mean", "expect", "one_line", "positive_integer",
]  # fmt: skip


class FxoptError(Exception):
    """Base of all fxopt errors; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(FxoptError):
    """The request itself is wrong: an unknown name, option, type or combination."""

    exit_code = 2


class PipelineError(UsageError):
    """A pipeline string does not parse; the message shows the span at fault."""

    def __init__(self, message: str, text: str, start: int, end: int) -> None:
        caret = " " * start + "^" * max(1, end - start)
        super().__init__(f"{message}\n  {text}\n  {caret}")
        self.message = message
        self.text, self.start, self.end = text, start, end

    def __reduce__(self) -> tuple[object, ...]:
        return PipelineError, (self.message, self.text, self.start, self.end)


class OrderError(UsageError):
    """Two passes cannot run in the order asked for, or not together."""


class BudgetError(UsageError):
    """A budget that this model cannot be brought into; the message says what the least is."""


class InputError(FxoptError):
    """The model, its example inputs or a file cannot be used as given."""

    exit_code = 3


class ArchiveError(InputError):
    """A model cannot be saved as asked, or a saved one is unreadable, corrupt, too new or not trusted."""


class CalibrationError(InputError):
    """What a pass should calibrate on is missing, or the model does not take it."""


class PlanError(InputError):
    """A plan is unreadable, too new, or does not fit this model."""


class CaptureError(FxoptError):
    """A forward could not be captured; the message names the module, line and reason."""

    exit_code = 3


class GuardError(FxoptError):
    """A call does not meet what was assumed at capture, and no fallback is safe."""


class GuardWarning(UserWarning):
    """A call does not meet what was assumed at capture, and the module's original forward ran instead of a graph."""


class EngineWarning(UserWarning):
    """An engine cannot compute a region any more, or gives something else; the model's own operations run."""


class UnverifiedWarning(UserWarning):
    """Rewrites stand that nothing was compared for: there were no example inputs, or `verify` was off."""


class NothingDoneWarning(UserWarning):
    """A pass or preset that was asked for changed nothing, or nothing of what it is for; the message says why."""


class ModeError(FxoptError):
    """The model holds rewrites that are valid in evaluation mode only."""


class FusedMemberError(FxoptError):
    """A module that was fused or folded was replaced, removed, hooked or set up otherwise: nothing would notice."""


class StateWarning(UserWarning):
    """A state dict has zeros in the places of what a lossy pass cut away."""


class StateError(FxoptError):
    """A state dict or optimizer state does not fit and cannot be translated."""


class MatchFailure(FxoptError):
    """A rewrite found out while writing that it does not apply there; of several sites, `site` is the one at fault."""

    site: object = None


class VerificationError(FxoptError):
    """Two models that should agree do not."""


class PassError(FxoptError):
    """A pass raised, hung or returned nonsense; `reproducer` is the path of a script that replays it."""

    exit_code = 4

    def __init__(self, message: str, reproducer: str | None = None) -> None:
        super().__init__(message)
        self.reproducer = reproducer


def expect(value: object, kinds: type | tuple[type, ...], name: str, wanted: str) -> None:
    """Raise `UsageError` unless an argument is of one of these types; the message never says what it holds."""
    if not isinstance(value, kinds):
        raise UsageError(f"{name} is of type {type(value).__name__}; give {wanted}")


def positive_integer(value: object, name: str, least: int = 1) -> int:
    """Return an argument that must be a whole number; raise `UsageError` if it is none, or too small."""
    wanted = f"a whole number, at least {least}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} is of type {type(value).__name__}; give {wanted}")
    if value < least:
        raise UsageError(f"{name} is {value}; give {wanted}")
    return value


_CHECK = re.compile(r"Check '.*' failed at \S+:\d+:\s*")


def one_line(error: BaseException) -> str:
    """Return the message of an error that somebody else raised, without line breaks, controls and places in C++."""
    text, _, _ = str(error).partition("\nException raised from")
    text = _CHECK.sub("", text)
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


_MOST_CANDIDATES = 24
"""How many candidates are listed: all options of any pass."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the candidate nearest to `name`, else the candidates, else nothing."""
    known = sorted(set(candidates))
    folded = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6) or _containing(name.lower(), folded)
    if near:
        return f"; did you mean {folded[near[0]]!r}?"
    if not known:
        return ""
    shown = ", ".join(known[:_MOST_CANDIDATES]) + (", ..." if len(known) > _MOST_CANDIDATES else "")
    return f"; there is {shown}" if len(known) == 1 else f"; there are {shown}"


def _containing(name: str, candidates: Iterable[str]) -> list[str]:
    """Return the first candidate that a short name is a part of, those that start with it first."""
    found = [candidate for candidate in candidates if len(name) > 2 and name in candidate]
    return sorted(found, key=lambda candidate: not candidate.startswith(name))[:1]
