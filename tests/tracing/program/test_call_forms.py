"""What an archive keeps of example calls: enough to draw calls of their form, and none of their data."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import Unmade, call_forms, calls_of_forms, packages_of

HERE = __name__.partition(".")[0]


class Layer:
    """What a cache holds of a layer: keys, once there are some."""

    def __init__(self) -> None:
        raise AssertionError("reading a form must not call this")


class Cache:
    """A cache as those of transformers: objects, classes, and dictionaries by number."""

    def __init__(self) -> None:
        self.layers, self.kind, self.updated = [object.__new__(Layer)], Layer, {0: True, 1: None}
        self.layers[0].__dict__.update(keys=torch.ones(2, 3), dtype=torch.float32, device=torch.device("cpu"))


@dataclass
class Output(OrderedDict):
    """As outputs of transformers: its fields are its items, those that are given."""

    hidden: torch.Tensor | None = None
    cache: Cache | None = None

    def __post_init__(self) -> None:
        self.update({"hidden": self.hidden})


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


class Closing:
    """A class whose objects do something when they go."""

    def __del__(self) -> None: ...


def form_of(value: object) -> Any:
    (form,) = json.loads(json.dumps(call_forms([Inputs(value)]))) or [{}]
    return form


def drawn(value: object, packages: Any = (HERE,)) -> Any:
    """Return what is drawn in the form of a value, as it is after a way through JSON."""
    (call,) = calls_of_forms([form_of(value)], packages=packages)
    return call.args[0]


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


def test_objects_are_made_again_of_what_they_held() -> None:
    made = drawn(Output(torch.zeros(2, 3), Cache()))
    assert type(made) is Output and list(made) == ["hidden", "cache"] and made["hidden"] is made.hidden
    assert made.cache.kind is Layer and made.cache.updated == {0: True, 1: None}
    (layer,) = made.cache.layers
    assert type(layer) is Layer and layer.dtype is torch.float32 and layer.device == torch.device("cpu")
    assert torch.equal(layer.keys, torch.ones(2, 3))
    pair = drawn(Pair(torch.ones(2), (slice(0, None, 2), torch.Size((1, 2)))))
    assert type(pair) is Pair and pair.second == (slice(0, None, 2), (1, 2)) and type(pair.second[1]) is torch.Size


def test_tensors_and_devices_of_objects_are_the_readers() -> None:
    (call,) = calls_of_forms([form_of(Cache())], packages={HERE}, draw=False)
    assert call.args[0].layers[0].keys.is_meta
    form = json.loads(json.dumps(form_of(Cache())).replace('"device": "cpu"', '"device": "elsewhere"'))
    (call,) = calls_of_forms([form], packages={HERE})
    assert call.args[0].layers[0].device == torch.device("cpu")


def test_objects_of_other_packages_are_not_made() -> None:
    class Model(nn.Module): ...

    assert packages_of(Model()) == {HERE}
    assert type(drawn(Cache(), packages_of(Model()))) is Cache
    with pytest.raises(Unmade, match=f"{__name__}:Cache"):
        drawn(Cache(), {"transformers"})


@pytest.mark.parametrize(
    "name", ["Closing", "Missing", "pytest", "nn.Linear", "Cache.__init__", "Layer.keys", "json", "HERE"]
)
def test_classes_that_are_none_or_run_code_are_not_made(name: str) -> None:
    form = json.loads(json.dumps(form_of(Cache())).replace(f"{__name__}:Cache", f"{__name__}:{name}"))
    with pytest.raises(Unmade):
        calls_of_forms([form], packages=None)


def test_no_module_is_imported_and_no_class_of_another_module_is_held() -> None:
    text = json.dumps(form_of(Cache()))
    with pytest.raises(Unmade):
        calls_of_forms([json.loads(text.replace(f"{__name__}:Cache", "this:Cache"))], packages=None)
    assert "this" not in sys.modules
    with pytest.raises(ValueError, match="form of an argument"):
        calls_of_forms([json.loads(text.replace(f'"class": "{__name__}', '"class": "subprocess'))], packages=None)
    with pytest.raises(ValueError, match="form of an object"):
        calls_of_forms([json.loads(text.replace('"kind"', '"__class__"'))], packages=None)


def test_graphs_of_pyg_and_their_batches_are_made_again() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graph = data.Data(x=torch.randn(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]))
    for given in (graph, data.Batch.from_data_list([graph, graph])):
        made = drawn(given, {"torch_geometric"})
        assert (
            type(made) is data.Data and made.x.shape == given.x.shape and made.edge_index.max() == given.x.shape[0] - 1
        )
    assert made.batch.tolist() == [0, 0, 0, 1, 1, 1]


def test_what_json_has_no_form_for_is_not_described() -> None:
    @dataclass
    class Local: ...

    for value in (object(), nn.Linear(1, 1), Closing(), Layer, {(1, 2): 3}, {"a": {1}}, print, Local()):
        assert call_forms([Inputs(torch.ones(2)), Inputs(value)]) == []
    assert call_forms([Inputs(torch.ones(1).expand(2**24 + 1))]) == []


MALFORMED = [
    3, {"tuple": 3}, *({"tuple": [form]} for form in (
        {"set": []}, {"tensor": "save"}, {}, {"dtype": "save"}, {"pairs": [[[], 1]]}, {"slice": [1]}, {"Size": ["1"]},
    )),
]  # fmt: skip


@pytest.mark.parametrize("args", MALFORMED)
def test_a_form_that_is_none_is_refused(args: Any) -> None:
    for forms in (3, [3], [{}], [{"module": "", "generating": False, "args": args, "kwargs": {"dict": {}}}]):
        with pytest.raises(ValueError, match="form"):
            calls_of_forms(forms)


def test_no_file_makes_a_reader_draw_more_than_a_limit() -> None:
    huge = {"tensor": "int8", "shape": [2**40], "low": 0, "high": 1, "ascending": False}
    with pytest.raises(ValueError, match="more than 16,777,216 elements"):
        calls_of_forms([{"module": "", "generating": False, "args": {"tuple": [huge]}, "kwargs": {"dict": {}}}])
