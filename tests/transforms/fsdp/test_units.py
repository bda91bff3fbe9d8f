"""fsdp in one process: which modules are units and which are not, the options, and what is checked before any work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed, nn

import fxopt
from fxopt.errors import UsageError
from fxopt.passes.pipeline import parse
from fxopt.passes.sites import Numerics, Refusal
from fxopt.tracing.program import capture_program
from fxopt.transforms.fsdp import Fsdp


class Block(nn.Module):
    def __init__(self, width: int = 8, inner: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Embedding, blocks, a norm, a head."""

    def __init__(self, *blocks: nn.Module, words: int = 30, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.blocks = nn.ModuleList(blocks or [Block(), Block(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


IDS = torch.arange(6).reshape(2, 3)


def found(model: nn.Module, inputs: object = IDS, **options: int) -> tuple[list[list[str]], dict[str, str]]:
    """Return the modules of each unit, and the refusals."""
    items = list(Fsdp(**options).find(capture_program(model, inputs)))
    units = [item.data["modules"] for item in items if not isinstance(item, Refusal)]
    return units, {str(item.at): item.reason for item in items if isinstance(item, Refusal)}


BLOCKS = [["blocks.0"], ["blocks.1"], ["blocks.2"]]


def test_repeated_blocks_are_units_and_the_root_has_the_rest() -> None:
    assert found(Stack(words=20)) == ([*BLOCKS, [""]], {})


def test_large_layers_are_units_where_the_root_had_more_than_half_of_all_or_than_the_size() -> None:
    with_layers = [["embed"], *BLOCKS, ["head"], [""]]
    assert found(Stack(words=30)) == (with_layers, {})
    assert found(Stack(words=20), unit_size=200) == (with_layers, {})
    assert found(Stack(words=20), unit_size=400)[0] == [["blocks.0", "blocks.1"], ["blocks.2"], [""]]


def test_tied_tensors_stay_together() -> None:
    assert found(Stack(tied=True)) == ([*BLOCKS, [""]], {})
    units, refusals = found(Stack(tied=True), unit_size=200)
    assert units == [*BLOCKS, [""]]
    assert refusals == {
        "embed": "'embed.weight' is tied to 'head.weight': one unit around both has it",
        "head": "'head.weight' is tied to 'embed.weight': one unit around both has it",
    }


def test_blocks_over_the_size_are_opened_and_small_ones_joined() -> None:
    large = Stack(*(Block(inner=40) for _ in range(3)))
    assert found(large, unit_size=500)[0] == [
        ["embed"], ["blocks.0.up"], ["blocks.0.down"], ["blocks.1.up"], ["blocks.1.down"], ["blocks.2.up"],
        ["blocks.2.down"], ["head"], [""],
    ]  # fmt: skip
    assert found(Stack(), unit_size=300)[0][1:3] == [["blocks.0", "blocks.1"], ["blocks.2"]]
    mixed = Stack(Block(), Block(), Block(inner=40), Block(inner=40))
    assert found(mixed)[0][:3] == [["blocks.0", "blocks.1"], ["blocks.2"], ["blocks.3"]], "no larger than the largest"


def test_plain_layers_are_units_where_there_are_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    assert found(model, torch.ones(2, 8))[0] == [["2"], [""]]


def test_stores_of_fused_tensors_are_no_units() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(8, 8)
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.trunk(x)
            return torch.stack([head(x) for head in self.heads])

    x = torch.ones(2, 8)
    assert found(Heads(), x)[0] == [["heads.0"], ["heads.1"], ["heads.2"], ["heads.3"], [""]]
    fast = fxopt.optimize(Heads(), "fuse_ensembles{lowering=bmm}", example_inputs=x, measure=False)
    assert next(iter(Fsdp().find(fxopt.Program(fast)))).data == {"modules": [""]}  # type: ignore[union-attr]


def test_a_tensor_that_another_module_reads_keeps_its_module_from_being_a_unit() -> None:
    class Reading(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.blocks[1].up.bias.sum()

    units, refusals = found(Reading())
    assert ["blocks.1"] not in units and ["blocks.0"] in units
    assert refusals["blocks.1"] == "the graph of (root) reads its 'up.bias'"


def test_a_module_whose_part_is_called_from_outside_is_no_unit() -> None:
    class Calling(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.blocks[1].up(self.embed(x)).sum()

    units, refusals = found(Calling())
    assert ["blocks.1"] not in units and ["blocks.1.up", "blocks.1.down"] in units
    assert refusals["blocks.1"] == "(root) calls its 'up' itself"


def test_modules_that_never_run_are_no_units() -> None:
    model = Stack()
    model.spare = nn.ModuleList([Block(), Block()])
    assert found(model) == found(Stack())


class Opaque(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if float(x.detach().sum()) > -1e9 else x
        return self.head(self.norm(x))


def test_calls_by_a_module_without_a_graph_are_seen_when_it_runs() -> None:
    program = capture_program(Opaque(), IDS)
    assert "" in program.opaque, "this test is for a root without a graph"
    units = [item.data["modules"] for item in Fsdp().find(program)]  # type: ignore[union-attr]
    assert units == [["embed"], ["blocks.0"], ["blocks.1"], ["blocks.2"], ["head"], [""]]
    units, refusals = found(Opaque(), None)
    assert units == [[""]]
    assert refusals["blocks.0"] == "nothing shows whether it is called; give example inputs"


# -- what is checked before ----------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Be the one process of a process group."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_without_a_process_group_the_command_is_given() -> None:
    with pytest.raises(UsageError, match="pass 'fsdp' works on several processes, and there is no process group; run"):
        fxopt.optimize(Stack(), "fsdp", example_inputs=IDS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("param_dtype=int8", "param_dtype=torch.int8; give one with a floating point"),
        ("unit_size=0", "unit_size=0; give a number of parameters"),
    ],
)
def test_wrong_options(alone: None, options: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fxopt.optimize(Stack(), f"fsdp{{{options}}}", example_inputs=IDS)


def test_what_fsdp2_cannot_take(alone: None) -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match=r"'weight' is not contiguous, .* call model\.to"):
        fxopt.optimize(convolution, "fsdp", example_inputs=torch.ones(1, 3, 5, 5))


def test_one_process_alone_is_sharded_into_one_part(alone: None) -> None:
    model = Stack()
    fast = fxopt.optimize(model, "fsdp", example_inputs=IDS)
    assert type(fast).__mro__[2].__name__ == "Stack" and isinstance(fast, Stack)
    torch.testing.assert_close(fast(IDS), model(IDS))
    assert list(fxopt.state_dict(fast)) == list(model.state_dict())
    assert "7 rewrites" not in str(fxopt.report(fast)) and "fsdp" in str(fxopt.report(fast))


@given(
    st.builds(
        Fsdp,
        param_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
        reduce_dtype=st.sampled_from([None, torch.float32]),
        reshard_after_forward=st.booleans() | st.integers(2, 64),
        offload_policy=st.sampled_from([None, "cpu"]),
        forward_prefetch=st.integers(0, 3),
        backward_prefetch=st.integers(0, 3),
        unit_size=st.none() | st.integers(1, 10**12),
        budget=st.floats(1e-6, 1),
    )
)
def test_options_are_text(pass_: Fsdp) -> None:
    assert parse(str(pass_)) == (pass_,)
    assert pass_.numerics is (
        Numerics.REASSOCIATED if pass_.param_dtype is pass_.reduce_dtype else Numerics.APPROXIMATE
    )
