from __future__ import annotations

import dataclasses
import json
import math
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxopt.errors import PlanError
from fxopt.runtime.record import SCHEMA_VERSION, STATUSES, Decision, Plan
from fxopt.version import VERSION

words = st.text(string.printable + "é→𝄞", max_size=20)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
figures = st.dictionaries(words, numbers | words | st.dictionaries(words, numbers, max_size=2), max_size=3)
decisions = st.builds(
    Decision, step=st.integers(0, 9), pass_name=words, key=words, status=st.sampled_from(STATUSES), label=words,
    reason=words, choice=st.none() | words, detail=words, figures=figures,
)  # fmt: skip
plans = st.builds(
    Plan, pipeline=st.lists(words, max_size=3).map(tuple), phase=st.sampled_from(["train", "eval"]),
    decisions=st.lists(decisions, max_size=3).map(tuple), fxopt=words, torch=words,
)  # fmt: skip

EXAMPLE = Plan(
    ("eliminate_dead_code", "fuse_ensembles{lowering=bmm}"),
    "eval",
    (Decision(1, "fuse_ensembles", "(root):a..b(2)", "applied", "heads", choice="bmm", figures={"speedup": 3.5}),),
)


@given(plans)
def test_round_trip_through_json(plan: Plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan


@given(plan=plans)
def test_round_trip_through_a_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)) == plan


def test_what_the_file_says():
    assert EXAMPLE.to_json() == {
        "schema_version": SCHEMA_VERSION,
        "fxopt": VERSION,
        "torch": str(torch.__version__),
        "pipeline": ["eliminate_dead_code", "fuse_ensembles{lowering=bmm}"],
        "phase": "eval",
        "decisions": [
            {
                "step": 1, "pass_name": "fuse_ensembles", "key": "(root):a..b(2)", "status": "applied",
                "label": "heads", "reason": "", "choice": "bmm", "detail": "", "figures": {"speedup": 3.5},
                "site": None, "numerics": "", "goal": "", "cause": "",
                    "values": {},
            }
        ],
        "optimizer_form": None,
    }  # fmt: skip


def test_figures_that_are_not_finite_become_none():
    figures = {"a": math.nan, "b": {"c": math.inf}, "d": (1.0, -math.inf)}
    assert dataclasses.replace(EXAMPLE.decisions[0], figures=figures).to_json()["figures"] == {
        "a": None,
        "b": {"c": None},
        "d": [1.0, None],
    }


def test_saving_replaces_the_file_or_leaves_it(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    broken = dataclasses.replace(
        EXAMPLE, decisions=(dataclasses.replace(EXAMPLE.decisions[0], figures={"a": object()}),)
    )
    with pytest.raises(TypeError):
        broken.save(path)
    assert path.read_text() == "old"
    EXAMPLE.save(path)
    assert Plan.load(path) == EXAMPLE
    assert list(tmp_path.iterdir()) == [path]


def test_keys_of_later_releases_are_passed_over():
    data = EXAMPLE.to_json() | {"more": 1}
    data["decisions"][0]["more"] = 1
    assert Plan.from_json(data) == EXAMPLE


def test_an_unknown_status():
    with pytest.raises(PlanError, match="one of applied, refused, undone, skipped, not 'done'"):
        Decision(0, "p", "k", "done")


# -- what is refused, and where ------------------------------------------------------------------------------------


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in EXAMPLE.to_json().items() if name != key}


def with_decision(**changes: Any) -> dict[str, Any]:
    data = EXAMPLE.to_json()
    return data | {"decisions": [data["decisions"][0], data["decisions"][0] | changes]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"^the plan must be an object, not '\[\]'$"),
        (None, "^the plan must be an object"),
        (EXAMPLE.to_json() | {"schema_version": 2}, "version 2, this fxopt reads version 1; upgrade fxopt"),
        (EXAMPLE.to_json() | {"schema_version": 0}, "version 0, this fxopt reads version 1; make the plan again"),
        (EXAMPLE.to_json() | {"schema_version": True}, "schema_version must be a whole number, not 'True'"),
        (without("schema_version"), "^the plan: 'schema_version' is missing"),
        (without("pipeline"), "^the plan: 'pipeline' is missing"),
        (EXAMPLE.to_json() | {"phase": "both"}, "phase is 'train' or 'eval', not 'both'"),
        (EXAMPLE.to_json() | {"pipeline": ["a", 3]}, r"^the plan: pipeline\[1\] must be a string, not '3'$"),
        (EXAMPLE.to_json() | {"decisions": {}}, "^the plan: decisions must be a list"),
        (EXAMPLE.to_json() | {"decisions": [3]}, r"^the plan: decisions\[0\] must be an object, not '3'$"),
        (with_decision(step="1"), r"^the plan: decisions\[1\]: step must be a whole number, not '1'$"),
        (with_decision(choice=1), r"^the plan: decisions\[1\]: choice must be a string or null, not '1'$"),
        (with_decision(figures=[]), r"^the plan: decisions\[1\]: figures must be an object"),
        (with_decision(status="maybe"), r"^the plan: decisions\[1\]: a decision's status is one of .* not 'maybe'$"),
    ],
)
def test_malformed_plans(data: object, message: str):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"schema_version": NaN}', "is not JSON: NaN is not a JSON number"),
        (b"{}", "'schema_version' is missing"),
        (json.dumps(with_decision(key=None)).encode(), r"decisions\[1\]: key must be a string, not 'None'"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path):
    with pytest.raises(PlanError, match=r"cannot read plan '.*absent': No such file"):
        Plan.load(tmp_path / "absent")
    with pytest.raises(PlanError, match="cannot read plan"):
        Plan.load(tmp_path)
