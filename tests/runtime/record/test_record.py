from __future__ import annotations

import copy
import gc
import pickle
from typing import Any, cast

import torch
from torch import nn

from fxopt.runtime.record import GraphView, Record, record_of
from fxopt.runtime.state import RECORD_KEY


def a_record(**more: Any) -> Record:
    nothing = cast(Any, None)
    return Record(nothing, nothing, {"": [(0, GraphView(()))]}, {"": GraphView(())}, "all captured", 4, 2, **more)


def remembering(model: nn.Module) -> Record:
    record = a_record()
    record.remember(model, dict(model.named_parameters()))
    return record


def test_original_names_while_the_model_or_its_memory_lives():
    model = nn.Linear(2, 3)
    record, parameters = remembering(model), list(model.parameters())
    names = {id(model.weight): "weight", id(model.bias): "bias"}
    assert record.original_names(parameters) == names
    assert record.original_names([torch.ones(3, 2), model.weight[:1]]) == {}
    model.double()  # other memory; the model knows what they are
    assert record.original_names(parameters) == names
    record = remembering(model)
    del model
    gc.collect()
    assert record.original_names(parameters) == names  # an optimizer holds them


def test_tied_parameters_have_one_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert remembering(model).original_names(model.parameters()) == {id(model["a"].weight): "a.weight"}


def test_sparse_and_lazy_parameters_are_known_by_their_model():
    model = nn.ModuleDict({"lazy": nn.LazyLinear(2, bias=False), "sparse": nn.Module()})
    model["sparse"].weight = nn.Parameter(torch.eye(2).to_sparse())
    names = remembering(model).original_names(model.parameters())
    assert set(names.values()) == {"lazy.weight", "sparse.weight"}


def test_an_optimized_model_passes_on_what_it_remembers():
    original, optimized = nn.Linear(2, 3), nn.Linear(2, 3)
    optimized.__dict__[RECORD_KEY] = remembering(original)
    assert remembering(optimized).original_names(original.parameters()) == {
        id(original.weight): "weight", id(original.bias): "bias"
    }  # fmt: skip
    assert remembering(optimized).original_names(optimized.parameters()) == {}


def test_parameters_can_be_swapped_and_converted():
    model = nn.Linear(2, 3)
    record = remembering(model)
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(3, 2)))
    assert record.original_names([model.weight]) == {id(model.weight): "weight"}


def test_survives_copies_and_pickling():
    model = nn.Linear(2, 3)
    model.__dict__[RECORD_KEY] = remembering(model)
    assert record_of(copy.deepcopy(model)) is record_of(model)
    loaded = pickle.loads(pickle.dumps(model))
    record = record_of(loaded)
    assert record is not None
    assert record.graphs_before == {"": GraphView(())}
    assert record.original_names(loaded.parameters()) == {}


def test_other_models_have_none():
    assert record_of(nn.Linear(2, 3)) is None
