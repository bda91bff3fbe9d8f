"""Experts, and members of fused ensembles, dealt to two processes: they train as in one process.

Both processes run the functions `on_rank_...` of this file once; the tests read what they give.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any, cast

import pytest
import torch
from across_ranks import apart, gap, gradients, own_rows, said, shared_folder, whole
from mixtures import WIDTH, IndexAdd, Plain
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fxopt
from fxopt.layers import MixtureOfExperts

BY_ROWS, BY_SUMS = "parallel{shard=2,experts=true}", "parallel{tensor=2}"
BOTH, FUSE = (BY_ROWS, BY_SUMS), "fuse_experts{lowering=loop}"
GROUPED = ("Mixtral", "Olmoe", "Qwen3Moe")
CASES = [
    ("layers", BY_ROWS), ("layers", BY_SUMS), ("loop", f"{FUSE},{BY_ROWS}"), ("loop", f"{FUSE},{BY_SUMS}"),
    ("qwen", f"{FUSE},{BY_ROWS}"), *((f"{kind}, grouped", f"{FUSE},{way}") for kind in GROUPED for way in BOTH),
    ("ensembles", f"fuse_ensembles{{lowering=bmm}},{BY_SUMS}"),
]  # fmt: skip


class Layers(nn.Module):
    """Two mixtures of fxopt, one with biases and a shared expert, one with a capacity, and their losses."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.one = MixtureOfExperts(8, 12, experts, 2, shared_experts=1, bias=True)
        self.two = MixtureOfExperts(8, 12, experts, 1, gated=False, activation="gelu", capacity_factor=1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.into(x))
        y, router = self.one(x, return_router=True)
        z, second = self.two(x + y, return_router=True)
        losses = router.load_balancing_loss + router.z_loss + second.load_balancing_loss
        return x + y + z, cast("Tensor", losses)


class Loop(nn.Module):
    """Mixtures as people write them, with biases, between layers that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mixture = IndexAdd(Plain)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.down(torch.relu(self.up(x)))
        y, weights = self.mixture(x)
        return x + y, weights.square().mean()


class Ensembles(nn.Module):
    """Members of one input and of their own, joined in each way, between layers that can be split."""

    def __init__(self, members: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, 6)) for _ in range(members)
        )
        self.own = nn.ModuleList(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(members))
        self.added = nn.ModuleList(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5)) for _ in range(members))
        self.last = nn.ModuleList(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(members))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.down(torch.relu(self.up(x)))
        x = torch.stack([head(x) for head in self.heads]).mean(0)
        own = torch.cat([head(x[..., :3] * (number + 1)) for number, head in enumerate(self.own)], -1)
        added = sum(head(x) for head in self.added)
        ends = [head(added) for head in self.last]
        pairs = [one * other for one, other in zip(ends, reversed(ends), strict=True)]
        return torch.cat([own, added], -1), (pairs[0] - pairs[1] + ends[2]).square().mean()


def ensembles() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Ensembles().double().train(), torch.randn(6, 4, 6, dtype=torch.double)


def layers() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Layers().double().train(), torch.randn(10, 3, 6, dtype=torch.double)


def loop() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Loop().double().train(), torch.randn(8, 5, WIDTH, dtype=torch.double)


def qwen() -> tuple[nn.Module, Tensor]:
    import transformers as tf

    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_experts=4, num_experts_per_tok=2, use_cache=False, vocab_size=32,
        bos_token_id=1, eos_token_id=2, output_router_logits=True, router_aux_loss_coef=0.1,
        experts_implementation="eager",
    )  # fmt: skip
    return tf.Qwen3MoeForCausalLM(config).double().train(), torch.randint(3, 32, (4, 6))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    if x.dtype == torch.long:
        return model(input_ids=x, labels=x).loss
    y, extra = model(x)
    return y.square().mean() + extra


def wanted(model: nn.Module, x: Tensor, parts: int) -> None:
    """Leave the mean of the gradients of the losses of each part of a batch: the losses of routers are no sums."""
    for rank in range(parts):
        (loss_of(model, x[rank::parts]) / parts).backward()


def grouped(kind: str) -> tuple[nn.Module, Tensor]:
    """As transformers computes it by default: by products of groups, which torch has not in float64."""
    import transformers as tf

    torch.manual_seed(0)
    config = getattr(tf, f"{kind}Config")(
        hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, num_experts=4, use_cache=False, vocab_size=32, output_router_logits=True, bos_token_id=1,
        eos_token_id=2, router_aux_loss_coef=0.1, num_experts_per_tok=2,
        **({"moe_intermediate_size": 12} if kind == "Qwen3Moe" else {}),
    )  # fmt: skip
    return getattr(tf, f"{kind}ForCausalLM")(config).train(), torch.randint(3, 32, (4, 6))


MODELS = {
    "layers": layers, "loop": loop, "qwen": qwen, "ensembles": ensembles,
    **{f"{kind}, grouped": partial(grouped, kind) for kind in GROUPED},
}  # fmt: skip


def on_rank_trained() -> dict[str, Any]:
    """A step of SGD without clipping shows the gradients, under the original names."""
    warnings.simplefilter("ignore")
    found = dict[str, Any]()
    for make, text in CASES:
        parts = 2 if "shard" in text else 1
        model, x = MODELS[make]()
        plain, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
        own, theirs = (torch.optim.SGD(each.parameters(), 1.0, 0.9, foreach=True) for each in (model, plain))
        inputs = {"input_ids": x, "labels": x} if x.dtype == torch.long else x
        fast = fxopt.optimize(model, text, example_inputs=inputs, optimizer=own, measure=False)
        wanted(plain, x, parts)
        loss_of(fast, own_rows(x) if parts == 2 else x).backward()
        errors = {"norm": gap(*(whole(nn.utils.clip_grad_norm_(each.parameters(), 9.9)) for each in (fast, plain)))}
        own.step(), theirs.step()
        errors["state"] = apart(fxopt.state_dict(fast), plain.state_dict())
        named = set(get_optimizer_state_dict(fast, own)["state"]) ^ set(dict(fast.named_parameters()))
        fast.eval(), plain.eval()
        with torch.no_grad():
            errors["evaluation"] = gap(loss_of(fast, x), loss_of(plain, x))
        errors["loaded"] = reloaded(fast, start, plain.state_dict())
        found[f"{make}, {text}"] = errors, local_sizes(fast), named
    return found


def reloaded(fast: nn.Module, start: dict[str, Tensor], trained: dict[str, Tensor]) -> float:
    """Save parts, go back to the start by whole tensors, and read the parts again."""
    folder = shared_folder()
    checkpoint.save({"model": fxopt.state_dict(fast, gather=False)}, checkpoint_id=folder)
    fxopt.load_state_dict(fast, start)
    error = apart(fxopt.state_dict(fast), start)
    fxopt.load_sharded(fast, folder, key="model")
    return max(error, apart(fxopt.state_dict(fast), trained))


def local_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Return how many experts a process has, of how many, in each stack of matrices."""
    stacks = (parameter for parameter in model.parameters() if parameter.ndim == 3)
    return [(len(cast("Any", stack).to_local()), len(stack)) for stack in stacks]


def on_rank_uneven() -> list[float]:
    """All tokens to the experts of one process; a process with few tokens, and with none."""
    errors = list[float]()
    model, x = layers()
    second = cast("Layers", model).two.router
    with torch.no_grad():
        second.weight[2:] -= 50
        second.weight[:2] += 50
    second.capacity_factor = None
    plain = copy.deepcopy(model)
    fast = fxopt.optimize(model, BY_ROWS, example_inputs=x, measure=False)
    for count in (10, 8, 0):
        fast.zero_grad(), plain.zero_grad()
        cuts = (x[count:], x[:count])
        (sum(plain(part)[0].square().sum() for part in cuts) / 2).backward()
        fast(cuts[distributed.get_rank()])[0].square().sum().backward()
        errors.append(apart(gradients(fast), gradients(plain)))
    return errors


def on_rank_planned_on_meta() -> float:
    """A model without weights: each process reads the experts that it has."""
    (plain, x), folder = layers(), shared_folder()
    if distributed.get_rank() == 0:
        checkpoint.save(plain.state_dict(), checkpoint_id=folder, no_dist=True)
    distributed.barrier()
    with torch.device("meta"):
        model = Layers().double()
    fast = fxopt.optimize(model, BY_ROWS, example_inputs=x)
    fxopt.load_sharded(fast, folder)
    return gap(fast(x)[0].detach(), plain(x)[0].detach())


def on_rank_refused() -> list[str]:
    (model, x), (written, rows) = layers(), loop()
    return [
        said(lambda: fxopt.optimize(Layers(3).double(), BY_ROWS, example_inputs=x)),
        said(lambda: fxopt.optimize(Layers(3).double(), BY_SUMS, example_inputs=x)),
        said(lambda: fxopt.optimize(written, BY_ROWS, example_inputs=rows)),
        said(lambda: fxopt.optimize(model, (BY_ROWS, BY_SUMS)[distributed.get_rank()], example_inputs=x)),
    ]


def on_rank_left_whole() -> str:
    model, x = Ensembles(3).double(), ensembles()[1]
    fused = fxopt.optimize(model, f"fuse_ensembles{{lowering=bmm}},{BY_SUMS}", example_inputs=x, measure=False)
    return str(fxopt.report(fused))


def test_an_ensemble_that_does_not_divide_stays_whole(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert "its 3 members do not divide by 2 processes" in each["left_whole"]


def test_dealt_experts_and_members_train_as_in_one_process(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        for name, (errors, sizes, named) in each["trained"].items():
            assert not named, (name, named)
            assert max(errors.values()) < (1e-5 if "grouped" in name else 1e-9), (name, errors)
            assert sizes and set(sizes) == {(2, 4)}, (name, sizes)
            assert len(sizes) == (8 if "ensembles" in name else len(sizes)), "all four ensembles are split"


def test_processes_may_have_few_tokens_or_none(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert max(each["uneven"]) < 1e-9


def test_a_model_without_weights_gets_its_experts_from_a_checkpoint(of_ranks: list[dict[str, Any]]) -> None:
    assert max(each["planned_on_meta"] for each in of_ranks) < 1e-12


def test_what_cannot_be_dealt_is_refused(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        by_rows, by_sums, loops, differ = each["refused"]
        assert "'one': its 3 experts do not divide by 2 processes; leave experts out" in by_rows
        assert "no layers can be split; leave tensor out; 'one': its 3 experts do not divide by 2 proc" in by_sums
        assert "the model has no experts that fuse_experts computes together; list fuse_experts" in loops
        assert "nothing" not in differ


@pytest.mark.parametrize(
    ("options", "reason"),
    [("experts=true", "experts=true does not work with shard=1"),
     ("shard=2,experts=true,param_dtype=bfloat16", "experts=true does not work with param_dtype")],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options: str, reason: str) -> None:
    with pytest.raises(fxopt.UsageError, match=reason):
        fxopt.optimize(nn.Linear(2, 2), f"parallel{{{options}}}", example_inputs=torch.randn(2, 2))
