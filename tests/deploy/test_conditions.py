from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fxopt.deploy.conditions import Condition
from fxopt.deploy.guard_trees import conjuncts, path_of, reads_self_only
from fxopt.errors import ArchiveError

NAMES: dict[str, Any] = {
    "x": torch.zeros(2, 3),
    "n": 3,
    "flag": True,
    "pair": (torch.zeros(1), None),
    "kwargs": {"a": 1},
}

GUARDS = {
    "x is not None": True,
    "x is Absent": False,
    "flag is True": True,
    "flag is False": False,
    "(n == 3 and type(n) is int)": True,
    "(n == 3.0 and type(n) is float)": False,
    "n == float('inf')": False,
    "n != -3": True,
    "(type(pair) is tuple and len(pair) == 2)": True,
    "type(pair).__name__ == 'Size'": False,
    "pair[1] is None": True,
    "'a' in kwargs": True,
    "kwargs['a'] == 1": True,
    "x.shape[1] == 3": True,
    "x.size(0) == 3": False,
    "len(x.shape[slice(None, -1, None)]) == 1": True,
    "x.shape == (2, 3)": True,
    "x.dtype == torch.float32": True,
    "x.device == torch.device(type='cpu')": True,
    "x.layout == torch.strided": True,
    "(x.shape[0] * 2 + 1) > 4": True,
    "not (x.shape[0] % 2)": True,
    "torch.is_grad_enabled()": True,
    "not torch.is_autocast_enabled()": True,
    "x.is_floating_point()": True,
}


@pytest.mark.parametrize("text", GUARDS)
def test_guards_survive_as_trees(text: str):
    conditions = [Condition(tree, "why") for tree in conjuncts(text)]
    again = [Condition.from_json(json.loads(json.dumps(condition.to_json()))) for condition in conditions]
    assert again == conditions
    assert all(condition.guard().holds(NAMES) for condition in again) is GUARDS[text]
    assert all(condition.guard().reason == "why" for condition in again)


OTHER_TEXT = [
    "__import__('os').system(1)", "x.sum() > 0", "x.__class__ is None", "eval('1')", "[i for i in x]", "x if n else 1",
    "(lambda: 1)()", "f'{x}' == 'y'", "x or n", "self", "x[:-1]", "x.grad_fn is None", "1 < n < 3", "open('x')", "not",
    "a.b(c=1)",
]  # fmt: skip


@pytest.mark.parametrize("text", OTHER_TEXT)
def test_other_text_is_no_tree(text: str):
    with pytest.raises(ArchiveError, match="cannot be checked without its class"):
        conjuncts(text)


def test_paths():
    assert path_of("x") == ["x"]
    assert path_of("inputs[0]['mask'][1]") == ["inputs", 0, "mask", 1]
    for text in ("inputs[0:1]", "x.shape", "inputs[1.5]", "f(x)"):
        with pytest.raises(ArchiveError):
            path_of(text)


def test_what_a_guard_asks_for():
    assert reads_self_only("len(self._modules['layers']._modules) == 4")
    assert reads_self_only("self.linear.weight.shape[0] == 4")
    assert not reads_self_only("self.linear.weight.dtype == torch.float32")
    assert not reads_self_only("self.training")
    assert not reads_self_only("x.shape[0] == self.weight.shape[0]")
    assert not reads_self_only("torch.is_grad_enabled()")
    assert not reads_self_only("x is not None")


X = {"argument": "x"}
TREES = [
    {}, {"value": {"node": 0}}, {"value": [1]}, {"value": {"dict": []}}, {"apply": []}, {"apply": "eq"},
    {"apply": ["eq", {"value": 1}]}, {"apply": [["eq"]]}, {"apply": [".data_ptr", X]}, {"apply": [".size"]},
    {"argument": 3}, {"attribute": [X, "__class__"]}, {"attribute": [X]}, {"value": 1, "argument": "x"},
]  # fmt: skip


@pytest.mark.parametrize("data", [None, [], {}, {"holds": X}, *({"holds": tree, "reason": ""} for tree in TREES)])
def test_conditions_that_are_none(data: Any):
    with pytest.raises(ArchiveError):
        Condition.from_json(data)
