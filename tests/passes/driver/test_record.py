from __future__ import annotations

import copy
import gc
import pickle
from typing import Any, cast

from torch import nn

from fxopt.passes.driver import Record, record_of
from fxopt.passes.state import RECORD_KEY


def a_record(**more: Any) -> Record:
    nothing = cast(Any, None)
    return Record(nothing, nothing, {"": "x"}, {"": "y"}, "all captured", 4, 2, **more)


def remembering(model: nn.Module) -> Record:
    record = a_record()
    record.remember(model, dict(model.named_parameters()))
    return record


def test_original_names_by_identity_while_they_live():
    model = nn.Linear(2, 3)
    record = remembering(model)
    assert record.original_names() == {id(model.weight): "weight", id(model.bias): "bias"}
    del model
    gc.collect()
    assert record.original_names() == {}


def test_tied_parameters_have_one_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert remembering(model).original_names() == {id(model["a"].weight): "a.weight"}


def test_an_optimized_model_passes_on_what_it_remembers():
    original, optimized = nn.Linear(2, 3), nn.Linear(2, 3)
    optimized.__dict__[RECORD_KEY] = remembering(original)
    assert remembering(optimized).original_names() == remembering(original).original_names()


def test_survives_copies_and_pickling():
    model = nn.Linear(2, 3)
    model.__dict__[RECORD_KEY] = remembering(model)
    assert record_of(copy.deepcopy(model)) is record_of(model)
    loaded = pickle.loads(pickle.dumps(model))
    record = record_of(loaded)
    assert record is not None
    assert record.graphs_before == {"": "x"}
    assert record.original_names() == {}


def test_other_models_have_none():
    assert record_of(nn.Linear(2, 3)) is None
