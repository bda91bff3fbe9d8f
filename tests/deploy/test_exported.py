"""`.pt2` files of `torch.export`: read without running anything from them, whatever is in them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.deploy.exported import load_exported
from fxopt.errors import ArchiveError
from fxopt.settings import weights_only

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own exporter warns of many things


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("shift", torch.ones(4))
        self.odd = torch.arange(4.0)

    def forward(self, x, *, scale):
        grown = torch.cat([x, x], dim=1)[:, : x.shape[1]]
        return {"y": self.linear(grown).relu() * scale["by"] + self.shift + self.odd, "n": x.shape[0] * 2 + 1}


ARGS, KWARGS = (torch.randn(2, 3),), {"scale": {"by": torch.tensor(2.0)}}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}, "scale": {"by": None}}
    program = torch.export.export(Net().eval(), ARGS, KWARGS, dynamic_shapes=shapes)
    torch.export.save(program, path)
    return path


def test_the_module_and_its_example_inputs_come_back(exported: Path):
    module, inputs = load_exported(exported)
    assert inputs is not None
    torch.testing.assert_close(inputs.args, ARGS)
    torch.testing.assert_close(inputs.kwargs, KWARGS)
    torch.manual_seed(0)
    model = Net().eval()
    for rows in (2, 5, 64):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(module(x, **KWARGS), model(x, **KWARGS))
    assert sorted(module.state_dict()) == ["linear.bias", "linear.weight", "shift"]
    assert torch.equal(fxopt.load(exported)(*ARGS, **KWARGS)["y"], module(*ARGS, **KWARGS)["y"])


@pytest.mark.parametrize("strict", [False, True])
def test_what_torch_writes_is_read(strict: bool, tmp_path: Path):
    models = {
        "conv": (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1)),
            (torch.randn(2, 3, 8, 8),),
        ),
        "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(2, 5, 8),)),
        "lstm": (nn.LSTM(4, 3, batch_first=True), (torch.randn(2, 5, 4),)),
    }
    for name, (model, args) in models.items():
        dim = {0: torch.export.Dim("batch", min=2)} if name == "conv" else None
        shapes = (dim,) if dim else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(model.eval(), args, dynamic_shapes=shapes, strict=strict)
        torch.export.save(program, tmp_path / "m.pt2")
        torch.testing.assert_close(load_exported(tmp_path / "m.pt2")[0](*args), model(*args))


# -- hostile files -------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def rewritten(source: Path, target: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    with zipfile.ZipFile(source) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in entries.items():
            archive.writestr(f"net/{name}", data)
    return target


def refusal(path: Path, ran: Path) -> str:
    with pytest.raises(ArchiveError) as caught:
        fxopt.load(path)
    assert not ran.exists(), "something from the file was run"
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_the_rewritten_one_is_read(exported: Path, tmp_path: Path):
    load_exported(rewritten(exported, tmp_path / "m", lambda entries: None))


def pickled(payload: Any, legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(payload, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["plain", "torch", "legacy"])
@pytest.mark.parametrize("place", ["sample_inputs", "weight", "constant", "legacy weights", "custom", "opaque"])
def test_a_pickle_in_any_member_never_runs(place: str, form: str, exported: Path, tmp_path: Path):
    ran = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(ran)) if form == "plain" else pickled(Bomb(ran), legacy=form == "legacy")

    def change(entries: dict[str, bytes]) -> None:
        if place == "sample_inputs":
            entries["data/sample_inputs/model.pt"] = bomb
        elif place == "legacy weights":
            entries["data/weights/model.pt"] = bomb
        else:
            folder, kind = ("weights", "weight") if place == "weight" else ("constants", "tensor")
            name = {"custom": "custom_obj_0", "opaque": "opaque_obj_0"}.get(place, f"{kind}_7")
            config = json.loads(entries[f"data/{folder}/model_{folder}_config.json"])
            payload = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
            config["config"]["evil" if place != "weight" else "shift"] = payload
            entries[f"data/{folder}/model_{folder}_config.json"] = json.dumps(config).encode()
            entries[f"data/{folder}/{name}"] = bomb

    path = rewritten(exported, tmp_path / "m.pt2", change)
    refusal(path, ran)


def test_the_payload_is_a_real_one(exported: Path, tmp_path: Path):
    """What the tests above defend against: torch's own reader runs it."""
    ran = tmp_path / "ran"
    bomb = pickled(Bomb(ran), legacy=False)
    path = rewritten(
        exported, tmp_path / "m.pt2", lambda entries: entries.update({"data/sample_inputs/model.pt": bomb})
    )
    with contextlib.suppress(Exception):  # whatever torch makes of it afterwards
        torch.export.load(path)
    assert ran.exists()


def edited(exported: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    def apply(entries: dict[str, bytes]) -> None:
        model = json.loads(entries["models/model.json"])
        change(model)
        entries["models/model.json"] = json.dumps(model).encode()

    return rewritten(exported, path, apply)


def first_expression(model: dict[str, Any]) -> dict[str, Any]:
    sizes = model["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
    return sizes[0]["as_expr"]


TOUCH = "__import__('pathlib').Path('ran').touch()"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: first_expression(m).update(expr_str=TOUCH),
        lambda m: first_expression(m).update(expr_str="Symbol('s0').func.__globals__"),
        lambda m: first_expression(m).update(expr_str="(lambda: 1)()"),
        lambda m: first_expression(m).update(expr_str="Symbol(\"a'+__import__('os').getcwd()+'\")"),
        lambda m: first_expression(m).update(expr_str="Pow(Integer(10), Integer(10000000000))"),
        lambda m: first_expression(m).update(expr_str="10**10**10"),
        lambda m: first_expression(m).update(expr_str="Pow(Pow(10, 60), 60)"),
        lambda m: first_expression(m).update(expr_str="Pow(2, Symbol('s0'))"),
        lambda m: first_expression(m).update(expr_str="LShift(1, 100000000000)"),
        lambda m: first_expression(m).update(expr_str="Float('1e10000000000')"),
        lambda m: first_expression(m).update(expr_str="1e-10000000000"),
        lambda m: first_expression(m).update(expr_str="Float('1.5', precision=10000000000)"),
        lambda m: first_expression(m).update(expr_str="+".join(["s0"] * 10_000)),
        lambda m: m.update(guards_code=[TOUCH]),
        lambda m: m.update(guards_code=["L['x'].size()[0] == 2 or " + TOUCH]),
        lambda m: m.update(guards_code=["L['x\"+" + TOUCH + "+\"'].size()[0] == 2"]),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.os.system"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.aten.from_file.default"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.aten.save.default"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.evil.run.default"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="#evil:run"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="_operator.attrgetter"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="_operator.call"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.aten.set_data.default"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.aten._resize_output_.default"),
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(name=f"x, y={TOUCH}"),
        lambda m: root_call(m).update(forward_arg_names=[f"x={TOUCH}"]),
        lambda m: root_call(m).update(in_spec=spec("collections.defaultdict", {"default_factory_module": "this"})),
        lambda m: root_call(m).update(in_spec=spec("builtins.dict", [{"__enum__": True, "fqn": "this:X", "name": ""}])),
        lambda m: root_call(m).update(out_spec=spec("builtins.dict", ['y"]; ' + TOUCH])),
        lambda m: root_call(m).update(out_spec="not json"),
        lambda m: m["graph_module"]["graph"].update(custom_obj_values={"evil": {"name": "evil", "class_fqn": "os"}}),
        lambda m: m.update(graph_module=None),
        lambda m: m.clear(),
    ],
)  # fmt: skip
def test_text_that_torch_would_run_is_refused(
    change: Callable[[Any], object], exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    refusal(edited(exported, tmp_path / "m.pt2", change), tmp_path / "ran")


def root_call(model: dict[str, Any]) -> dict[str, Any]:
    return model["graph_module"]["module_call_graph"][0]["signature"]


def spec(kind: str, context: Any) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": json.dumps(context), "children_spec": [leaf]}])


@pytest.mark.parametrize(
    "name",
    [
        "data/aotinductor/model/evil.so",
        "code/evil.py",
        "../evil",
        "models/other.json",
        "data/weights/../../evil",
        "data.pkl",
    ],
)
def test_other_members_are_refused(name: str, exported: Path, tmp_path: Path):
    path = rewritten(exported, tmp_path / "m.pt2", lambda entries: entries.update({name: b"evil"}))
    refusal(path, tmp_path / "ran")


def test_tensors_larger_than_the_file_are_refused(exported: Path, tmp_path: Path):
    def change(entries: dict[str, bytes]) -> None:
        config = json.loads(entries["data/weights/model_weights_config.json"])
        payload = config["config"]["shift"]
        payload["tensor_meta"]["sizes"] = [{"as_int": 10**12}]
        entries["data/weights/model_weights_config.json"] = json.dumps(config).encode()
        entries[f"data/weights/{payload['path_name']}"] = b""

    assert "has no data" in refusal(rewritten(exported, tmp_path / "m.pt2", change), tmp_path / "ran")


def test_tensors_that_are_views_of_less_are_refused(exported: Path, tmp_path: Path):
    """A stride of 0 makes a huge tensor out of one number; a copy of it takes the memory."""

    def change(entries: dict[str, bytes]) -> None:
        config = json.loads(entries["data/weights/model_weights_config.json"])
        config["config"]["shift"]["tensor_meta"].update(sizes=[{"as_int": 10**12}], strides=[{"as_int": 0}])
        entries["data/weights/model_weights_config.json"] = json.dumps(config).encode()

    path = rewritten(exported, tmp_path / "m.pt2", change)
    assert "has more elements than bytes" in refusal(path, tmp_path / "ran")


class Huge:
    def __reduce__(self) -> Any:
        return (bytearray, (10**11,))


def test_example_inputs_take_no_more_memory_than_they_have_bytes(exported: Path, tmp_path: Path):
    bomb = pickled(Huge(), legacy=False)
    path = rewritten(exported, tmp_path / "m.pt2", lambda e: e.update({"data/sample_inputs/model.pt": bomb}))
    assert "bytearray' in example inputs" in refusal(path, tmp_path / "ran")
    plain, deflated = io.BytesIO(pickled((ARGS, KWARGS), legacy=False)), io.BytesIO()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name) + bytes(10**6))
    path = rewritten(
        exported, tmp_path / "n.pt2", lambda e: e.update({"data/sample_inputs/model.pt": deflated.getvalue()})
    )
    assert "is compressed" in refusal(path, tmp_path / "ran")


def test_two_zip_files_in_one_are_read_as_the_one_that_was_checked(exported: Path, tmp_path: Path):
    """Readers of zip files differ in what they make of offsets that do not fit; torch must not read another program."""
    evil = edited(exported, tmp_path / "evil", lambda m: first_expression(m).update(expr_str=TOUCH)).read_bytes()
    clean = rewritten(exported, tmp_path / "clean", lambda entries: None).read_bytes()
    polyglot = tmp_path / "both.pt2"
    polyglot.write_bytes(evil + clean)
    torch.testing.assert_close(load_exported(polyglot)[0](*ARGS, **KWARGS), load_exported(exported)[0](*ARGS, **KWARGS))
    polyglot.write_bytes(clean + evil)
    refusal(polyglot, tmp_path / "ran")


def test_compressed_doubled_and_cut_files(exported: Path, tmp_path: Path):
    with zipfile.ZipFile(exported) as source, zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name) + bytes(10**6))
    assert "compressed" in refusal(tmp_path / "bomb", tmp_path / "ran")
    content = exported.read_bytes()
    for length in range(0, len(content), 977):
        (tmp_path / "cut").write_bytes(content[:length])
        refusal(tmp_path / "cut", tmp_path / "ran")


def test_flipped_bits_never_do_more_than_fail(exported: Path, tmp_path: Path):
    content, draw = exported.read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        (tmp_path / "m.pt2").write_bytes(damaged)
        with contextlib.suppress(ArchiveError):
            fxopt.load(tmp_path / "m.pt2")


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    before = dict(os.environ)
    with weights_only():
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
        assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
    assert dict(os.environ) == before


def test_what_torch_says_of_its_own_classes_is_not_leaked(exported: Path) -> None:
    module, inputs = load_exported(exported)
    with warnings.catch_warnings(record=True) as leaked:
        warnings.simplefilter("always")
        fxopt.capture(module, inputs)
    assert not [str(each.message) for each in leaked if "LeafSpec" in str(each.message)]
