"""Archives that are damaged, or made by hand to do harm: an ArchiveError or a right answer, never a crash or a deed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import fxopt
from fxopt.deploy.container import FORMAT, SCHEMA_VERSION
from fxopt.errors import ArchiveError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x, flag=False):
        return torch.relu(self.norm(self.linear(x))) * self.scale + x.shape[0]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = fxopt.optimize(Small().eval(), [], example_inputs=(X,))
    path = tmp_path_factory.mktemp("archives") / "intact.fxopt"
    fxopt.save(model, path, kind="standalone")
    return path


@pytest.fixture(scope="module")
def expected(archive: Path) -> torch.Tensor:
    return fxopt.load(archive)(X).detach()


def program_of(archive: Path) -> dict[str, Any]:
    with zipfile.ZipFile(archive) as opened:
        return json.loads(opened.read("program.json"))


def weights_of(archive: Path) -> bytes:
    with zipfile.ZipFile(archive) as opened:
        return opened.read("weights.safetensors")


def by_hand(path: Path, program: Any, weights: bytes, **manifest: Any) -> Path:
    """Write an archive as somebody else might: with checksums that match."""
    text = program if isinstance(program, bytes) else json.dumps(program).encode()
    members = {"program.json": text, "weights.safetensors": weights}
    sums = {name: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for name, d in members.items()}
    head = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "kind": "standalone", "files": sums, **manifest}
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("manifest.json", json.dumps(head))
        for name, data in members.items():
            opened.writestr(name, data)
    return path


def problem(path: Path) -> str:
    with pytest.raises(ArchiveError) as caught:
        fxopt.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


def nodes_of(program: dict[str, Any]) -> list[dict[str, Any]]:
    return program["code"]["variants"][0]["nodes"]


def test_the_one_written_by_hand_is_read(archive: Path, tmp_path: Path, expected: torch.Tensor):
    flat = fxopt.load(by_hand(tmp_path / "m", program_of(archive), weights_of(archive)))
    assert torch.equal(flat(X), expected)


def test_a_newer_one_says_so(archive: Path, tmp_path: Path):
    path = by_hand(tmp_path / "m", {}, b"", schema_version=SCHEMA_VERSION + 1, fxopt="9.0")
    assert f"has format {SCHEMA_VERSION + 1}, written by fxopt 9.0; this fxopt reads up to" in problem(path)
    unknown = by_hand(tmp_path / "k", {}, b"", kind="hologram")
    assert "is of kind 'hologram', which this fxopt does not know" in problem(unknown)


# -- damage --------------------------------------------------------------------------------------------------------


def is_sound(path: Path, expected: torch.Tensor) -> bool:
    """Say whether a damaged archive was refused; if it was not, it must still be right."""
    try:
        flat = fxopt.load(path)
    except ArchiveError:
        return True
    assert torch.equal(flat(X), expected)
    return False


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_found_or_harmless(seed: int, archive: Path, tmp_path: Path, expected: torch.Tensor):
    content, draw = archive.read_bytes(), random.Random(seed)
    refused = 0
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        (tmp_path / "m").write_bytes(damaged)
        refused += is_sound(tmp_path / "m", expected)
    assert refused > 80


def test_cut_and_extended_files(archive: Path, tmp_path: Path, expected: torch.Tensor):
    content = archive.read_bytes()
    for length in random.Random(0).sample(range(len(content)), 60):
        (tmp_path / "m").write_bytes(content[:length])
        problem(tmp_path / "m")
    (tmp_path / "m").write_bytes(content + b"more")
    is_sound(tmp_path / "m", expected)


@pytest.mark.parametrize("seed", range(3))
def test_programs_with_wrong_parts_are_refused_or_run(seed: int, archive: Path, tmp_path: Path):
    """Damage that no checksum finds, for it was computed afterwards: what is loaded may fail, but as a model does."""
    draw, refused = random.Random(seed), 0
    for _ in range(150):
        program = program_of(archive)
        spoil(program, draw)
        path = by_hand(tmp_path / "m", program, weights_of(archive))
        try:
            flat = fxopt.load(path)
        except ArchiveError:
            refused += 1
            continue
        with contextlib.suppress(fxopt.FxoptError, RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            flat(X)
    assert refused > 50


def spoil(value: Any, draw: random.Random) -> None:
    """Replace, remove or repeat something somewhere inside a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(value[key], (dict, list)) and value[key] and draw.random() < 0.85:
            value = value[key]
            continue
        choices = [None, True, -1, 10**30, 1e308, "", "x.y", "__class__", [], {}, [[]], {"node": 0}, {"tuple": [1]}]
        if draw.random() < 0.2:
            value.pop(key)
        else:
            value[key] = copy.deepcopy(draw.choice(choices))
        return


# -- zip files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "C:\\evil", "a/../../evil", "data.pkl", "folder/"])
def test_other_members_are_refused_and_never_extracted(name: str, archive: Path, tmp_path: Path):
    path = tmp_path / "inside" / "m"
    path.parent.mkdir()
    path.write_bytes(archive.read_bytes())
    with zipfile.ZipFile(path, "a") as opened:
        opened.writestr(name, b"evil")
    assert "unexpected member" in problem(path)
    assert [p.name for p in tmp_path.rglob("*")] == ["inside", "m"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_doubled_members_and_bombs(archive: Path, tmp_path: Path):
    doubled = tmp_path / "doubled"
    doubled.write_bytes(archive.read_bytes())
    with zipfile.ZipFile(doubled, "a") as opened:
        opened.writestr("program.json", b"{}")
    assert "two members of one name" in problem(doubled)
    bomb = tmp_path / "bomb"
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("manifest.json", source.read("manifest.json"))
        target.writestr("program.json", source.read("program.json"))
        target.writestr("weights.safetensors", bytes(50 * 2**20))
    assert bomb.stat().st_size < 2**20
    assert "is compressed or encrypted" in problem(bomb)


# -- hostile programs ----------------------------------------------------------------------------------------------

HARMFUL = [
    "os.system", "builtins.eval", "builtins.exec", "builtins.__import__", "builtins.open", "builtins.print",
    "torch.load", "torch.save", "torch.hub.load", "torch.os.system", "torch.from_file", "torch.ops.load_library",
    "torch.classes.load_library", "torch.jit.load", "torch.utils.cpp_extension.load", "torch.compile",
    "torch.manual_seed", "torch._C._jit_clear_class_registry", "torch.nn.functional.torch.os.system",
    "torch.nn.functional.__builtins__", "fxopt.layers.ensemble.torch.load", "fxopt.layers.resolve",
    "operator.attrgetter", "operator.methodcaller", "operator.call", "operator.itemgetter", "math.__loader__",
    "fxopt.load", "subprocess.run", "", "torch", "torch.", ".", None, 3, ["os.system"],
]  # fmt: skip


@pytest.mark.parametrize("target", HARMFUL, ids=repr)
def test_functions_outside_the_list_are_refused(target: Any, archive: Path, tmp_path: Path):
    program = program_of(archive)
    node = next(node for node in nodes_of(program) if node["op"] == "call_function")
    node["target"] = target
    assert "is no function that an archive may call" in problem(by_hand(tmp_path / "m", program, weights_of(archive)))


@pytest.mark.parametrize(
    "target",
    ["__reduce__", "__class__", "__init__", "__call__", "apply_", "map_", "numpy", "data_ptr", "set_", "backward",
     "register_hook", "requires_grad_", "share_memory_", "module_load", "untyped_storage", "tofile", "x y", None],
)  # fmt: skip
def test_methods_outside_the_list_are_refused(target: Any, archive: Path, tmp_path: Path):
    program = program_of(archive)
    node = next(node for node in nodes_of(program) if node["op"] == "call_function")
    node.update(op="call_method", target=target)
    assert "is no method that an archive may call" in problem(by_hand(tmp_path / "m", program, weights_of(archive)))


@pytest.mark.parametrize("name", ["__class__", "__globals__", "__dict__", "grad_fn", "_base", "names", "x.y", None, 3])
def test_attributes_outside_the_list_are_refused(name: Any, archive: Path, tmp_path: Path):
    program = program_of(archive)
    node = next(node for node in nodes_of(program) if node["op"] == "call_function")
    node.update(target="builtins.getattr", args=[{"node": 0}, name])
    assert "is no attribute that an archive may read" in problem(by_hand(tmp_path / "m", program, weights_of(archive)))


def refused(change: Callable[[dict[str, Any]], object], archive: Path, path: Path) -> str:
    program = program_of(archive)
    change(program)
    return problem(by_hand(path, program, weights_of(archive)))


INJECTION = "x, y=__import__('pathlib').Path('ran').touch()"


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["code"]["parameters"][0].update(name=INJECTION),
        lambda p: p["code"]["parameters"][0].update(name="self"),
        lambda p: p["code"]["parameters"][0].update(name="torch"),
        lambda p: p["code"]["parameters"][0].update(name="class"),
        lambda p: p["code"]["parameters"][1].update(kind="ANY"),
        lambda p: p["code"]["parameters"][1].update(default={"node": 0}),
        lambda p: p["code"].update(decorated=1),
        lambda p: nodes_of(p)[0].update(name=INJECTION),
        lambda p: nodes_of(p)[0].update(name="self"),
        lambda p: nodes_of(p)[0].update(path=["y"]),
        lambda p: nodes_of(p)[0].update(path=[]),
        lambda p: nodes_of(p)[0].update(path=["x", [1]]),
        lambda p: nodes_of(p)[1].update(target="linear.__class__"),
        lambda p: nodes_of(p)[1].update(target=["linear"]),
        lambda p: nodes_of(p)[1].update(kwargs={INJECTION: 1}),
        lambda p: nodes_of(p)[1].update(args=[{"node": 99}]),
        lambda p: nodes_of(p)[1].update(args=[{"node": 1}]),
        lambda p: nodes_of(p)[1].update(args=[{"type": "eval"}]),
        lambda p: nodes_of(p)[1].update(args=[{"dtype": "os"}]),
        lambda p: nodes_of(p)[1].update(args=[{"device": "nowhere"}]),
        lambda p: nodes_of(p)[1].update(args=[nested(30)]),
        lambda p: nodes_of(p).pop(),
        lambda p: nodes_of(p).append(nodes_of(p)[-1]),
        lambda p: nodes_of(p).clear(),
        lambda p: p["code"]["variants"].clear(),
        lambda p: p["code"]["variants"][0]["conditions"].append({"holds": {"argument": INJECTION}, "reason": ""}),
        lambda p: p["code"]["variants"][0]["conditions"].append({"holds": {"read": INJECTION}, "reason": ""}),
        lambda p: p["code"]["variants"][0]["conditions"].append({"holds": apply("__import__('os')", 1), "reason": ""}),
        lambda p: p["code"]["variants"][0]["conditions"].append({"holds": apply(".__class__"), "reason": ""}),
        lambda p: p["code"]["variants"][0]["conditions"].append(
            {"holds": {"attribute": [{"argument": "x"}, "__class__"]}, "reason": ""}
        ),
        lambda p: p["modules"].append({"name": "evil", "class": "os.system", "settings": {}}),
        lambda p: p["modules"].append({"name": "evil", "class": "torch.nn.Module", "settings": {}}),
        lambda p: p["modules"].append({"name": "evil", "class": "torch.nn.Linear", "settings": {"device": "cpu"}}),
        lambda p: p["modules"].append({"name": "evil", "class": "torch.nn.LSTM", "settings": {"num_layers": 10**9}}),
        lambda p: p["modules"].append({"name": "nowhere.evil"}),
        lambda p: p["modules"].append({"name": "evil", "same": "nowhere"}),
        lambda p: p["modules"].append({"name": "evil", "same": ""}),
        lambda p: p["modules"].append({"name": "linear"}),
        lambda p: p["modules"].append({"name": "forward"}),
        lambda p: p["modules"].append({"name": "__class__"}),
        lambda p: p["modules"].append({"name": ".".join("a" * 200)}),
        lambda p: p["modules"].append({"name": "_fxopt_program"}),
        lambda p: p["modules"].append({"name": "_parameters"}),
        lambda p: p["modules"].append({"name": "_modules"}),
        lambda p: p["modules"].append({"name": "training"}),
        lambda p: p["modules"].append({"name": "_forward_hooks"}),
        lambda p: p["modules"].append(
            {"name": "evil", "class": "torch.nn.GroupNorm", "settings": {"num_groups": 0, "num_channels": 4}}
        ),
        lambda p: p["modules"].append(
            {"name": "evil", "class": "torch.nn.GRUCell", "settings": {"input_size": 2**70, "hidden_size": 1}}
        ),
        lambda p: p["tensors"].append({"name": "_fxopt_x", "same": "scale", "kind": "buffer", "persistent": True}),
        lambda p: p["tensors"][0].update(strides=[0]),
        lambda p: p["tensors"][0].update(strides=[1, 1]),
        lambda p: p["tensors"][1].update(strides=[-3, 1]),
        lambda p: p["tensors"][1].update(strides="31"),
        lambda p: p["tensors"][1].update(strides=[10**9, 1]),
        lambda p: p["tensors"].append({"name": "forward", "kind": "buffer", "persistent": True}),
        lambda p: p["tensors"].append({"name": "forward", "same": "scale", "kind": "buffer", "persistent": True}),
        lambda p: p["tensors"].append({"name": "w", "same": "scale", "kind": "parameter", "requires_grad": True}),
        lambda p: p["tensors"].append({"name": "no.where", "same": "scale", "kind": "buffer", "persistent": True}),
        lambda p: p["tensors"].append(dict(p["tensors"][0])),
        lambda p: p["tensors"].pop(),
        lambda p: p["tensors"][0].update(persistent="yes"),
        lambda p: p["tensors"][-1].update(kind="module"),
        lambda p: p["tensors"][-1].update(kind="parameter", requires_grad=True),
        lambda p: p["modes"].clear(),
        lambda p: p.update(state_map={"schema_version": 99}),
        lambda p: p.update(state_map=None),
        lambda p: p.clear(),
    ],
)  # fmt: skip
def test_programs_that_lie_are_refused(
    change: Callable[[Any], object], archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    refused(change, archive, tmp_path / "m")
    assert not (tmp_path / "ran").exists()


def test_names_that_python_would_read_as_others_are_refused(archive: Path, tmp_path: Path):
    """Python folds `\uff43lass` to `class`: generated code would read what the file must not name."""

    def change(program: dict[str, Any]) -> None:
        name = "__\uff43lass__"
        program["tensors"].append({"name": name, "same": "scale", "kind": "buffer", "persistent": True})
        program["code"]["attributes"].append(name)
        nodes = nodes_of(program)
        nodes[-1:] = [{"op": "get_attr", "name": "evil", "target": name}, nodes[-1]]
        nodes[-1]["args"] = [{"node": len(nodes) - 2}]

    assert "no place for a tensor" in refused(change, archive, tmp_path / "m")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"code": {}, "code": {}}', "an object has a key twice"),
        (b'{"code": NaN}', "NaN is no number of JSON"),
        (b'{"code": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"code": ' + b"1" * 5000 + b"}", "is not JSON"),
    ],
)
def test_json_that_readers_understand_differently_is_refused(text: bytes, why: str, archive: Path, tmp_path: Path):
    assert why in problem(by_hand(tmp_path / "m", text, weights_of(archive)))


def test_numbers_that_overflow_are_refused(archive: Path, tmp_path: Path):
    text = json.dumps(program_of(archive)).replace("1e-05", "1e999").encode()
    assert "a number is too large" in problem(by_hand(tmp_path / "m", text, weights_of(archive)))


@pytest.mark.parametrize("shape", [[0, 2**63], [0, 2**40, 2**40, 2**40], [2**40, 2**40, 0]])
def test_shapes_that_no_tensor_has_are_refused_in_one_line(shape: list[int], archive: Path, tmp_path: Path):
    program, weights = program_of(archive), weights_of(archive)
    length = int.from_bytes(weights[:8], "little")
    header, data = json.loads(weights[8 : 8 + length]), weights[8 + length :]
    header["evil"] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data)]}
    program["tensors"].append({"name": "evil", "kind": "buffer", "persistent": True})
    text = json.dumps(header).encode()
    path = by_hand(tmp_path / "m", program, len(text).to_bytes(8, "little") + text + data)
    assert "its weights are unreadable" in problem(path)


def test_what_a_file_says_reaches_no_terminal_raw(archive: Path, tmp_path: Path):
    path = by_hand(tmp_path / "m", {}, b"", schema_version=SCHEMA_VERSION + 1, fxopt="9\n\x1b[31mred")
    assert "written by a newer fxopt" in problem(path)
    program = program_of(archive)
    program["state_map"]["steps"] = [{"kind": "rename", "old": "a\n\x1b[31m", "new": "b"}] * 2
    text = problem(by_hand(tmp_path / "m", program, weights_of(archive)))
    assert "\x1b" not in text


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.MultiheadAttention(4, 2, batch_first=True) for _ in range(2))

    def forward(self, x):
        return torch.stack([member(x, x, x, need_weights=False)[0] for member in self.members])


@pytest.mark.parametrize(
    "change",
    [
        lambda template: template.update({"class": "os.system"}),
        lambda template: template.update({"class": None}),
        lambda template: template.update(settings={"embed_dim": 4, "num_heads": 0}),
        lambda template: template.update(settings=[]),
        lambda template: template.update(state="training"),
        lambda template: template.update(state=[1]),
        lambda template: template.update(arguments={"node": 99}),
        lambda template: template.update(arguments=[[], {}]),
        lambda template: template.update(arguments={"tuple": [[], {"dict": [[1, 2]]}]}),
        lambda template: template.clear(),
    ],
)
def test_modules_of_members_that_lie_are_refused(change: Callable[[Any], object], tmp_path: Path):
    call = fxopt.Inputs(torch.randn(2, 3, 4))
    model = fxopt.optimize(Attending().eval(), "fuse_ensembles", example_inputs=call, measure=False)
    fxopt.save(model, tmp_path / "intact", kind="standalone")
    program, weights = program_of(tmp_path / "intact"), weights_of(tmp_path / "intact")
    [templates] = [module["templates"] for module in program["modules"] if "templates" in module]
    change(next(iter(templates.values())))
    problem(by_hand(tmp_path / "m", program, weights))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_what_is_no_file_is_never_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        assert "it is no regular file" in problem(path)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


def apply(operation: str, count: int = 1) -> Any:
    return {"apply": [operation, *[{"argument": "x"}] * count]}


@pytest.mark.parametrize("program", [b"", b"[]", b"{", b"[" * 100_000, b"\xff\xfe", b"1" * 10_000])
def test_programs_that_are_no_json_object(program: bytes, archive: Path, tmp_path: Path):
    assert "program.json is not" in problem(by_hand(tmp_path / "m", program, weights_of(archive)))


def test_weights_of_another_shape_dtype_or_format(archive: Path, tmp_path: Path):
    program, weights = program_of(archive), safetensors.torch.load(weights_of(archive))
    wrong = safetensors.torch.save({**weights, "linear.weight": torch.zeros(2, 2)})
    assert "'linear.weight' has shape [2, 2], where [5, 3] belongs" in problem(by_hand(tmp_path / "m", program, wrong))
    more = safetensors.torch.save({**weights, "evil": torch.zeros(2)})
    assert "does not say what the tensor 'evil' is" in problem(by_hand(tmp_path / "m", program, more))
    integers = safetensors.torch.save({**weights, "linear.weight": torch.zeros(5, 3, dtype=torch.int64)})
    assert "cannot require a gradient" in problem(by_hand(tmp_path / "m", program, integers))
    for junk in (b"", b"\x80\x04.", b"\xff" * 64, weights_of(archive)[:-1], (2**40).to_bytes(8, "little") + b"{}"):
        assert "its weights are unreadable" in problem(by_hand(tmp_path / "m", program, junk))


def test_strings_in_a_graph_stay_strings(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Text from the file becomes part of generated code: as a literal only."""
    monkeypatch.chdir(tmp_path)
    program = program_of(archive)
    text = "'); __import__('pathlib').Path('ran').touch(); ('\\\n\"\"\""
    nodes_of(program)[-1]["args"] = [{"tuple": [text, {"dict": [[text, text]]}, {"node": 0}]}]
    flat = fxopt.load(by_hand(tmp_path / "m", program, weights_of(archive)))
    assert flat(X)[:2] == (text, {text: text})
    assert not (tmp_path / "ran").exists()


HARMFUL_PATHS = [
    "builtins.eval", "builtins.getattr", "torch.load", "torch.os", "operator.attrgetter", ".__reduce__", ".apply_",
    "os.system", "torch._C._nn.__loader__", "nowhere.f", "torch.nowhere", "", None, 3, {"node": 0},
]  # fmt: skip


@pytest.mark.parametrize("path", HARMFUL_PATHS, ids=repr)
@pytest.mark.parametrize("function", ["vectorize_members", "convolve_members", "pool_members"])
def test_functions_named_by_text_are_checked_too(function: str, path: Any, archive: Path, tmp_path: Path):
    program = program_of(archive)
    node = next(node for node in nodes_of(program) if node["op"] == "call_function")
    node.update(target=f"fxopt.layers.{function}", args=[path, {"node": 0}])
    assert "that an archive may call" in problem(by_hand(tmp_path / "m", program, weights_of(archive)))
    node["args"] = []
    assert "that an archive may call" in problem(by_hand(tmp_path / "m", program, weights_of(archive)))
