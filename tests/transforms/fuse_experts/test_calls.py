"""Fused experts in calls unlike the examples: under autocast, compiled, exported, with few tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from mixtures import SPELLINGS, Block, MaskAny, Where
from torch import Tensor, nn

import fxopt
from fxopt.passes import timing


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(7))


def fused(model: nn.Module, lowering: str) -> nn.Module:
    fast = fxopt.optimize(
        model.eval(), f"fuse_experts{{lowering={lowering}}}", example_inputs=(x_of(3, 12),), measure=False
    )
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    return fast


def only(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def made(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return cls()


@pytest.mark.parametrize(
    ("spelling", "lowering"),
    [
        ("where", "grouped"),
        ("index_add", "padded"),
        ("mask_any", "loop"),
        ("dictionary", "gathered"),
        ("stacked", "grouped"),
    ],
)
def test_under_autocast_results_have_the_dtype_that_the_loop_added_to(spelling: str, lowering: str) -> None:
    model = made(SPELLINGS[spelling])
    fast = fused(model, lowering)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = only(fast(x_of(3, 12))), only(model(x_of(3, 12)))
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    half = model.bfloat16(), fast.bfloat16()
    assert {only(each(x_of(3, 12).bfloat16())).dtype for each in half} == {torch.bfloat16}


@pytest.mark.parametrize(("lowering", "cls"), [("grouped", Where), ("loop", MaskAny)])
def test_compiled_as_one_graph(lowering: str, cls: type[nn.Module]) -> None:
    model = made(cls)
    fast = fused(model, lowering)
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5):
            torch.testing.assert_close(only(compiled(x_of(rows, 12))), only(model(x_of(rows, 12))))


@pytest.mark.parametrize(("lowering", "cls"), [("grouped", Where), ("loop", MaskAny), ("gathered", Block)])
def test_exported_for_any_number_of_rows(lowering: str, cls: type[nn.Module], tmp_path: Path) -> None:
    model = made(cls)
    fxopt.export(fused(model, lowering), tmp_path / "mixture.pt2", example_inputs=(x_of(3, 12),))
    loaded = fxopt.load(tmp_path / "mixture.pt2", trust=True)
    for rows in (3, 7):
        torch.testing.assert_close(only(loaded(x_of(rows, 12))), only(model(x_of(rows, 12))))


def test_what_was_measured_is_for_about_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def time_candidates(candidates: Mapping[str, timing.Runner], **_: object) -> timing.Timings:
        return timing.Timings([{name: 0.5 + (name != "padded") for name in candidates}] * 20)

    monkeypatch.setattr(timing, "time_candidates", time_candidates)
    fast = fxopt.optimize(made(Where).eval(), "fuse_experts", example_inputs=[(x_of(1, 1),), (x_of(4, 16),)])
    assert [(d.status, d.choice) for d in fxopt.plan(fast).decisions] == [("applied", "padded")]
    for name, apply in fxopt.layers.moe.LOWERINGS.items():

        def noted(*args: object, name: str = name, apply: Callable[..., Tensor] = apply) -> Tensor:
            taken.append(name)
            return apply(*args)

        monkeypatch.setitem(fxopt.layers.moe.LOWERINGS, name, noted)
    with torch.no_grad():
        for shape in ((4, 16), (2, 16), (8, 16), (1, 1), (9, 16)):
            fast(x_of(*shape))
    assert taken[:3] == ["padded"] * 3 and taken[3] == "gathered" and taken[4] != "padded"


def test_an_expert_that_had_all_tokens_of_the_example_has_others_later() -> None:
    model = made(Where).eval()
    model.gate = nn.Linear(16, 4)
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([8.0, 0, 0, 0]))
    fast = fused(model, "grouped")
    for favourite in range(4):
        for each in (model, fast):
            with torch.no_grad():
                each.gate.bias.copy_(torch.zeros(4).index_fill(0, torch.tensor(favourite), 60.0))
        torch.testing.assert_close(only(fast(x_of(2, 7))), only(model(x_of(2, 7))))
