"""Graphs by `inspect`, `diff` and `optimize --report`: as pages, and in the formats of other tools."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import HEADS, folder_of_modules

SOURCE = HEADS + "\ndef example_inputs():\n    return torch.ones(3, 4)\n\ndef heads():\n    return Heads().eval()\n"
CONFIGURATION = """
from transformers import BertConfig
def small():
    return BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=50)
def huge():
    return BertConfig(vocab_size=10**10, num_hidden_layers=1)
"""
FUSED = ("-p", "fuse_ensembles", "--no-measure")

Fxopt = Callable[..., Any]


@pytest.fixture(autouse=True)
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with folder_of_modules(tmp_path, monkeypatch, zoo=SOURCE, bare="from zoo import heads") as folder:
        yield folder


def picture_in(page: Path) -> dict[str, Any]:
    (data,) = re.findall(r"id='picture-data'>([^<]*)<", page.read_text(encoding="utf-8"))
    return json.loads(gzip.decompress(base64.b64decode(data)))


def test_a_model_has_a_page_with_its_graphs_and_costs(fxopt: Fxopt, zoo: Path):
    done = fxopt("inspect", "zoo:heads", "--html", "page.html")
    assert (done.code, done.err) == (0, "")
    assert done.out == fxopt("inspect", "zoo:heads").out
    picture = picture_in(zoo / "page.html")
    assert "heads.3" in picture["history"] and picture["passes"] == []
    assert picture["costs"]["before"]["nodes"][""]["cat"][0] > 0
    assert "7 of 7 modules captured" in (zoo / "page.html").read_text()
    assert fxopt("inspect", "bare:heads", "--html", "page.html").code == 0
    assert picture_in(zoo / "page.html")["costs"] is None


def test_reports_have_costs(fxopt: Fxopt, zoo: Path):
    assert fxopt("optimize", "zoo:heads", *FUSED, "-o", "out.fxopt", "--report", "report.html").code == 0
    assert picture_in(zoo / "report.html")["costs"]["after"]["modules"][""][0] > 0
    assert fxopt("inspect", "out.fxopt", "--trust", "zoo", "--html", "report.html").code == 0
    picture = picture_in(zoo / "report.html")
    assert [each["name"] for each in picture["passes"]] == ["fuse_ensembles"]
    assert picture["costs"]["before"]["nodes"]["heads.0"]


def test_two_models_have_a_page(fxopt: Fxopt, zoo: Path):
    fxopt("optimize", "zoo:heads", *FUSED, "-o", "out.fxopt")
    done = fxopt("diff", "zoo:heads", "out.fxopt", "--trust", "zoo", "--html", "changes.html")
    assert done.code == 1 and "--- (root)" in done.out
    assert [each["name"] for each in picture_in(zoo / "changes.html")["passes"]] == ["difference"]
    assert "zoo:heads and out.fxopt" in (zoo / "changes.html").read_text()


@pytest.mark.parametrize(
    ("form", "begins"), [("dot", "digraph"), ("mermaid", "flowchart"), ("json", "{"), ("model-explorer", '{"label"')]
)
def test_formats_are_printed_or_written_and_written_again(fxopt: Fxopt, zoo: Path, form: str, begins: str):
    printed = fxopt("inspect", "bare:heads", "--format", form)
    assert printed.code == 0 and printed.out.startswith(begins)
    for _ in range(2):
        done = fxopt("inspect", "bare:heads", "--format", form, "-o", "out.txt", "--json")
        assert (done.code, (zoo / "out.txt").read_text()) == (0, printed.out)
        assert done.json["coverage"]
    assert not (zoo / "out.time.json").exists(), "nothing was timed"


def test_times_stand_beside_what_model_explorer_shows(fxopt: Fxopt, zoo: Path):
    for _ in range(2):
        assert fxopt("inspect", "zoo:heads", "--format", "model-explorer", "-o", "heads.json").code == 0
    (graph,) = json.loads((zoo / "heads.json").read_text())["graphs"]
    times = json.loads((zoo / "heads.time.json").read_text())
    assert set(times[graph["id"]]["results"]) <= {node["id"] for node in graph["nodes"]}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("inspect", "zoo:heads", "-o", "out.dot"), 2, "-o needs a format"),
        (("inspect", "zoo:heads", "--graph", "", "--html", "out.html"), 2, "leave --graph out"),
        (("inspect", "zoo:heads", "--json", "--format", "dot"), 2, "leave one out, or add -o FILE"),
        (("inspect", "zoo:heads", "--format", "svg"), 2, "svg"),
        (("inspect", "zoo:heads", "--html", "absent/page.html"), 3, "there is no folder absent; make it first"),
        (("inspect", "zoo:heads", "--html", "bare.py"), 3, "--html bare.py is there and is no page of fxopt"),
        (("inspect", "zoo:heads", "--format", "dot", "-o", "bare.py"), 3, "-o bare.py is there and is no picture"),
        (("inspect", "zoo:heads", "--format", "model-explorer", "-o", "h.json"), 3, "-o h.time.json is there and"),
        (("diff", "zoo:heads", "zoo.py:heads", "--html", "zoo.py"), 3, "--html zoo.py is the model that is read"),
        (("optimize", "zoo:heads", "--plot", "heads.svg"), 3, "this writes .png files; name it heads.png"),
        (("optimize", "zoo:heads", "--plot", "photo.png"), 3, "photo.png is there and is no plot of matplotlib"),
    ],
)  # fmt: skip
def test_options_are_checked_before_the_work(
    fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, message: str
):
    (zoo / "h.time.json").write_text('{"my": {"times": 3}}')
    (zoo / "photo.png").write_bytes(b"\x89PNG of a cat")
    before = {path: path.read_bytes() for path in zoo.iterdir() if path.is_file()}
    monkeypatch.setattr("fxopt.cli.arguments.open_model", lambda *_: pytest.fail("the work has begun"))
    done = fxopt(*arguments)
    assert done.code == code
    assert message in " ".join(done.err.replace("│", " ").split())
    assert {path: path.read_bytes() for path in zoo.iterdir() if path.is_file()} == before


def test_a_report_is_drawn_and_drawn_again(fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    for _ in range(2):
        assert fxopt("optimize", "zoo:heads", *FUSED, "--plot", "heads.png").code == 0
    assert (zoo / "heads.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = fxopt("optimize", "not_there:nothing", "--plot", "heads.png")
    assert (refused.code, 'pip install "fxopt[plots]"' in refused.err) == (2, True)


def test_a_configuration_is_a_model_with_inputs(fxopt: Fxopt, zoo: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    with folder_of_modules(zoo, monkeypatch, configured=CONFIGURATION):
        done = fxopt("optimize", "configured:small", "-p", "eliminate_dead_code", "-o", "bert.fxopt", "--json")
        assert (done.code, done.err, done.json["phase"]) == (0, "", "eval")
        again = ("configured:small", "bert.fxopt", "--trust", "configured")
        assert fxopt("verify", *again).code == 0
        huge = fxopt("inspect", "configured:huge")
        assert huge.code == 3
        assert "name a function that returns a smaller configuration" in huge.err


def test_names_of_configurations_are_checked(fxopt: Fxopt):
    pytest.importorskip("transformers")
    assert "did you mean 'BertConfig'?" in fxopt("inspect", "transformers:BertConfg").err
    assert "name its configuration, transformers:BertConfig" in fxopt("inspect", "transformers:BertModel").err
