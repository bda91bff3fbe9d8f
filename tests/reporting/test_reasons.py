"""Every cause has words, and a row in the page that leads from it to the function that decides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxopt import Cause, Refusal
from fxopt.passes.sites import Reason
from fxopt.passes.timing import Interval, TimeBudget, no_gain
from fxopt.reporting import in_words

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/why-was-it-undone.md").read_text(encoding="utf-8")
UNPROVEN = "no time was left to find which rewrite it is, so all unproven ones were undone"
SLOW = {"speedup": 0.5, "low": 0.4, "high": 0.6}
SPENT = TimeBudget(2.0, spent=2.5).values
WORDS = (
    (Reason.of(Cause.NOT_APPLICABLE, "it has hooks"), "it has hooks"),
    (Reason.of(Cause.JUDGED_WRONG, error=0.3, budget=0.1), "it errs by 0.3 of its scale, more than the budget of 0.1"),
    (
        Reason.of(Cause.JUDGED_WRONG, lowering="packed", error=1e-3, own_error=1e-6),
        "packed, it is off by 1.0e-03 of the scale, where the layer itself is off by 1.0e-06",
    ),
    (Reason(Cause.JUDGED_SLOWER, SLOW), "no faster by itself: 0.5x (0.4 to 0.6)"),
    (
        Reason(Cause.JUDGED_SLOWER, {**SLOW, "baseline": "bfloat16"}),
        "no faster by itself than in bfloat16: 0.5x (0.4 to 0.6)",
    ),
    (Reason(Cause.NO_FASTER, {**SLOW, "lowering": "bmm"}), "no faster: 0.5x (0.4 to 0.6) as bmm"),
    (Reason(Cause.NO_FASTER, {**SLOW, "wrong": ["output differs"]}), "output differs; no faster: 0.5x (0.4 to 0.6)"),
    (Reason(Cause.MODEL_SLOWER, {**SLOW, "calls": ""}), "the whole model was slower with it (0.5x)"),
    (
        Reason(Cause.MODEL_SLOWER, {**SLOW, "speedup": 1.01, "calls": ""}),
        "the whole model was not clearly faster with it (1.01x)",
    ),
    (
        Reason(Cause.MODEL_SLOWER, {**SLOW, "calls": "prompt", **SPENT}),
        "the prompt of the model was slower (0.5x), and the time budget of 2 s was spent",
    ),
    (
        Reason(Cause.FASTER_WITHOUT, {"speedup": 1.2, "low": 1.1, "high": 1.3}),
        "without it, the passes behind it make the whole model 1.2x as fast",
    ),
    (
        Reason.of(Cause.RAISED_WITHOUT, without="delegate", problem="pass 'pack' raised KeyError"),
        (
            "run again without what delegate took, it raised: pass 'pack' raised KeyError; "
            "the model stays as it was before that"
        ),
    ),
    (Reason(Cause.NOT_CHECKED, SPENT), "not checked: the time budget of 2 s was spent; allow more by time_budget"),
    (
        Reason(Cause.NOT_TIMED, SPENT),
        "not timed: its share of the time budget of 2 s is too short to tell; give a larger time_budget",
    ),
    (
        Reason(Cause.MODEL_DIFFERS, {"problem": "output differs", **SPENT}),
        f"the model as handed over is wrong with it: output differs; {UNPROVEN}; give a larger time_budget",
    ),
    (Reason.of(Cause.DEPENDENT, problem="it is gone"), "it depended on a rewrite that was undone: it is gone"),
    (Reason(Cause.DEPENDENT), "it depended on a rewrite that was undone"),
    (Reason(Cause.NO_MATCH), ""),
)


@pytest.mark.parametrize(("reason", "words"), WORDS, ids=lambda each: getattr(each, "cause", ""))
def test_values_become_words(reason: Reason, words: str) -> None:
    assert in_words(reason) == words


def test_a_refusal_in_words_is_of_a_kind() -> None:
    assert Refusal("no", "here", Cause.IN_TRAINING).why == Reason.of(Cause.IN_TRAINING, "no")
    assert Refusal(Reason(Cause.OVERTAKEN), "here").why.cause is Cause.OVERTAKEN


@pytest.mark.parametrize(
    ("speed", "least", "surely", "cause"),
    [
        (Interval(1.02, 1.05, 1.1), 1.0, True, None),
        (Interval(0.99, 1.05, 1.1), 1.0, True, Cause.NOT_CLEARLY_FASTER),
        (Interval(0.99, 1.05, 1.1), 1.0, False, None),
        (Interval(0.9, 1.005, 1.1), 1.01, False, Cause.NOT_CLEARLY_FASTER),
        (Interval(0.9, 1.0, 1.1), 1.0, False, Cause.NO_FASTER),
    ],
)
def test_one_function_says_whether_what_was_timed_pays(
    speed: Interval, least: float, surely: bool, cause: Cause | None
) -> None:
    found = no_gain(speed, least, surely=surely)
    assert (found and found.cause) == cause


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_a_row_for_each_cause() -> None:
    assert sorted(re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, re.MULTILINE)) == sorted(Cause)


def test_the_page_leads_to_functions_that_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", PAGE)
    assert len(named) > 20
    for path, functions in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        missing = [name for name in re.findall(r"\w+", functions) if not re.search(rf"def {name}\(", source)]
        assert missing == [], path
