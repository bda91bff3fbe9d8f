"""Rewritten models under every use: the same, refused in one line, or a row in docs/limits.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support import fuzz
from support.all_uses import USES
from support.catalog import PASSES, sample
from support.limits import HEADER, findings, limits, page, past
from support.net import Trial, sites
from support.outcomes import Difference, Judge, Raised
from support.shares import share

import fxopt

pytest.importorskip("torch_geometric")

MODELS, PARTS = 300, 3


@pytest.mark.parametrize("name", PASSES)
def test_samples_have_sites_and_are_the_same_each_time(name: str):
    made = [sample(name, seed) for seed in range(3)]
    assert any(sites(each) for each in made)
    first, second = made[0].build().state_dict(), sample(name, 0).build().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert len({each.spelling for each in (sample(name, seed) for seed in range(20))}) > 1


def judged(plain: Any, fast: Any, judge: Judge = Judge()) -> list[bool]:  # noqa: B008 - it is a value
    return [each.refused for each in judge.compare({"result": plain}, {"result": fast})]


def test_what_differs_is_told_and_refusals_are_known():
    ones = torch.ones(3)
    refusal, lines = Raised(fxopt.FxoptError("not this")), Raised(fxopt.FxoptError("not\nthis"))
    assert judged(ones, ones + 1e-6) == []
    assert judged(ones, refusal) == [True]
    for wrong in (ones + 1e-3, ones.double(), ones[:2], (ones,), None, lines, Raised(KeyError("x")), ones * torch.nan):
        assert judged(ones, wrong) == [False]
    assert judged(ones, 1.05 * ones, Judge(near=0.1)) == []
    assert judged(ones, 5 * ones, Judge(form=True)) == []
    assert judged(ones, ones[:1], Judge(form=True)) == [False]
    assert judged(Raised(ValueError("x")), refusal) == []
    assert Judge().compare({"wrong width": Raised(ValueError("x"))}, {"wrong width": ones})
    assert Judge().compare({"count": 1}, {"count": 0})


def test_rows_of_limits_allow_what_they_name_and_tell_when_nothing_needs_them():
    text = f"{HEADER}\n|---|---|---|---|\n| pack, prune | sizes | it is off | wait |\n"
    rows = limits(text)
    off = Trial("pack", "sizes", 0, "different", (Difference("1", False, "off"),))
    assert findings([off], rows) == []
    assert findings([off], []) == [off]
    assert past([off], rows) == []
    assert past([Trial("pack", "sizes", 0, "same")], rows) == rows
    assert "| L |" in page([off], rows, {})
    assert "| ! |" in page([off], [], {})
    with pytest.raises(ValueError, match="unknown names: \\['sices'\\]"):
        limits(text.replace("sizes", "sices"))


def test_a_run_of_many_models_tries_all_pairs():
    tried = Counter((name, use) for name, _, uses in fuzz.plan(len(PASSES) * len(USES), 3, 1) for use in uses)
    assert set(tried) == {(name, use) for name in PASSES for use in USES}
    assert set(tried.values()) == {1}


@pytest.mark.parametrize("part", share(PARTS, range(PARTS)))
def test_random_models_do_what_they_did_before(part: int):
    hit: Counter[str] = Counter()
    trials = list(fuzz.run(MODELS // PARTS, 1000 * part, 2, hit, slow=False))
    assert [name for name in PASSES if not hit[name]] == []
    assert "\n".join(str(each) for each in findings(trials, limits())) == ""
