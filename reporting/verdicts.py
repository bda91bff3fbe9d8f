"""Whether two models are the same function, call by call: the verdicts, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from ..passes.sites import Numerics
from ..passes.verification import Verdict, reference, verify
from ..runtime.graphs import capture_of
from ..runtime.record import record_of, state_map_of
from ..runtime.values import plain
from ..tracing.examples import Inputs
from .table import plain_text
from .wording import counted, printable

__all__ = ["Comparison", "compare_models"]

TITLES = ("call", "same", "error in float64", "error in its own types", "checked in")
TITLES_WITHIN = ("call", "within", "error", "allowed")
"""Where an error is allowed: then models are compared in their own types alone."""


@dataclass(frozen=True)
class Comparison:
    """A verdict for each call; `tolerance` is the error that was allowed, `lossy` the passes that promise to differ."""

    verdicts: Sequence[Verdict]
    gradients: bool
    tolerance: float | None = None
    lossy: Sequence[str] = ()

    @property
    def equal(self) -> bool:
        """Whether no call told the models apart."""
        return all(verdict.ok for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values; errors that are not finite are null."""
        calls = [
            {
                "equal": verdict.ok,
                "reason": verdict.reason,
                "meaning_error": _finite(verdict.meaning_error) if self.tolerance is None else None,
                "precision_error": _finite(verdict.precision_error) if _was_reached(verdict) else None,
                "checked": verdict.checked_in if self.tolerance is None else "its own types",
            }
            for verdict in self.verdicts
        ]
        return {"equal": self.equal, "gradients": self.gradients, "tolerance": self.tolerance, "calls": calls}

    def __str__(self) -> str:
        return plain_text(self, width=200)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        compared = "outputs, buffers and gradients" if self.gradients else "outputs and buffers"
        same = "equal" if self.tolerance is None else f"within {self.tolerance:g}"
        found = same if self.equal else "different"
        yield Text(f"{found}: {compared} of {counted(len(self.verdicts), 'call')}", style="bold")
        table = Table(box=box.SIMPLE_HEAD if options.is_terminal else box.MARKDOWN)
        for title in TITLES if self.tolerance is None else TITLES_WITHIN:
            table.add_column(title)
        for number, verdict in enumerate(self.verdicts):
            table.add_row(str(number), "yes" if verdict.ok else "no", *self._errors(verdict))
        yield table
        for number, verdict in enumerate(self.verdicts):
            if verdict.reason:
                yield Text(f"call {number}: {printable(verdict.reason)}")
        if self.lossy and self.tolerance is None and not self.equal:
            yield Text(f"{', '.join(self.lossy)} computes with fewer digits: allow an error, as in --tolerance 0.02")

    def _errors(self, verdict: Verdict) -> Sequence[str]:
        """Return the cells behind the verdict; no figures where nothing could be compared."""
        meaning, precision = verdict.meaning_error, verdict.precision_error
        is_compared = verdict.ok or meaning or precision
        if self.tolerance is not None:
            return f"{precision:.1e}" if is_compared else "-", f"{self.tolerance:g}"
        own_types = f"{precision:.1e}" if _was_reached(verdict) else "-"
        return f"{meaning:.1e}" if is_compared else "-", own_types, verdict.checked_in


def _was_reached(verdict: Verdict) -> bool:
    """Say whether models were compared in their own types: not where they differed in float64 before."""
    return verdict.ok or verdict.precision_error > 0


def compare_models(
    before: nn.Module,
    after: nn.Module,
    calls: Sequence[Inputs],
    *,
    gradients: bool,
    training: bool,
    seed: int,
    tolerance: float | None = None,
) -> Comparison:
    """Compare `after` with `before`, which is right, on calls; with `tolerance` in the models' own types alone."""
    of_both = (*after.named_parameters(remove_duplicate=False), *after.named_buffers(remove_duplicate=False))
    known = {name for name, _ in of_both}

    def translated(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        earlier, later = state_map_of(before), state_map_of(after)
        original = state if earlier is None else earlier.backward(state)
        found = original if later is None else later.forward(original, strict=False)
        return {name: tensor for name, tensor in found.items() if name in known}

    keyed = capture_of(after) is not None
    allowed: dict[str, Any] = {}
    if tolerance is not None:
        allowed = {"numerics": Numerics.APPROXIMATE, "budget": tolerance}
    verdicts: list[Verdict] = []
    with ExitStack() as stack:
        for model in {id(model): model for model in (before, after)}.values():
            stack.callback(model.register_forward_hook(lambda _, __, output: plain(output)).remove)
        for call in calls:
            taken = reference(before, [call], training=training, gradients=gradients, seed=seed, keyed=keyed)
            verdicts.append(verify(taken, after, map_state=translated, **allowed))
    return Comparison(verdicts, gradients, tolerance, _lossy(before, after))


def _lossy(*models: nn.Module) -> list[str]:
    """Return the passes that made models differ from their originals, as they promise."""
    decisions = [each for model in models if (record := record_of(model)) for each in record.plan.decisions]
    applied = [each for each in decisions if each.status == "applied" and each.numerics == Numerics.APPROXIMATE.value]
    return list(dict.fromkeys(each.pass_name for each in applied))


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
