"""The whole model on other sizes and layouts than the example's; no clock runs: what a race says is given."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from support.runs import manager_of
from torch import Tensor, nn
from transformers import DynamicCache

import fxopt
from fxopt.passes import timing
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Goal, Numerics, Site
from fxopt.passes.timing import TimeBudget, Timings
from fxopt.tracing.program import Program

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SECONDS = 0.1
"""So long the rewritten model takes, by the clock given; half or twice as long as before."""


class Net(nn.Module):
    """A convolution of images, which refuses large batches and small images."""

    def __init__(self, least: int = 0, most: int = 64) -> None:
        super().__init__()
        self.conv, self.least, self.most = nn.Conv2d(3, 4, 3, padding=1), least, most

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.most or x.shape[-1] < self.least:
            raise ValueError("not of this size")
        return self.conv(x) - x.sum()


@dataclass(frozen=True)
class Subtract(Pass):
    """Write `a - b` as a call of torch.sub."""

    goal: ClassVar[Goal] = Goal.SPEED
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def find(self, program: Program) -> Iterator[Site]:
        for owner, capture in program.captures.items():
            for node in capture.specializations[0].graph.nodes:
                if node.op == "call_function" and "sub" in node.name and node.target is not torch.sub:
                    yield Site(program, owner, {"sub": node.name})

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("sub")
        edit.replace(node, edit.call(torch.sub, *node.args, before=node))


def _given_to(run: timing.Runner) -> Tensor:
    """Return the images that a runner calls a model with."""
    seen: list[Tensor] = []
    hook = run.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run()
    hook.remove()
    return seen[0]


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Note what the model is timed on; for batches of 16 and more the rewritten one takes twice as long, else half."""
    seen: list[Tensor] = []

    def timed(candidates: Mapping[str, timing.Runner], **_: Any) -> Timings:
        images = [_given_to(run) for run in candidates.values()]
        assert all(images[0].shape == each.shape and images[0].stride() == each.stride() for each in images)
        seen.append(images[0])
        factor = 0.5 if len(images[0]) >= 16 else 2.0
        return Timings([{name: SECONDS * (factor if name == "before" else 1.0) for name in candidates}] * 9)

    monkeypatch.setattr(timing, "time_candidates", timed)
    return seen


def _timings(x: Tensor, net: Net | None = None, **budget: float) -> Mapping[str, Any]:
    manager = manager_of(fxopt.capture((net or Net()).eval(), (x,)), budget=TimeBudget(**budget))
    manager.run([Subtract()])
    assert manager.timings is not None
    return manager.timings


def test_the_whole_model_is_timed_on_other_batches_resolutions_and_layouts(races: list[Tensor]) -> None:
    found = _timings(X)
    speeds = {label: figures["speedup"] for label, figures in found["sizes"].items()}
    assert speeds == {"batch 1": 2.0, "8 x 8": 2.0, "channels last": 2.0, "batch 16": 0.5}
    assert found["speedup"] == 2.0 and "untimed_sizes" not in found
    shapes = [tuple(each.shape) for each in races[-4:]]
    assert shapes == [(1, 3, 16, 16), (4, 3, 8, 8), (4, 3, 16, 16), (16, 3, 16, 16)]
    assert races[-2].is_contiguous(memory_format=torch.channels_last) and not races[-2].is_contiguous()


def test_images_that_come_channels_last_are_timed_contiguous(races: list[Tensor]) -> None:
    assert "contiguous" in _timings(X.contiguous(memory_format=torch.channels_last))["sizes"]
    assert races[-2].is_contiguous()


def test_what_the_original_does_not_take_is_not_timed(races: list[Tensor]) -> None:
    found = _timings(X, Net(least=16, most=8))  # four times the rows are too many for it, twice are not
    assert list(found["sizes"]) == ["batch 1", "channels last", "batch 8"]


def test_sizes_for_which_no_time_is_left_say_so(races: list[Tensor]) -> None:
    found = _timings(X, seconds=100.0, forward=20.0)  # all of it is kept back for comparing
    reason = "too little was left of the time budget of 100 s"
    assert found["untimed_sizes"] == dict.fromkeys(("batch 1", "8 x 8", "channels last", "batch 8"), reason)
    assert "sizes" not in found


def test_no_call_is_made_that_takes_very_long(races: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.2)
    found = _timings(X)
    assert "batch 8" in found["sizes"] and "batch 16" not in found["sizes"]
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.5)
    assert _timings(X)["untimed_sizes"] == {"batch 8": "a call may take more than 1 s"}


def test_what_a_race_raises_is_said(races: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    timed = timing.time_candidates

    def raising(candidates: Mapping[str, timing.Runner], **options: Any) -> Timings:
        found = timed(candidates, **options)
        if len(races[-1]) == 1:
            raise RuntimeError("no memory\nwhatsoever")
        return found

    monkeypatch.setattr(timing, "time_candidates", raising)
    found = _timings(X)
    assert found["untimed_sizes"] == {"batch 1": "RuntimeError: no memory"} and "batch 16" in found["sizes"]


def test_rows_of_graphs_are_no_batch(races: list[Tensor]) -> None:
    class Graph(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return x.sum() - x[edges[0]]

    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    manager = manager_of(fxopt.capture(Graph().eval(), (torch.randn(4, 3), edges)), time=False)
    assert not list(fxopt.passes.verification.neighbours(manager.program.whole_calls))


def test_caches_are_no_images() -> None:
    cache = DynamicCache()
    cache.update(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8), 0)
    call = fxopt.Inputs(torch.zeros(2, 1, dtype=torch.long), past_key_values=cache)
    labels = [each.label for several in fxopt.passes.verification.neighbours([call]) for each in several]
    assert "batch 8" in labels and "channels last" not in labels


def test_a_plan_that_is_repeated_times_nothing(races: list[Tensor]) -> None:
    fast = fxopt.optimize(Net().eval(), passes=[Subtract()], example_inputs=(X,), time_budget=100)
    text = str(fxopt.report(fast))
    assert "batch 16: 0.5x (slower)" in text and "slower than before with batch 16 (0.5x): the rewrites" in text
    count = len(races)
    again = fxopt.optimize(Net().eval(), passes=[Subtract()], plan=fxopt.plan(fast), example_inputs=(X,))
    assert len(races) == count and fxopt.report(again).to_json()["timings"] is None
