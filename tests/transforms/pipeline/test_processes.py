"""Two processes train models in stages: like one process on the whole batch, with every schedule.

Both processes run the functions `on_rank_...` of this file once; the tests read what they give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from across_ranks import said, shared_folder
from torch import Tensor, distributed, nn
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

import fxopt
from fxopt.transforms.pipeline import PipelineModule

ROWS = 8

Made = tuple[nn.Module, dict[str, Tensor], Tensor, Callable[[Any, Any], Tensor]]
"""A model in float64, a batch, a target and a loss."""


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1), norm(4)
        self.second, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.relu(self.norm(self.first(x))))
        y += x
        return self.relu(y)


class Skips(nn.Module):
    """A ResNet whose last blocks see what the first ones gave."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)
        self.down = nn.ModuleList(Block(norm) for _ in range(2))
        self.up = nn.ModuleList(Block(norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), list[Tensor]()
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(x + skips.pop())
        return self.head(x.mean((2, 3)))


def token_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def roberta() -> Made:
    config = RobertaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(ROWS, 7, dtype=torch.long)
    mask[:, 5:] = 0
    batch = {"input_ids": torch.randint(3, 50, (ROWS, 7)), "attention_mask": mask}
    return RobertaForMaskedLM(config), batch, torch.randint(3, 50, (ROWS, 7)), token_loss


def gpt2() -> Made:
    config = GPT2Config(
        vocab_size=50, n_embd=32, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(3, 50, (ROWS, 7))}
    return GPT2LMHeadModel(config), batch, torch.randint(3, 50, (ROWS, 7)), token_loss


def resnet(norm: Callable[[int], nn.Module] = lambda size: nn.GroupNorm(2, size)) -> Made:
    return Skips(norm), {"x": torch.randn(ROWS, 3, 6, 6).double()}, torch.randint(0, 3, (ROWS,)), F.cross_entropy


def frozen() -> Made:
    return resnet(nn.BatchNorm2d)


def made(make: Callable[[], Made]) -> Made:
    torch.manual_seed(0)
    model, batch, target, loss = make()
    model.double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model, batch, target, loss


def staged(model: nn.Module, batch: object, passes: str) -> PipelineModule:
    fast = fxopt.optimize(model, passes, example_inputs=batch)
    assert isinstance(fast, PipelineModule)
    return fast


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in found if p.grad is not None}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor], factor: float = 1.0) -> float:
    return max(float((tensor - factor * other[name]).abs().max()) for name, tensor in one.items())


# -- what the processes do -----------------------------------------------------------------------------------------

CASES = (
    (roberta, "interleaved"), (gpt2, "1f1b"), (gpt2, "gpipe"), (resnet, "interleaved"), (frozen, "1f1b"),
    (gpt2, "zero_bubble"), (resnet, "zero_bubble"), (gpt2, "zero_bubble_v"), (resnet, "zero_bubble_v"),
)  # fmt: skip


class Scaled(nn.Module):
    """Its forward, which has to be cut, is another one in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 2 if self.training else layer(x)
        return x


def on_rank_ways() -> dict[str, Any]:
    """Rows with and without padding, and the other mode: the model's forward decides by these."""
    model, padded, target, loss = made(roberta)
    full = {**padded, "attention_mask": torch.ones_like(padded["attention_mask"])}
    mixed = {**padded, "attention_mask": torch.cat([padded["attention_mask"][:4], full["attention_mask"][4:]])}
    both = staged(model, [padded, full], "pipeline")
    found: dict[str, Any] = {"batches": []}
    for batch in (padded, full, mixed):
        both.zero_grad(), model.zero_grad()
        got, whole = both.step(batch, target, loss), loss(model(**batch), target)
        whole.backward()
        found["batches"].append(max(float(abs(got - whole.detach())), farthest(gradients(both), gradients(model))))
    found["one kind"] = said(lambda: staged(made(roberta)[0], padded, "pipeline").step(mixed, target, loss))
    scaled, x = Scaled().double(), torch.randn(ROWS, 4).double()
    torch.manual_seed(0)
    twin = staged(scaled, x, "pipeline")
    scaled.load_state_dict(fxopt.state_dict(twin))
    with torch.no_grad():
        found["modes"] = [float((twin.train(mode)(x) - scaled.train(mode)(x)).abs().max()) for mode in (True, False)]
    found["mode of a step"] = float(abs(twin.eval().step(x, x, F.mse_loss) - F.mse_loss(scaled.eval()(x), x).detach()))
    return found


class Heads(nn.Module):
    """An ensemble on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return torch.stack([head(x) for head in self.heads]).mean(0)


def on_rank_together() -> dict[str, Any]:
    """Fused before, with an optimizer that has been used: its moments move with the parameters of this rank."""
    torch.manual_seed(0)
    model, x, target = Heads().double(), torch.randn(ROWS, 8).double(), torch.randn(ROWS, 2).double()
    plain = Heads().double()
    plain.load_state_dict(model.state_dict())
    optimizer, theirs = (torch.optim.AdamW(each.parameters(), 0.1) for each in (model, plain))
    for each, stepper in ((model, optimizer), (plain, theirs)):
        F.mse_loss(each(x), target).backward()
        stepper.step()
        stepper.zero_grad()
    passes = "fuse_ensembles{lowering=bmm},pipeline"
    fast = fxopt.optimize(model, passes, example_inputs=x, optimizer=optimizer, measure=False)
    assert isinstance(fast, PipelineModule)
    fast.step(x, target, F.mse_loss)
    optimizer.step()
    F.mse_loss(plain(x), target).backward()
    theirs.step()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    state = fxopt.state_dict(fast)
    return {
        "fused": [d.status for d in fxopt.plan(fast).decisions],
        "names": list(state) == list(plain.state_dict()),
        "held": held == {id(p) for p in fast.parameters()} == {id(p) for p in optimizer.state},
        "trained": farthest(plain.state_dict(), state),
        "loaded": str(fast.load_state_dict(model.state_dict())),
    }


def on_rank_trained() -> dict[str, dict[str, Any]]:
    return {f"{make.__name__} {schedule}": trained(make, schedule) for make, schedule in CASES}


def trained(make: Callable[[], Made], schedule: str) -> dict[str, Any]:
    """Train for one step, accumulate a second one, and compare with one process on the whole batch."""
    model, batch, target, loss = made(make)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast = staged(model, batch, f"pipeline{{schedule={schedule},microbatches=4}}")
    found: dict[str, Any] = {"stages": fast.stages, "untouched": farthest(model.state_dict(), before)}
    whole = loss(model(**batch), target)
    whole.backward()
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    found["loss"] = float(abs(fast.step(batch, target, loss) - whole.detach()))
    found["gradients"] = farthest(gradients(fast), expected)
    fast.step(batch, target, loss)
    found["accumulated"] = farthest(gradients(fast), expected, 2.0)
    found["has gradients"] = sorted(gradients(fast)) == sorted(
        n for n, _ in fast.named_parameters(remove_duplicate=False)
    )
    found["own"] = set(fast.state_dict()) < set(before)
    loss(model(**batch), target).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    found["norm"] = float(abs(fast.clip_grad_norm_(1.0) - norm))
    found["clipped"] = farthest(gradients(fast), gradients(model))
    for each in (model, fast):
        torch.optim.AdamW(each.parameters(), 0.01).step()
    other, *_ = made(make)
    found["loads"] = str(other.load_state_dict(fxopt.state_dict(fast)))
    found["trained"] = farthest(other.state_dict(), model.state_dict())
    other.eval(), fast.eval(), model.eval()
    with torch.no_grad():
        one, two = fast(**batch), other(**batch)
    found["evaluated"] = float((getattr(one, "logits", one) - getattr(two, "logits", two)).abs().max())
    found["loaded"] = str(fast.load_state_dict(before)), farthest(fxopt.state_dict(fast), before)
    return found


def on_rank_used() -> dict[str, Any]:
    """What else is done with a model in stages."""
    model, batch, target, loss = made(gpt2)
    fast = staged(model, batch, "pipeline")
    found: dict[str, Any] = {"text": str(fxopt.plan(fast).decisions[0].detail), "config": fast.config.n_layer == 3}
    found["elsewhere"] = sorted(
        str(m) for n, m in fast.named_modules() if type(m).__name__ == "Elsewhere" and "h.0" in n
    )
    ids = batch["input_ids"]
    found["other length"] = []
    for size in (7, 5):
        short = {"input_ids": ids[:, :size]}
        fast.zero_grad(), model.zero_grad()
        got = fast.step(short, target[:, :size], loss)
        whole = loss(model(**short), target[:, :size])
        whole.backward()
        found["other length"].append(max(float(abs(got - whole)), farthest(gradients(fast), gradients(model))))
    weights = torch.ones(ROWS, 7).double()
    weights[:3] = 0.0

    def sums(output: Any, target: tuple[Tensor, Tensor]) -> Tensor:
        losses = F.cross_entropy(output.logits.transpose(1, 2), target[0], reduction="none")
        return (losses * target[1]).sum() / weights.sum()

    fast.zero_grad(), model.zero_grad()
    got, whole = fast.step(batch, (target, weights), sums, reduction="sum"), sums(model(**batch), (target, weights))
    whole.backward()
    found["sum"] = max(float(abs(got - whole)), farthest(gradients(fast), gradients(model)))
    found["restore"] = said(lambda: fxopt.restore(fast))
    found["again"] = said(lambda: fxopt.optimize(fast, "eliminate_dead_code", example_inputs=batch))
    replayed = fxopt.optimize(model, "pipeline", example_inputs=batch, plan=fxopt.plan(fast))
    model.zero_grad()
    whole = loss(model(**batch), target)
    found["replayed"] = float(abs(replayed.step(batch, target, loss) - whole))
    path = shared_folder() / "saved.fxopt"
    fxopt.save(fast, path, factory="test_processes:plain_gpt2")
    distributed.barrier()
    loaded = fxopt.load(path, model=made(gpt2)[0])
    found["saved"] = farthest(loaded.state_dict(), fxopt.state_dict(fast))
    return found


def plain_gpt2() -> nn.Module:
    return made(gpt2)[0]


def of_other_weights() -> Made:
    """Return a model that is another one on each rank."""
    model, *rest = made(resnet)
    with torch.no_grad():
        next(model.parameters()).add_(distributed.get_rank())
    return model, *rest


def on_rank_refused() -> dict[str, str]:
    model, batch, target, loss = made(resnet)
    rank = distributed.get_rank()
    fast = staged(model, batch, "pipeline{microbatches=4}")
    x = batch["x"]

    def optimized(passes: str, make: Callable[[], Made] = resnet) -> str:
        given, inputs, *_ = made(make)
        return said(lambda: fxopt.optimize(given.train(), passes, example_inputs=inputs))

    norms, inputs, *_ = made(frozen)
    thawed = staged(norms, inputs, "pipeline").train()
    return {
        "rows": said(lambda: fast.step(x[:6], target[:6], loss)),
        "rows of the target": said(lambda: fast.step(x, target[:6], loss)),
        "rows on one rank": said(lambda: fast.step(x[: 6 + 2 * rank], target[: 6 + 2 * rank], loss)),
        "other shapes": said(lambda: fast.step(x[..., : 5 + rank], target, loss)),
        "no batch": said(lambda: fast.step(3, target, loss)),
        "stages": optimized("pipeline{stages=3}"),
        "interleaved stages": optimized("pipeline{stages=3,schedule=interleaved}"),
        "microbatches": optimized("pipeline{microbatches=1}"),
        "norms": optimized("pipeline", frozen),
        "thawed": said(lambda: thawed.step(inputs, target, loss)),
        "no inputs": said(lambda: fxopt.optimize(made(resnet)[0], "pipeline")),
        "turning": optimized("pipeline{stages=6,schedule=zero_bubble_v}"),
        "tiny": said(lambda: fxopt.optimize(nn.Linear(2, 2), "pipeline", example_inputs=torch.randn(4, 2))),
        "weights": optimized("pipeline", of_other_weights),
        "after all": str(float(fast.step(batch, target, loss)) > 0),
    }


# -- what the tests ask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "schedule"), CASES)
def test_like_one_process_on_the_whole_batch(of_ranks: list[dict[str, Any]], make: Callable[[], Made], schedule: str):
    for rank, each in enumerate(of_ranks):
        found = each["trained"][f"{make.__name__} {schedule}"]
        loop = (rank, rank + 2) if schedule in ("interleaved", "zero_bubble") else (rank,)
        assert found["stages"] == ((rank, 3 - rank) if schedule == "zero_bubble_v" else loop)
        for name in ("loss", "gradients", "accumulated", "norm", "clipped", "trained", "evaluated"):
            assert found[name] < 1e-9, name
        assert found["has gradients"] and found["own"] and found["untouched"] == 0
        assert found["loads"] == "<All keys matched successfully>"
        assert found["loaded"] == ("<All keys matched successfully>", 0.0)


def test_in_use(of_ranks: list[dict[str, Any]]):
    for rank, each in enumerate(of_ranks):
        found = each["used"]
        assert found["text"].startswith("2 stages, the slowest 1.0") and found["config"]
        assert found["elsewhere"] == (["Elsewhere(stage=0)"] if rank == 1 else [])
        assert max(found["other length"]) < 1e-9 and found["sum"] < 1e-9 and found["replayed"] < 1e-9
        assert found["saved"] == 0
        assert found["restore"].startswith("StateError: the model is in parts on several ranks")
        assert found["again"].startswith("InputError: the model is in parts on several ranks already")


def test_a_fused_model_and_its_optimizer(of_ranks: list[dict[str, Any]]):
    for each in of_ranks:
        found = each["together"]
        assert found["fused"] == ["applied", "applied"] and found["names"] and found["held"] and found["trained"] < 1e-9
        assert found["loaded"] == "<All keys matched successfully>"


def test_every_way_through_the_model_that_examples_show(of_ranks: list[dict[str, Any]]):
    for each in of_ranks:
        found = each["ways"]
        assert max(found["batches"]) < 1e-9 and max(found["modes"]) < 1e-9 and found["mode of a step"] < 1e-9
        assert found["one kind"].startswith("GuardError: ")
        assert "Give example_inputs that cover this case too" in found["one kind"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows", "UsageError: a batch of 6 rows does not divide into 4 microbatches: give a multiple of 4 rows"),
        ("rows of the target", "UsageError: the target has 6 rows, the batch 8"),
        ("other shapes", "UsageError: rank 1 was given a batch of another form than rank 0"),
        ("no batch", "UsageError: example_inputs is of type int"),
        ("stages", "UsageError: pass 'pipeline': 3 stages do not fit 2 processes; run `torchrun --nproc-per-node=3"),
        ("interleaved stages", "UsageError: pass 'pipeline': 3 stages do not fit 2 interleaved processes"),
        (
            "turning",
            "UsageError: pass 'pipeline': 6 stages do not fit schedule zero_bubble_v on 2 processes; give stages",
        ),
        ("microbatches", "UsageError: pass 'pipeline': schedule 1f1b needs at least as many microbatches as stages"),
        ("norms", "UsageError: 'down.0.norm' is a BatchNorm2d in training"),
        ("thawed", "UsageError: "),
        ("no inputs", "UsageError: pass 'pipeline': example_inputs are needed"),
        ("tiny", "UsageError: pass 'pipeline': the model's own forward cannot be cut"),
        ("weights", "UsageError: pass 'pipeline': 'stem.weight' of rank 1 is not that of rank 0; seed all"),
        ("after all", "True"),
    ],
)
def test_one_clear_error_on_both_ranks(of_ranks: list[dict[str, Any]], name: str, message: str):
    for each in of_ranks:
        found = each["refused"][name]
        assert found.partition(":")[0] == message.partition(":")[0] and message in found, found


def test_an_error_on_one_rank_before_the_first_step(of_ranks: list[dict[str, Any]]):
    first, second = (each["refused"]["rows on one rank"] for each in of_ranks)
    assert first.startswith("UsageError: a batch of 6 rows does not divide")
    assert second.startswith("UsageError: rank 0 cannot take its batch: a batch of 6 rows does not divide")
