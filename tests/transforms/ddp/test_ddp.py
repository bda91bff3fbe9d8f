"""Replicas in two processes: gradients as of one process with the whole batch, whatever part of the model is used."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from across_ranks import said, uneven_rows
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.transforms.ddp import Ddp

os.environ["TRANSFORMERS_VERBOSITY"] = "error"


class Heads(nn.Module):
    """An ensemble on a checkpointed trunk, with a norm, and a module whose result is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropped = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.norm(checkpoint(self.trunk, x, use_reentrant=False).sin())
        self.dropped(x)
        return {"mean": torch.stack([head(x) for head in self.heads]).mean(0), "hidden": x}


class Branching(nn.Module):
    """Use one of two layers, by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, which: str = "data") -> Tensor:
        if which == "never":
            return self.never(x)
        return self.one(x) if float(x.detach().sum()) > 0 else self.other(x)


def optimized(model: nn.Module, inputs: Any, passes: str = "ddp", **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxopt.UnverifiedWarning)
        return fxopt.optimize(model, passes, example_inputs=inputs, measure=False, **options)


def _gap(own: Tensor | None, wanted: Tensor | None) -> float:
    if own is None or wanted is None:
        return 0.0 if own is wanted else float("inf")
    return float((own - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


def compared(
    model: nn.Module, fast: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor], pattern: list[list[bool]]
) -> float:
    """Train both for some steps; return the largest difference of gradients. True in the pattern synchronizes.

    Losses are sums over rows, so that batches may be uneven; DDP divides by the number of processes.
    """
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (model, fast)]
    error = 0.0
    for batches in pattern:
        for number, syncs in enumerate(batches):
            rows = x.roll(number, 0)
            loss(model, rows).backward()
            if syncs:
                (2 * loss(fast, uneven_rows(rows))).backward()
            else:
                with fxopt.no_sync(fast):
                    (2 * loss(fast, uneven_rows(rows))).backward()
        pairs = zip(fast.parameters(), model.parameters(), strict=True)
        error = max(error, *(_gap(own.grad, parameter.grad) for own, parameter in pairs))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return error


PATTERN = [[True], [False, True], [True], [False, False, True]]


# -- what the processes do -----------------------------------------------------------------------------------------


def on_rank_bert() -> Any:
    """BERT, whose pooler the loss leaves out; the first step accumulates, too."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**options, vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, ids = BertModel(config).double().train(), torch.randint(50, (6, 7))

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return (model(input_ids=rows).last_hidden_state ** 3).sum() / 1000

    errors = []
    for pattern in (PATTERN, PATTERN[::-1]):
        fast = optimized(model, {"input_ids": uneven_rows(ids)})
        errors.append(compared(copy.deepcopy(model), fast, ids, loss, pattern))
    return errors, type(fast) is BertModel, list(fast.state_dict()) == list(model.state_dict())


def on_rank_resnet() -> Any:
    """A ResNet with synchronized batch norms."""
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model, images = ResNetModel(config).double().train(), torch.randn(5, 3, 16, 16, dtype=torch.float64)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return (model(rows).pooler_output ** 2).sum() / 10

    fast = optimized(model, uneven_rows(images), "sync_batchnorm,ddp")
    error = compared(model, fast, images, loss, PATTERN[:1] + PATTERN[2:3])
    buffers = zip(fast.buffers(), model.buffers(), strict=True)
    return error, max(_gap(own.double(), b.double()) for own, b in buffers)


def heads(passes: str = "ddp") -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(9, 8, dtype=torch.float64)
    return model, optimized(model, uneven_rows(x), passes), x


def on_rank_fused() -> Any:
    """Gradients of stacked parameters, compared through the original names."""
    model, fast, x = heads("sync_batchnorm,fuse_ensembles{lowering=bmm},ddp")
    for _ in range(2):
        model.zero_grad()
        fast.zero_grad()
        (model(x)["mean"] ** 2).sum().backward()
        (2 * fast(uneven_rows(x))["mean"] ** 2).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    errors = [
        _gap(fast.get_parameter(name).grad, model.get_parameter(name).grad) for name in names if "heads" not in name
    ]
    errors += [_gap(fast.heads[1][0].weight.grad, model.heads[1][0].weight.grad)]
    refusals = {d.label: d.reason for d in fxopt.plan(fast).decisions if d.pass_name == "ddp" and d.reason}
    return max(errors), refusals, fast.dropped.weight.grad is None


def on_rank_state() -> Any:
    """Checkpoints, archives, optimizers, restoring, copies; evaluation in one process alone."""
    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(9, 8, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    fast = optimized(model, uneven_rows(x), optimizer=optimizer)
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in fast.parameters()}
    for _ in range(2):
        fast(uneven_rows(x))["mean"].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    restored = fxopt.restore(fast)
    same = all(torch.equal(t, restored.state_dict()[name]) for name, t in fxopt.state_dict(fast).items())
    path = Path(tempfile.mkdtemp()) / "saved.fxopt"
    fxopt.save(fast, path, factory="test_ddp:Heads")
    alone = None
    if distributed.get_rank() == 0:  # nobody waits for the other process
        with torch.no_grad():
            fast.eval()(x)
        opened = fxopt.load(path, model=Heads().double(), example_inputs=(x,))
        for each in (copy.deepcopy(fast), opened, restored):
            each.train()(x)["mean"].sum().backward()
        alone = torch.equal(opened.trunk.weight, fast.trunk.weight)
        fast.train()
    again = [said(lambda: optimized(fast, uneven_rows(x)))]
    return moved, same, alone, again, type(restored) is Heads


def on_rank_by_hand() -> Any:
    """Weights that differ at first, buffers that each forward writes: as `DistributedDataParallel` by hand."""
    torch.manual_seed(distributed.get_rank())
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(6, 4)
    fast = optimized(model, x)
    by_hand = nn.parallel.DistributedDataParallel(model)
    for each in (fast, by_hand):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    pairs = zip(fast.state_dict().items(), by_hand.module.state_dict().items(), strict=True)
    return [name for (name, one), (_, other) in pairs if not torch.allclose(one, other, atol=1e-6)]


def on_rank_branches() -> Any:
    """Each process uses another layer; then both the same."""
    torch.manual_seed(0)
    model = Branching().double()
    fast = optimized(model, torch.ones(2, 4).double())
    decisions = [(d.status, d.detail, d.site["data"]["search"]) for d in fxopt.plan(fast).decisions if d.site]
    errors = []
    for signs in ((1.0, -1.0), (-1.0, -1.0), (1.0, 1.0)):
        model.zero_grad()
        fast.zero_grad()
        for sign in signs:
            (model(sign * torch.ones(2, 4).double()) / 2).square().sum().mul(2).backward()
        fast(signs[distributed.get_rank()] * torch.ones(2, 4).double()).square().sum().backward()
        pairs = zip(fast.parameters(), model.parameters(), strict=True)
        errors.append([_gap(own.grad, parameter.grad) for own, parameter in pairs])
    return decisions, errors


def on_rank_late() -> Any:
    """A parameter that gets its first gradient after the first step."""
    fast = optimized(Branching(), torch.ones(2, 4), "ddp{find_unused_parameters=false}")
    fast(torch.ones(2, 4)).sum().backward()
    return said(lambda: fast(torch.ones(2, 4), "never").sum().backward())


def on_rank_sharded() -> Any:
    """Accumulation of a model that fsdp sharded."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(6, 4).double()
    fast = optimized(model, uneven_rows(x), "fsdp")
    for number in range(2):
        model(x.roll(number, 0)).square().sum().backward()
        with fxopt.no_sync(fast) if number == 0 else contextlib.nullcontext():
            (2 * fast(uneven_rows(x.roll(number, 0))).square().sum()).backward()
    pairs = zip(fast.parameters(), model.parameters(), strict=True)
    return max(_gap(own.grad.full_tensor(), parameter.grad) for own, parameter in pairs)


def on_rank_refused() -> Any:
    frozen, sparse, meta = (
        nn.Linear(2, 2).requires_grad_(False),
        nn.Embedding(3, 2, sparse=True),
        nn.Linear(2, 2).to("meta"),
    )
    x = torch.ones(1, 2)
    models = [(frozen, x, "ddp"), (sparse, torch.tensor([1]), "ddp"), (meta, x.to("meta"), "ddp")]
    models += [(nn.Linear(2, 2), x, "ddp{bucket_cap_mb=0}"), (nn.Linear(2, 2), x, "ddp,fsdp")]
    return [said(lambda m=m, i=i, p=p: optimized(m, i, p)) for m, i, p in models]


# -- what the tests ask --------------------------------------------------------------------------------------------


def test_bert_with_a_pooler_that_the_loss_leaves_out(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        errors, same_class, same_names = each["bert"]
        assert max(errors) < 1e-9
        assert same_class
        assert same_names


def test_synchronized_norms_and_uneven_batches(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert max(each["resnet"]) < 1e-9


def test_after_other_passes(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        error, refusals, untouched = each["fused"]
        assert error < 1e-9
        assert refusals == {
            "dropped": "no gradient reaches its parameters in the example calls, so there is none to average"
        }
        assert untouched


def test_state_and_copies(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        moved, same, alone, (again,), restored = each["state"]
        assert moved
        assert same
        assert alone is (True if rank == 0 else None)
        assert again == "UsageError: pass 'ddp': the model is replicated already; give the one that ddp was not run on"
        assert restored


def test_the_same_as_by_hand(of_ranks: list[dict[str, Any]]) -> None:
    assert [each["by_hand"] for each in of_ranks] == [[], []]


def test_branches_that_processes_take_apart(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        ((status, detail, search),), errors = each["branches"]
        assert (status, search) == ("applied", True)
        assert "'(root)' may use others" in detail
        assert max(error for step in errors for error in step) < 1e-12


def test_sharded_models_accumulate_by_the_same_call(of_ranks: list[dict[str, Any]]) -> None:
    assert all(each["sharded"] < 1e-9 for each in of_ranks)


def test_a_late_gradient_is_an_error(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert each["late"].startswith("StateError: 'never.")
        assert each["late"].endswith("use ddp{find_unused_parameters=true}")


def test_refusals(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        frozen, sparse, meta, bucket, both = each["refused"]
        assert frozen == "UsageError: pass 'ddp': the model has no parameter that requires a gradient; leave ddp out"
        assert "has sparse gradients; make it with sparse=False" in sparse
        assert "'weight' is on the meta device" in meta
        assert "bucket_cap_mb=0.0; give a number of MiB" in bucket
        assert both.startswith("OrderError: ")
        assert "cannot be used together" in both


def test_without_a_process_group_the_command_is_given() -> None:
    with pytest.raises(fxopt.UsageError, match=r"pass 'ddp' .* run `torchrun --nproc-per-node=2 "):
        fxopt.optimize(nn.Linear(2, 2), "ddp", example_inputs=torch.ones(1, 2))


@pytest.mark.usefixtures("one_process")
def test_a_call_that_does_not_train_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    plan = fxopt.plan(fxopt.optimize(model, "ddp", example_inputs=torch.ones(1, 4)))
    refused = [d.reason for d in plan.decisions if d.status == "refused"]
    assert len(refused) == 1
    assert refused[0].startswith("example call 0 raised ValueError in training: Expected more than 1 value")


def test_a_process_group_ends_after_the_reducer() -> None:
    """Where the reducer is the last to hold it, torch waits for threads of gloo with Python's lock held: for ever."""
    importlib.import_module("torch.distributed.nn.functional")  # it keeps a group that is there when it is imported
    ended = list[str]()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    fast = optimized(nn.Linear(4, 4), torch.ones(2, 4))
    fast(torch.ones(2, 4)).sum().backward()
    (held,) = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    for part, name in ((held.reducer, "reducer"), (held.logger, "logger"), (held.process_group, "group")):
        weakref.finalize(part, ended.append, name)
    del held, part
    distributed.destroy_process_group()
    assert ended == []
    del fast
    gc.collect()
    assert sorted(ended[:2]) == ["logger", "reducer"]
    assert ended[2:] == ["group"]


def test_without_replicas_no_sync_does_nothing() -> None:
    with fxopt.no_sync(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("pass_", [Ddp(), Ddp(find_unused_parameters=True), Ddp(False, 12.5)], ids=str)
def test_the_text_of_the_pass_is_the_pass(pass_: Ddp) -> None:
    assert parse(str(pass_)) == (pass_,)
