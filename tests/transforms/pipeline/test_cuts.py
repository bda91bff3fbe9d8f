"""Where models are cut: the best of all divisions, and what may not cross."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import RobertaConfig, RobertaForMaskedLM

import fxopt
from fxopt.errors import MatchFailure
from fxopt.passes.pipeline import parse
from fxopt.transforms.pipeline import Pipeline
from fxopt.transforms.pipeline.cuts import BALANCE, Line, Stages
from fxopt.transforms.pipeline.find import CutRoute, find_stages
from fxopt.transforms.pipeline.layout import Layout
from fxopt.transforms.pipeline.opening import why_closed
from fxopt.transforms.pipeline.pipeline import run_trial_step


def line(costs: list[float], crossing: list[int | None]) -> Line:
    graph = fx.Graph()
    items = [graph.placeholder(f"item_{number}") for number in range(len(costs))]
    return Line(items, {item: number for number, item in enumerate(items)}, costs, crossing)


def every_division(one: Line, stages: int) -> list[Stages]:
    allowed = [n for n, crossing in enumerate(one.crossing) if n and crossing is not None]
    found: list[Stages] = []
    for starts in itertools.combinations(allowed, stages - 1):
        bounds = (0, *starts, len(one.items))
        costs = tuple(sum(one.costs[a:b]) for a, b in itertools.pairwise(bounds))
        found.append(Stages(bounds[:-1], costs, sum(one.crossing[start] or 0 for start in starts)))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_the_best_of_all_divisions(seed: int):
    draw = random.Random(seed)
    size, stages = draw.randint(3, 10), draw.randint(2, 4)
    costs = [float(draw.choice((0, 1, 1, 2, 7))) for _ in range(size)]
    one = line(costs, [draw.choice((None, 1, 5, 5, 9)) for _ in range(size)])
    found, divisions = one.cut(stages), every_division(one, stages)
    if not divisions:
        assert found is None
        return
    assert found is not None and found in divisions
    slowest = min(max(division.costs) for division in divisions)
    limit = max(slowest, sum(costs) / stages * (1 + BALANCE)) + 1e-6
    assert max(found.costs) <= limit
    assert found.crossing == min(division.crossing for division in divisions if max(division.costs) <= limit)


def test_a_module_whose_forward_was_replaced_is_not_looked_into():
    model = fxopt.capture(nn.Sequential(nn.Linear(4, 4)), (torch.ones(1, 4),)).model
    assert why_closed(model) is None
    model.forward = lambda x: x  # type: ignore[method-assign]
    assert why_closed(model) == "its forward was replaced"


def found_for(model: nn.Module, inputs: object, stages: int) -> tuple[CutRoute, nn.Module]:
    program = fxopt.capture(model, inputs)
    return find_stages(program, stages, "flops"), program.model


def starts(found: CutRoute) -> list[str]:
    return [found.line.items[start].name for start in found.stages.starts]


def test_stages_of_a_deep_roberta_are_even():
    """The proportions of RoBERTa-large: 24 blocks, and a head that costs as much as four of them."""
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 1570}
    model = RobertaForMaskedLM(RobertaConfig(num_hidden_layers=24, **sizes))
    program = fxopt.capture(model, {"input_ids": torch.randint(3, 50, (2, 5))})
    for stages in (2, 4):
        found = find_stages(program, stages, "flops")
        assert found.stages.imbalance < 0.1
        assert all(name.startswith("roberta_encoder_layer_") for name in starts(found)[1:]), (
            "between blocks, not inside"
        )


class Skips(nn.Module):
    """A value that is needed again at the end, a write in place, a tuple, and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask.float().unsqueeze(-1)
        first = self.layers[0](x) * weights
        rows, width = first.shape[0], first.shape[1]
        hidden = self.layers[1](first)
        hidden.relu_()
        left, right = self.layers[2](hidden).chunk(2, -1)
        hidden = self.layers[3](torch.cat([right, left], -1)) + first
        hidden = self.layers[4](hidden).view(rows, width, 8)
        return self.layers[5](hidden) * weights + first


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8), torch.ones(4, 3, dtype=torch.bool)


def test_what_crosses():
    found, model = found_for(Skips(), example(), 3)
    layout = Layout.of(model, found.data())
    called = [[str(n.target)[-1] for n in part.nodes if n.op == "call_module"] for part in layout.parts]
    assert called == [["0", "1"], ["2", "3"], ["4", "5"]]
    first, second, third = ({node.name for node in part.received} for part in layout.parts)
    assert not first and "mul" in second and "mul" in third, "it is carried through the stage between"
    plain = {node.name for node in layout.plain}
    assert {"getattr_1", "getattr_2"} <= plain & second & third, "sizes"
    repeated = {node.name for node in layout.repeated}
    assert {"float_1", "unsqueeze"} <= repeated, "what hangs on inputs alone is computed where it is needed"
    run_trial_step(model, [layout], fxopt.Inputs(*example()), training=True)


def test_no_cut_between_a_value_and_a_write_into_it():
    found, _ = found_for(Skips(), example(), 3)
    place = {node.name: place for node, place in found.line.place.items()}
    assert found.line.crossing[place["relu_"]] is None


def test_a_model_that_cannot_be_cut():
    with pytest.raises(MatchFailure, match="cannot be cut into 9 stages"):
        find_stages(fxopt.capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(4, 2)), 9, "flops")


class Centred(nn.Module):
    """Its rows depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.other(x - x.mean(0))


def test_rows_that_depend_on_each_other():
    x = torch.randn(4, 4)
    found, model = found_for(Centred(), x, 2)
    with pytest.raises(MatchFailure, match="the rows of a batch depend on each other: of two halves output 0"):
        run_trial_step(model, [Layout.of(model, found.data())], fxopt.Inputs(x), training=True)


def test_measured_times_balance_as_well():
    program = fxopt.capture(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.randn(16, 64))
    found = find_stages(program, 2, "time")
    assert len(found.stages.costs) == 2 and min(found.stages.costs) > 0


def test_options_as_text():
    for text in ("pipeline", "pipeline{stages=4,schedule=interleaved,microbatches=8}", "pipeline{cost=time}"):
        (one,) = parse(text)
        assert parse(str(one)) == parse(text) and isinstance(one, Pipeline)


def test_without_a_process_group_it_says_what_to_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/fit.py"])
    with pytest.raises(
        fxopt.errors.UsageError, match=r"there is no process group; run `torchrun --nproc-per-node=4 fit"
    ):
        fxopt.optimize(nn.Linear(2, 2), "pipeline{stages=4}", example_inputs=torch.randn(4, 2))
