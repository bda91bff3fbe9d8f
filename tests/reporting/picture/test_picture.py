"""What pictures of models hold: graphs at each stage, decisions in their places, costs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxopt
from fxopt.reporting.picture import NOW, picture_of_programs, profile_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x).mean((2, 3))
        return torch.stack([head(h) for head in self.heads]).sum(0) + (h - h)


PASSES = "eliminate_dead_code,fold_batchnorm,fuse_ensembles"


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.fixture(scope="module")
def fast(inputs: torch.Tensor) -> nn.Module:
    return fxopt.optimize(Model().eval(), PASSES, example_inputs=(inputs,), measure=False)


def names(picture: dict, number: int) -> list[str]:
    return [node[0] for node in picture["graphs"][number]]


def test_each_graph_is_there_before_and_after_each_pass(fast: nn.Module):
    picture = fxopt.report(fast).picture()
    assert [each["name"] for each in picture["passes"]] == ["eliminate_dead_code", "fold_batchnorm", "fuse_ensembles"]
    (fold, before), (now, after) = picture["history"]["stem"]
    assert (fold, now) == (1, NOW)
    assert names(picture, before)[1:-1] == ["_0", "_1", "_2"]
    assert "_1" not in names(picture, after)
    made = {node[0]: node[7] for node in picture["graphs"][after] if node[7]}
    assert made and all(step[0] == "fold_batchnorm" for step in made.values())
    assert [step for step, _ in picture["history"][""]] == [2, NOW]


def test_what_no_pass_changed_is_there_at_all_stages(fast: nn.Module):
    picture = fxopt.report(fast).picture()
    ((step, number),) = picture["history"]["heads.3"]
    assert step == NOW
    assert names(picture, number)[1:-1] == ["_0", "_1"]
    assert picture["modules"]["heads.3"][0][0] == "Sequential"
    assert number == picture["history"]["heads.0"][0][1], "equal graphs are kept once"


def test_decisions_are_in_their_places(fast: nn.Module):
    sites = fxopt.report(fast).picture()["sites"]
    found = {site["pass"]: site for site in sites if site["status"] == "applied"}
    assert found["fold_batchnorm"]["graph"] == "stem"
    assert found["fuse_ensembles"]["nodes"] and isinstance(found["fuse_ensembles"]["precision_error"], float)


def test_costs_are_those_of_both_models(fast: nn.Module, inputs: torch.Tensor):
    report = fxopt.report(fast, (inputs,))
    costs = report.picture()["costs"]
    convolution = 2 * 2 * 6 * 6 * 8 * 27
    assert costs["before"]["nodes"]["stem"]["_0"][1] == convolution
    assert costs["after"]["modules"]["stem"][1] == convolution
    assert costs["before"]["modules"]["heads.5"][1] == 2 * 2 * 8 * 8
    assert all(took > 0 for took, _, _ in costs["after"]["nodes"][""].values())
    assert not report.missed, "measuring leaves the graphs in use"


def test_measuring_costs_changes_nothing(inputs: torch.Tensor):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.nn.functional.dropout(x, training=True) + self.calls

    program = fxopt.capture(Counting(), (inputs,))
    random = torch.get_rng_state()
    profile_of(program.model, program.whole_calls[0])
    assert program.model.calls == 0
    assert torch.equal(random, torch.get_rng_state())


def test_what_writes_runs_once():
    seen: list[float] = []

    class Opaque(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(float(x.numpy()))
            return x

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Opaque()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            x += 1
            return self.child(x)

    program = fxopt.capture(Adding(), (torch.zeros(()),))
    seen.clear()
    profile_of(program.model, program.whole_calls[0])
    assert set(seen) == {1.0}


def test_each_run_has_the_cache_of_the_first_one():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, ids = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes)).eval(), torch.tensor([[3, 4, 5]])
    cache = model(ids).past_key_values
    for call in (fxopt.Inputs(ids), fxopt.Inputs(ids[:, :1], past_key_values=cache)):
        program = fxopt.capture(model, call)
        profile = profile_of(program.model, program.whole_calls[0])
        assert profile.modules["model.layers.0.self_attn"].flops
        profile_of(program.model, call)
    assert cache.get_seq_length() == 3


def test_source_lines_are_read_where_they_can_be(fast: nn.Module):
    picture = fxopt.report(fast).picture()
    assert "h = self.stem(x).mean((2, 3))" in picture["sources"].values()


def test_two_programs_are_compared_as_if_a_pass_had_made_one_of_the_other(inputs: torch.Tensor):
    first = fxopt.capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (inputs,))
    second = fxopt.capture(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), (inputs,))
    alone, both = picture_of_programs(first), picture_of_programs(first, second)
    assert (alone["passes"], len(both["passes"])) == ([], 1)
    assert [step for step, _ in both["history"][""]] == [0, NOW]
    json.dumps(both)


def test_later_passes_go_on_with_the_history(fast: nn.Module, inputs: torch.Tensor):
    twice = fxopt.optimize(fast, "flatten_calls", example_inputs=(inputs,), measure=False)
    picture = fxopt.report(pickle.loads(pickle.dumps(twice))).picture()
    assert len(picture["passes"]) == 4
    assert picture["history"]["stem"][0][0] == 1


def test_a_report_without_a_model_has_no_picture(fast: nn.Module):
    shown = fxopt.report(fast)
    with pytest.raises(fxopt.StateError, match=r"use fxopt\.report"):
        type(shown)(shown.record).picture()


def test_the_script_is_built_of_its_sources():
    import hashlib

    import fxopt.reporting as reporting

    page = Path(reporting.__file__).parent / "page"
    sources = [page / "build.mjs", page / "package-lock.json", *sorted((page / "src").iterdir())]
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()
    for name in ("page.js", "page.css"):
        assert digest in (page / "dist" / name).read_text()[:100], "run: make page"
