"""The base of passes: their names, and options that they do not have."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

import fxopt
from fxopt.errors import UsageError
from fxopt.known_passes import pass_names
from fxopt.passes.contract import Pass
from fxopt.transforms.quantize import Quantize


@dataclass(frozen=True)
class TakesAnything(Pass):
    """Has a constructor of its own."""

    given: Any = None

    def __init__(self, **options: Any) -> None:
        object.__setattr__(self, "given", options)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UsageError, match="'quantize' has no option 'sheme'; did you mean 'scheme'"):
        Quantize(sheme="int8_static")  # pyright: ignore[reportCallIssue]
    for name in pass_names():
        pass_type: Any = fxopt.passes.pipeline.find_pass(name)
        with pytest.raises(UsageError, match=f"'{name}' has no option 'no_such_option'; "):
            pass_type(no_such_option=1)


def test_constructors_copies_and_pickles_are_as_before():
    pass_ = Quantize(scheme="int8_weight", aim="size")
    assert copy.deepcopy(pass_) == pickle.loads(pickle.dumps(pass_)) == pass_
    assert TakesAnything(some=1).given == {"some": 1}
    with pytest.raises(TypeError):
        Quantize("int8_weight", scheme="int8_static")  # pyright: ignore[reportCallIssue]
