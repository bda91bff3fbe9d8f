"""What is said of two models that were compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fxopt.reporting.verdicts import Comparison


def test_a_model_that_computes_with_fewer_digits_is_told_how_to_be_compared() -> None:
    differs: Any = SimpleNamespace(
        ok=False, meaning_error=0.01, precision_error=0.01, reason="output differs", checked_in="float64"
    )
    advice = "quantize computes with fewer digits: allow an error, as in --tolerance"
    assert advice in str(Comparison([differs], False, lossy=("quantize",)))
    assert "fewer digits" not in str(Comparison([differs], False, 0.001, lossy=("quantize",)))


def test_no_error_is_shown_in_types_that_were_not_compared() -> None:
    differs: Any = SimpleNamespace(
        ok=False, meaning_error=0.5, precision_error=0.0, reason="output differs", checked_in="float64"
    )
    found = Comparison([differs], False)
    (row,) = (line for line in str(found).splitlines() if line.startswith("| 0 "))
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["0", "no", "5.0e-01", "-", "float64"]
    assert found.to_json()["calls"][0]["precision_error"] is None
