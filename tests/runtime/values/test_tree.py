"""Tensors are found and replaced wherever arguments and results keep them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.runtime.values import flatten, map_tensors, structure

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Record:
    value: Tensor
    name: str = "r"


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.value = value


ONE = torch.ones(2)
NESTED: dict[str, Any] = {
    "tensor": ONE,
    "tuple": (ONE, 1),
    "list": [ONE, [ONE]],
    "named tuple": Pair(ONE, 2),
    "dict": {"x": ONE, 3: None},
    "ordered": OrderedDict(x=ONE),
    "dataclass": Record(ONE),
    "object": Plain(ONE),
    "torch result": torch.ones(2, 2).max(0),
    "shape": ONE.shape,
}


@pytest.mark.parametrize("name", NESTED)
def test_containers_are_rebuilt_with_other_tensors(name: str) -> None:
    value = NESTED[name]
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert type(doubled) is type(value)
    assert structure(doubled) == structure(value)
    before, after = flatten(value), flatten(doubled)
    for path, leaf in before.items():
        same = torch.equal(after[path], leaf * 2) if isinstance(leaf, Tensor) else after[path] == leaf
        assert same, path


def test_nothing_is_edited_in_place() -> None:
    inner = [ONE]
    value = {"x": inner, "object": Plain(ONE)}
    map_tensors(lambda tensor: tensor * 2, value)
    assert value["x"] is inner
    assert inner[0] is ONE
    assert value["object"].value is ONE


def test_one_tensor_or_object_used_twice_stays_one() -> None:
    shared = Plain(ONE)
    a, b, c, d = map_tensors(lambda tensor: tensor * 2, (ONE, ONE, shared, shared))
    assert a is b
    assert c is d
    assert c.value is a


def test_cycles_end() -> None:
    value = Plain(ONE)
    value.own = [value]
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert doubled.own[0] is doubled


def test_modules_and_functions_are_passed_on() -> None:
    module = nn.Linear(2, 2)
    assert map_tensors(lambda tensor: tensor * 2, [module, len]) == [module, len]


def test_paths_read_like_python() -> None:
    value = {"a": (ONE, Record(ONE)), "b": Pair(1, [2.5])}
    assert list(flatten(value, "output")) == [
        "output['a'][0]", "output['a'][1].value", "output['a'][1].name", "output['b'].a", "output['b'].b[0]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"), [((ONE,), [ONE]), ((ONE,), (ONE, ONE)), ({"a": 1}, {"b": 1}), (ONE, 1), (None, 1), (1, 1.0)]
)
def test_structures_tell_types_and_paths_apart(one: object, other: object) -> None:
    assert structure(one) != structure(other)
