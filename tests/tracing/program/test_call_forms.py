"""What an archive keeps of example calls: enough to draw calls of their form, and none of their data."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import call_forms, calls_of_forms


def test_calls_of_one_form_are_drawn_from_json() -> None:
    batch = torch.tensor([0, 0, 1, 1, 1, 2])
    ids, mask, image = torch.tensor([[7, 3, 11]]), torch.ones(2, 3, dtype=torch.bool), torch.randn(2, 3).half()
    call = Inputs(ids, (mask, [image, None]), sizes={"a": 2, "b": 0.5}, batch=batch)
    forms = json.loads(json.dumps(call_forms([call])))
    (drawn,), (again,) = calls_of_forms(forms), calls_of_forms(forms)
    assert torch.equal(drawn.args[0], again.args[0]) and drawn.args[0].tolist()[0][:2] == [11, 3]
    assert drawn.args[1][0].all() and drawn.args[1][1][0].dtype == torch.half and drawn.args[1][1][1] is None
    assert drawn.kwargs["sizes"] == {"a": 2, "b": 0.5}
    assert drawn.kwargs["batch"].tolist() == [0, 0, 1, 1, 2, 2]


def test_what_json_has_no_form_for_is_not_described() -> None:
    assert call_forms([Inputs(torch.ones(2)), Inputs(object())]) == []
    assert call_forms([Inputs(torch.ones(1).expand(2**24 + 1))]) == []


@pytest.mark.parametrize("args", [3, {"tuple": [{"set": []}]}, {"tuple": [{"tensor": "save"}]}, {"tuple": [{}]}])
def test_a_form_that_is_none_is_refused(args: Any) -> None:
    for forms in (3, [3], [{}], [{"module": "", "generating": False, "args": args, "kwargs": {"dict": {}}}]):
        with pytest.raises(ValueError, match="form"):
            calls_of_forms(forms)


def test_no_file_makes_a_reader_draw_more_than_a_limit() -> None:
    huge = {"tensor": "int8", "shape": [2**40], "low": 0, "high": 1, "ascending": False}
    with pytest.raises(ValueError, match="more than 16,777,216 elements"):
        calls_of_forms([{"module": "", "generating": False, "args": {"tuple": [huge]}, "kwargs": {"dict": {}}}])
