"""tensor_parallel in one process: which layers are split together, and what keeps layers whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.errors import OrderError, UsageError
from fxopt.passes.pipeline import parse
from fxopt.tracing.program import capture_program
from fxopt.transforms.tensor_parallel import TensorParallel
from fxopt.transforms.tensor_parallel.tensor_parallel import blocks_in

X = torch.ones(2, 5, 16)


class Attention(nn.Module):
    """Attention that is written out, with what a subclass puts between its layers."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, 16 // heads
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.size).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.transpose(-1, -2) / self.size**0.5, -1)
        return F.dropout(weights, 0.1, self.training) @ v

    def join(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 1, 3).contiguous().flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.join(self.attend(self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x)))))


def found(model: nn.Module, processes: int = 2, x: Any = X) -> tuple[list[tuple[list[str], list[str]]], dict[str, str]]:
    """Return columns and rows of each block, and the refusals."""
    blocks, refusals = blocks_in(capture_program(model, x), processes)
    return [(b.columns, b.rows) for b in blocks], {str(refusal.at): refusal.reason for refusal in refusals}


def reason(model: nn.Module, processes: int = 2) -> str:
    blocks, refusals = found(model, processes)
    assert blocks == [], "this one is to be refused"
    return " | ".join(refusals.values())


def test_attention_that_is_written_out() -> None:
    assert found(Attention()) == ([(["q", "k", "v"], ["o"])], {})
    assert found(Attention(), processes=4) == ([(["q", "k", "v"], ["o"])], {})


def test_mlps_with_and_without_a_gate() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24, bias=False), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x) * 2)

    assert found(Gated()) == ([(["gate", "up"], ["down"])], {})
    chain = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 6), nn.Linear(6, 2))
    assert found(chain) == ([(["0"], ["2"]), (["4"], ["5"])], {})


def test_heads_that_do_not_divide() -> None:
    assert "2 heads do not divide by 4 processes ('view" in reason(Attention(heads=2), processes=4)
    program = capture_program(Attention(heads=1), X)
    message = r"'q' cannot be split: 1 head does not divide by 2 processes \('view'\); give another number of processes"
    with pytest.raises(UsageError, match=message):
        blocks_in(program, 2, must_divide=True)


def test_one_head_of_keys_keeps_layers_whole() -> None:
    class Shared(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = nn.Linear(16, 4), nn.Linear(16, 4)

    blocks, refusals = blocks_in(capture_program(Shared(), X), 2, must_divide=True)
    assert blocks == []
    (reason,) = (refusal.reason for refusal in refusals if refusal.at == "q")
    assert reason.startswith("1 head of keys and values does not divide by 2 processes ('view")


def test_outputs_that_do_not_divide() -> None:
    assert reason(nn.Sequential(nn.Linear(16, 9), nn.Linear(9, 2))) == "its 9 outputs do not divide by 2 processes"


def test_numbers_that_are_written_between_two_layers_are_changed() -> None:
    class Literal(Attention):
        def split(self, x: Tensor) -> Tensor:
            return x.view(*x.shape[:-1], self.heads, self.size).transpose(1, 2)

    class Stored(Attention):
        def join(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2).reshape(*x.transpose(1, 2).shape[:2], 16)

    for model, count, share in ((Literal(), 3, 2), (Stored(), 1, 8)):
        (block,), _ = blocks_in(capture_program(model, X), 2)
        ((graph,),) = (graphs.values() for graphs in block.numbers.values())
        assert [numbers[-1] for (numbers,) in graph.values()] == [share] * count


def test_what_cannot_be_written_otherwise_is_refused() -> None:
    class Fused(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k = self.q(x).split(8, -1)
            return self.o(torch.cat([q, k], -1))

    class PerHead(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4, 1, 1))

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(1, 4, 5, 5) + self.scale)

    class Counting(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().attend(q, k, v) / torch.full((), q.shape[1])

    assert "(cat) works along the dimension that is split" in reason(Fused())
    assert "has a mask for each head" in reason(PerHead())
    assert "reads the size of a part" in reason(Counting())


def test_what_needs_the_whole_keeps_layers_whole() -> None:
    norm = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    assert found(norm) == ([], {}), "nothing is split, and nothing nearly"

    class Averaged(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q + k + v).mean(1, keepdim=True).expand_as(q)

    assert "(mean) needs the whole of it" in reason(Averaged())


@pytest.mark.parametrize("training", [True, False])
def test_what_one_mode_needs_the_whole_for_keeps_layers_whole(training: bool) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.up(x))
            return self.down(torch.cumsum(x, -1) if self.training else x)

    class Swapped(Centred):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.down, self.up) if self.training else (self.up, self.down)
            return second(torch.relu(first(x)))

    assert "(cumsum) needs the whole of it" in reason(Centred().train(training))
    assert "is called in training and in evaluation, which would split it" in reason(Swapped().train(training))


def test_parameters_that_others_use_stay_whole() -> None:
    tied = Attention()
    tied.o.weight = tied.q.weight
    assert found(tied)[0] == []

    class Reading(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.q.bias.sum()

    assert all("q" not in columns for columns, _ in found(Reading())[0])


def test_a_layer_that_is_called_twice_is_split_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.down(torch.relu(self.up(x)))))

    assert found(Twice()) == ([(["up"], ["down"])], {})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.relu(self.layer(x)))

    assert reason(Both()) == "'layer' is called at several places, which would split it differently"


def test_without_a_process_group_the_command_is_given() -> None:
    with pytest.raises(UsageError, match="pass 'tensor_parallel' works on several processes, and there is no process"):
        fxopt.optimize(Attention(), "tensor_parallel", example_inputs=X)


@pytest.mark.parametrize("passes", ["tensor_parallel,fsdp", "fsdp,tensor_parallel"])
def test_not_together_with_data_parallel_passes(passes: str) -> None:
    with pytest.raises(OrderError, match="tensor_parallel"):
        fxopt.optimize(Attention(), passes, example_inputs=X)


def test_it_has_no_options() -> None:
    assert parse(str(TensorParallel())) == (TensorParallel(),)
