"""tensor_parallel on layers that compute several things, and on vocabularies: what is found, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fused_layers import SPELLINGS, Fused, Language
from torch import Tensor, nn

from fxopt.passes.sites import Refusal
from fxopt.tracing.program import capture_program
from fxopt.transforms.tensor_parallel import blocks_in, vocabularies_in

X = torch.ones(2, 5, 16)
IDS = torch.zeros(2, 5, dtype=torch.long)


def block_of(model: nn.Module, processes: int = 2) -> Any:
    (block,), _ = blocks_in(capture_program(model, X), processes)
    return block


def reason(model: nn.Module, processes: int = 2) -> str:
    blocks, refusals = blocks_in(capture_program(model, X), processes)
    assert not blocks, "this one is to be refused"
    return " | ".join(str(refusal.reason) for refusal in refusals)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_parts_of_a_layer_are_found(spelling: str) -> None:
    make, name, sizes = SPELLINGS[spelling]
    block = block_of(make())
    assert name in block.columns
    assert block.sections == ({name: sizes} if sizes else {})
    assert block.sections or block.numbers, "something has to change, for the code counts heads"


def test_parts_that_do_not_divide() -> None:
    assert "4 heads do not divide by 8 processes" in reason(Fused(), 8)
    assert "divides at 16, no multiple of 3 processes" in reason(Fused(), 3)


def test_parts_that_overlap_are_refused() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.other = nn.Linear(16, 24), nn.Linear(12, 16), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            gate, up = y.chunk(2, -1)
            return self.down(F.silu(gate) * up) + self.other(y)

    assert "parts of its outputs are read that overlap" in reason(Overlapping())


def test_code_that_runs_for_parts_and_for_whole_tensors_is_refused() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(*x.shape[:-1], 2, 6).flatten(-2)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.halves = nn.Linear(16, 12), nn.Linear(12, 12), Halves()

        def forward(self, x: Tensor) -> Tensor:
            return self.halves(self.down(self.halves(self.up(x))))

    assert "is run for parts, and for whole tensors" in reason(Twice())


def test_hooks_that_would_see_parts_leave_layers_whole() -> None:
    def model() -> Any:
        return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    for number in range(3):
        hooked = model()
        hooked[number].register_forward_hook(lambda *given: given[2] - given[2].amax(-1, keepdim=True))
        if number == 2:
            hooked[number].register_forward_pre_hook(lambda _, given: given)
        assert f"hooks of '{number}' would see a part" in reason(hooked)
    around = nn.Sequential(model())
    around[0].register_forward_hook(lambda *given: given[2] * 2)
    assert block_of(around).layers == ["0.0", "0.2"], "this hook sees all"


def test_a_layer_of_several_parts_and_several_names_stays_whole() -> None:
    model = nn.Sequential(Fused(), Fused())
    model[1].qkv = model[0].qkv
    assert "'0.qkv' is in the model under several names" in reason(model)


def test_a_tuple_of_parts_as_one_argument_is_refused() -> None:
    class Reversed(Fused):
        def heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
            return super().heads(torch.cat(qkv.split(16, -1)[::-1], -1))

    assert "takes several parts as one argument" in reason(Reversed())


def vocabulary_of(model: nn.Module, *inputs: Any, processes: int = 2, even: bool = False) -> Any:
    (found,) = vocabularies_in(capture_program(model, inputs), processes, (), even=even)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_computed_of_shares_of_logits(tied: bool) -> None:
    found = vocabulary_of(Language(tied=tied), IDS, IDS)
    assert (found["embeddings"], found["columns"]) == (["words"], ["head"])
    ((edits,),) = (graphs.values() for graphs in found["logits"].values())
    assert len(edits["losses"]) == 1
    assert "gathers" not in edits


def test_logits_are_gathered_where_all_of_them_are_needed() -> None:
    found = vocabulary_of(Language(), IDS)
    ((edits,),) = (graphs.values() for graphs in found["logits"].values())
    assert list(edits) == ["gathers"]
    ((users,),) = ([*edits["gathers"].values()],)
    assert users == ["output"]


def test_logits_that_are_written_to_are_gathered_first() -> None:
    class Without(Language):
        def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
            logits = super().forward(ids).clone()
            logits[..., 0] = -10.0
            return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    class Scaled(Language):
        def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
            loss = super().forward(ids, ids)
            loss *= 2
            return loss

    for make, key in ((Without, "gathers"), (Scaled, "losses")):
        ((edits,),) = (graphs.values() for graphs in vocabulary_of(make(), IDS)["logits"].values())
        assert key in edits and len(edits.keys() & {"gathers", "losses"}) == 1


def test_hooks_of_heads_and_losses_see_all_logits() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head, self.loss = nn.Embedding(65, 16), nn.Linear(16, 65), nn.CrossEntropyLoss()

        def forward(self, ids: Tensor) -> Tensor:
            return self.loss(self.head(self.words(ids)).flatten(0, 1), ids.flatten())

    def hook(*given: Any) -> None:
        """Look at what is computed."""

    model = Hooked()
    model.loss.register_forward_hook(hook)
    ((edits,),) = (graphs.values() for graphs in vocabulary_of(model, IDS)["logits"].values())
    assert list(edits) == ["gathers"]
    model.head.register_forward_hook(hook)
    assert vocabulary_of(model, IDS)["columns"] == []


def test_the_loss_of_transformers() -> None:
    import transformers as tf

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tf.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=63, use_cache=False, tie_word_embeddings=True)
    program = capture_program(tf.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS})
    (found,) = vocabularies_in(program, 2, ())
    assert not isinstance(found, Refusal)
    (edits,) = found["logits"][""].values()
    assert len(edits["losses"]) == 1
    assert list(edits["gathers"].values()) == [["output"]] or len(edits["gathers"]) == 1, "the logits are returned, too"
    assert edits["numbers"], "rows of logits are as wide as a share"


def test_vocabularies_that_stay_whole() -> None:
    few = vocabulary_of(Language(4), IDS, processes=3)
    assert few.reason == "its 4 rows are too few for 3 processes"
    uneven = vocabulary_of(Language(), IDS, even=True)
    assert uneven.reason == "its 65 rows do not divide by 2 processes, which sharding needs"

    class Reading(Language):
        def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
            return F.linear(self.words(ids), self.words.weight)

    assert not list(vocabularies_in(capture_program(Reading(), IDS), 2, ()))
