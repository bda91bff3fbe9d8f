"""Two processes: rank 0 decides and the other follows, and what is sharded is gathered, distributed or refused.

Both processes run all scenarios of this file once, and write down what they saw; the tests read that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from across_ranks import own_rows, said, shared_folder
from torch import Tensor, distributed, nn

import fxopt
from fxopt.errors import UsageError
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit, operation
from fxopt.passes.sites import Goal, Refusal, Site
from fxopt.runtime.state import RECORD_KEY
from fxopt.tracing.program import Program

RANKS = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(3))
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x) - x.sin()
        return torch.stack([head(x) for head in self.heads]).mean(0) - self.shift


@dataclasses.dataclass(frozen=True)
class Subtract(Pass):
    """Write subtractions as calls, wrongly or not at all on one rank.

    Attributes:
        wrong: the rank on which one of them is wrong.
        raises: the rank on which it raises.
    """

    wrong: int = -1
    raises: int = -1

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for match in program.matches(operation("sub", name="sub")):
            yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        if self.raises == distributed.get_rank():
            raise ValueError("out of order")
        node = edit.graph_node("sub")
        one, other = node.args
        swapped = self.wrong == distributed.get_rank() and "sin" in str(other)
        edit.replace(node, edit.call(torch.sub, *((other, one) if swapped else (one, other))))


@dataclasses.dataclass(frozen=True)
class Average(Pass):
    """Let the trunk's weight be the mean over the ranks, or fail on one of them.

    Attributes:
        refuses, raises: the rank on which it refuses the model, or raises.
    """

    refuses: int = -1
    raises: int = -1

    goal: ClassVar[Goal] = Goal.PARALLEL

    def check(self, model: nn.Module) -> None:
        if self.refuses == distributed.get_rank():
            raise UsageError("pass 'average' refuses")

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        yield Site(program, "trunk", {}, data={"found on": distributed.get_rank()})

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        if self.raises >= 0:
            if self.raises == distributed.get_rank():
                raise ValueError("out of order")
            return model
        for site in sites:
            module = model.get_submodule(site.owner)
            module.found_on = site.data["found on"]  # type: ignore[assignment]
            total = module.get_parameter("weight").data
            distributed.all_reduce(total)
            total /= RANKS
        return model


# -- what the processes do -----------------------------------------------------------------------------------------


def made(seed: int = 0) -> tuple[Model, Tensor]:
    torch.manual_seed(seed)
    return Model(), torch.randn(4, 8)


def fused(model: nn.Module, x: Tensor) -> nn.Module:
    return fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,), measure=False)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def seen(fast: nn.Module) -> list[tuple[str, str, str, str | None]]:
    return [(d.key, d.status, d.reason, d.choice) for d in fxopt.plan(fast).decisions]


def on_rank_decided() -> Any:
    """Everything is timed, on other inputs on each rank: who decides for himself decides otherwise at times."""
    model, _ = made()
    x = torch.randn(1 + 60 * distributed.get_rank(), 8)
    fast = fxopt.optimize(model, ["fuse_ensembles", Subtract()], example_inputs=(x,))
    close = torch.allclose(fast(x), model(x), atol=1e-5)
    return fxopt.plan(fast).to_json(), close, fast.__dict__[RECORD_KEY].checked


def on_rank_wrong_on_the_second() -> Any:
    model, x = made()
    fast = fxopt.optimize(model, Subtract(wrong=1), example_inputs=(x,))
    return seen(fast), torch.equal(fast(x), model(x))


def on_rank_wrong_on_the_first() -> Any:
    model, x = made()
    fast = fxopt.optimize(model, Subtract(wrong=0), example_inputs=(x,))
    return seen(fast), torch.equal(fast(x), model(x))


def on_rank_raises() -> Any:
    model, x = made()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    messages = [
        said(lambda rank=rank: fxopt.optimize(model, Subtract(raises=rank), example_inputs=(x,), inplace=True))
        for rank in range(RANKS)
    ]
    return messages, equal(model.state_dict(), before) and type(model) is Model


def on_rank_finished() -> Any:
    model, x = made()
    fast = fxopt.optimize(model, ["fuse_ensembles{lowering=bmm}", Average()], example_inputs=(x,), measure=False)
    replayed = fxopt.optimize(
        model, plan=fxopt.plan(fast), passes=["fuse_ensembles{lowering=bmm}", Average()], example_inputs=(x,)
    )
    wrong = [
        said(lambda rank=rank, what=what: fxopt.optimize(model, Average(**{what: rank}), example_inputs=(x,)))
        for what in ("refuses", "raises")
        for rank in range(RANKS)
    ]
    return fast.trunk.found_on, replayed.trunk.found_on, wrong


def on_rank_other_models() -> Any:
    model, x = made()
    if distributed.get_rank() == 1:
        model.heads.append(nn.Linear(8, 2))
    passes = "eliminate_dead_code" if distributed.get_rank() else "fuse_ensembles"
    another = nn.Sequential(nn.Linear(4, 4), nn.Tanh() if distributed.get_rank() else nn.ReLU())  # equal tensors
    return (
        said(lambda: fused(model, x)), said(lambda: fxopt.optimize(another, "ddp", example_inputs=torch.ones(2, 4))),
        said(lambda: fxopt.optimize(model, passes, example_inputs=(x,))),
    )  # fmt: skip


def on_rank_asks_for_something_else() -> Any:
    """What one rank asks for otherwise is refused on both; then the ranks go on together."""
    (model, x), is_second = made(), distributed.get_rank() == 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    messages = [
        said(lambda: fxopt.optimize(made()[0].train(not is_second), "fuse_ensembles", example_inputs=(x,))),
        said(lambda: fxopt.optimize(model, "ddp", example_inputs=(x,), phase="eval" if is_second else "train")),
        said(lambda: fxopt.optimize(model, "ddp", example_inputs=(x,), optimizer=optimizer if is_second else None)),
        said(lambda: fxopt.optimize(model, Average(), example_inputs=(x[: 4 - is_second],))),
    ]
    return messages, torch.allclose(fused(model, x)(x), model(x), atol=1e-6)


def on_rank_fails_before_it_speaks() -> Any:
    """What one rank gives is refused while it is read; then the ranks go on together."""
    model, x = made()
    messages = []
    for failing in range(RANKS):
        text = "fuse" if distributed.get_rank() == failing else "fuse_ensembles"
        messages.append(said(lambda text=text: fxopt.optimize(model, text, example_inputs=(x,))))
    return messages, torch.allclose(fused(model, x)(x), model(x), atol=1e-6)


def on_rank_a_plan_on_one_rank() -> Any:
    model, x = made()
    plan = fxopt.plan(fused(model, x))
    if distributed.get_rank() == 1:
        return None
    again = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(x,), plan=plan)
    return torch.allclose(again(x), model(x), atol=1e-6)


def on_rank_numbers_of_data() -> Any:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).eval(), made()[1]
    passes = "quantize{scheme=int8_weight,method=gptq,aim=size}"
    return said(lambda: fxopt.optimize(model, passes, example_inputs=(x,)))


def on_rank_replicated() -> Any:
    """DDP: each rank has its half of the rows; the reference has all."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model, x = made()
    fast = nn.parallel.DistributedDataParallel(fused(model, x))
    names = [f"module.{name}" for name in model.state_dict()]
    saved = list(fast.state_dict()) == names and list(get_model_state_dict(fast)) == list(model.state_dict())
    fast(own_rows(x)).square().mean().backward()
    optimizer = torch.optim.SGD(fast.parameters(), 0.1)
    optimizer.step()
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    result = fast.module.state_dict()
    close = all(torch.allclose(tensor, result[name], atol=1e-6) for name, tensor in model.state_dict().items())
    return saved, close, said(lambda: fxopt.state_dict(fast)), fast.load_state_dict(fast.state_dict()) == ([], [])


def on_rank_sharded() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    (model, x), (other, _) = made(), made(1)
    optimizer, theirs = torch.optim.Adam(model.parameters(), 0.1), torch.optim.Adam(other.parameters(), 0.1)
    model(x).square().mean().backward()
    optimizer.step()
    theirs.load_state_dict(optimizer.state_dict())
    fast = fused(model, x)
    fully_shard(fast, mesh=init_device_mesh("cpu", (RANKS,)))
    old, new = model.state_dict(), other.state_dict()
    found: dict[str, Any] = {"names": list(fast.state_dict())}
    found["gathered"] = equal(fxopt.state_dict(fast), old)
    own = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    found["refused"] = [
        said(lambda: fast.load_state_dict(new)),
        said(lambda: fxopt.restore(fast)),
        said(lambda: fast.heads[0][0].weight),
        said(lambda: setattr(fast.heads[0][0], "weight", torch.zeros(6, 8))),
        said(lambda: fast.heads[1].state_dict()),
        said(lambda: fast.heads[1].load_state_dict(other.heads[1].state_dict())),
        said(lambda: fxopt.load_state_dict(fast, {n: t for n, t in new.items() if "heads.1" not in n}, strict=False)),
        said(lambda: fxopt.optimize(fast, "fuse_ensembles", example_inputs=(x,))),
        said(lambda: fxopt.translate_state(new, fast)),
    ]
    fast.load_state_dict(own)  # torch has loaded what is not sharded
    with torch.no_grad():
        fast(x)  # the gathered tensors stay until something is saved or loaded
        found["after a forward"] = [equal(fxopt.state_dict(fast), old)]
        fast(x)
        found["after a forward"].append(list(fast.state_dict()) == found["names"])
        fast(x)
        found["after a forward"].append(fxopt.load_state_dict(fast, new) == ([], []))
        found["after a forward"].append(equal(fxopt.state_dict(fast), new))
        fast(x)
        fast.load_state_dict(own)
        found["refused after a forward"] = []
        for attempt in (
            lambda: fxopt.restore(fast),
            lambda: fxopt.translate_state(new, fast),
            lambda: fast.heads[1].state_dict(),
        ):
            fast(x)
            found["refused after a forward"].append(said(attempt))
    found["kept"] = equal(fxopt.state_dict(fast), old)
    loaded = [fxopt.load_state_dict(fast, new, assign=assign) == ([], []) for assign in (False, True)]
    found["loaded"] = loaded, equal(fxopt.state_dict(fast), new), fast.load_state_dict(fast.state_dict()) == ([], [])
    fxopt.translate_optimizer(optimizer, fast)
    found["gradients"] = sorted({type(parameter.grad).__name__ for parameter in fast.parameters()})
    found["moments"] = sorted({type(state["exp_avg"]).__name__ for state in optimizer.state.values()})
    for each, stepper in ((fast, optimizer), (other, theirs)):
        stepper.zero_grad()
        each(x).square().mean().backward()
        stepper.step()
    after = fxopt.state_dict(fast)
    found["trained"] = max(float((tensor - after[name]).abs().max()) for name, tensor in other.state_dict().items())
    path = shared_folder() / "saved.fxopt"
    fxopt.save(fast, path, factory="test_distributed:Model")
    distributed.barrier()
    found["saved"] = equal(fxopt.load(path, model=Model()).state_dict(), after)
    return found


# -- what the tests ask --------------------------------------------------------------------------------------------


def test_rank_0_decides(of_ranks: list[dict[str, Any]]) -> None:
    (first, *of_first), (second, *of_second) = (each["decided"] for each in of_ranks)
    assert first == second, "one plan, with the figures of rank 0"
    assert "applied" in [decision["status"] for decision in first["decisions"]]
    assert of_first == of_second == [True, "float64"]


@pytest.mark.parametrize("name", ["wrong_on_the_first", "wrong_on_the_second"])
def test_what_is_wrong_on_one_rank_is_undone_on_all(of_ranks: list[dict[str, Any]], name: str) -> None:
    (first, is_equal), second = (each[name] for each in of_ranks)
    assert second == (first, True) and is_equal
    assert sorted(status for _, status, _, _ in first) == ["applied", "undone"]
    (reason,) = (reason for _, status, reason, _ in first if status == "undone")
    assert ("on rank 1: " in reason) == (name == "wrong_on_the_second") and "output" in reason


def test_what_raises_on_one_rank_raises_on_all(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        messages, untouched = each["raises"]
        assert untouched
        for failing, message in enumerate(messages):
            assert message.startswith("PassError: ") and "ValueError: out of order" in message
            assert (f"rank {failing} failed, so nothing is optimized on any" in message) == (failing != rank)


def test_what_is_done_to_the_finished_model(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        found_on, replayed_from, messages = each["finished"]
        assert found_on == replayed_from == 0, "rank 0 decides"
        refused, raised = messages[:RANKS], messages[RANKS:]
        for failing, (early, late) in enumerate(zip(refused, raised, strict=True)):
            assert "pass 'average' refuses" in early and "finalize raised ValueError: out of order" in late
            elsewhere = f"rank {failing} failed, so nothing is optimized on any"
            assert (elsewhere in early) == (elsewhere in late) == (failing != rank)


def test_ranks_with_other_models_or_passes(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        model, classes, passes = each["other_models"]
        assert model.startswith("UsageError: the modules of rank 1's model have other classes or tensors than")
        assert classes == model
        assert passes.startswith("UsageError: rank 1 runs the passes 'eliminate_dead_code', rank 0 'fuse_ensembles")


def test_ranks_that_ask_for_something_else(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        (mode, phase, optimizer, rows), goes_on = each["asks_for_something_else"]
        assert goes_on
        assert mode == phase
        assert mode.startswith("UsageError: rank 1 optimizes for evaluation, and rank 0 optimizes for training; all")
        assert optimizer.startswith("UsageError: rank 1 gives an optimizer, and rank 0 gives no optimizer; all")
        assert "of rank 1 have the shapes [[3, 8]], those of rank 0 [[4, 8]]; 'average' needs the same rows" in rows


def test_a_rank_that_fails_before_it_speaks_is_named(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        messages, goes_on = each["fails_before_it_speaks"]
        assert goes_on
        for failing, message in enumerate(messages):
            assert message.startswith("UsageError: " if failing != rank else "PipelineError: ")
            assert "unknown pass 'fuse'; did you mean 'fuse_ensembles'?" in message
            assert (f"rank {failing} failed, so nothing is optimized on any" in message) == (failing != rank)


def test_a_plan_is_repeated_by_one_rank_alone(of_ranks: list[dict[str, Any]]) -> None:
    assert of_ranks[0]["a_plan_on_one_rank"] is True


def test_numbers_that_no_plan_holds_are_not_made_on_one_rank(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        said = each["numbers_of_data"]
        assert said.startswith("UsageError: ") and "fxopt.load the archive on each rank" in said


def test_a_replicated_model(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        saved, close, message, loaded = each["replicated"]
        assert saved and close and loaded
        assert "its 'module': give that one" in message


def test_a_sharded_model(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        found = each["sharded"]
        assert found["names"][:3] == ["shift", "trunk.weight", "trunk.bias"]
        assert all(name.startswith("heads_fused.") for name in found["names"][3:])
        assert found["gathered"] and found["kept"] and found["saved"]
        assert found["loaded"] == ([True, True], True, True)
        assert found["after a forward"] == [True] * 4
        assert all(
            "is sharded" in words or "is a part of a sharded" in words for words in found["refused after a forward"]
        )
        assert found["moments"] == found["gradients"] == ["DTensor"]
        assert found["trained"] < 1e-6


def test_what_cannot_be_done_to_a_sharded_model(of_ranks: list[dict[str, Any]]) -> None:
    expected = [
        "fxopt.load_state_dict(model, state) distributes",
        "StateError: 'trunk.weight' is sharded, and restoring needs whole tensors; load fxopt.state_dict(model)",
        "FusedMemberError: the stacked parameter 'weight' is sharded, so its members cannot be read or written",
        "FusedMemberError: the stacked parameter 'weight' is sharded, so its members cannot be read or written",
        "FusedMemberError: '0.weight' is a part of a sharded tensor, and this Sequential cannot be saved by itself",
        "'0.weight' is a part of a sharded tensor",
        "StateError: 'heads.1.0.weight', 'heads.1.2.weight'",
        "InputError: 'trunk.weight' is sharded already; optimize the model first, then shard it",
        "StateError: 'trunk.weight' is sharded, and translating a state needs whole tensors; use torch.func",
    ]
    for each in of_ranks:
        for message, words in zip(each["sharded"]["refused"], expected, strict=True):
            assert words in message or words.split(",")[0] in message
