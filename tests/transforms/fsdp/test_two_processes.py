"""fsdp over two processes: steps, checkpoints and optimizers against one process on the whole batch."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from across_ranks import apart, gradients, own_rows, said, shared_folder
from torch import Tensor, nn

import fxopt
from fxopt import Context, Edit, Goal, Numerics, OwnForward, Pass, Program, Refusal, Site

FUSED = "fuse_ensembles{lowering=bmm}"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, width)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + torch.stack([head(x) for head in self.heads]).mean(0)


class Model(nn.Module):
    """Blocks with ensembles inside, an ensemble and a folded convolution beside them, and a head tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.last = nn.ModuleList(nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).flatten(1)
        for block in self.blocks:
            x = block(x)
        return torch.stack([head(x) for head in self.last]).mean(0)


@dataclasses.dataclass(frozen=True)
class Recompute(Pass):
    """Checkpoint the linears of each block, or two whole blocks."""

    blocks: bool = False

    numerics: ClassVar[Numerics] = Numerics.EXACT
    goal: ClassVar[Goal] = Goal.MEMORY
    own_forward: ClassVar[OwnForward | None] = OwnForward.ACCEPTABLE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for owner in [""] if self.blocks else [f"blocks.{number}" for number in range(3)]:
            wanted = ("blocks.0", "blocks.1") if self.blocks else ("up", "down")
            nodes = list(program.graph(owner).nodes)
            ends = [nodes.index(node) for node in nodes if node.op == "call_module" and node.target in wanted]
            inside = [node.name for node in nodes[ends[0] : ends[-1] + 1]]
            yield Site(program, owner, {f"inside_{number}": name for number, name in enumerate(inside)})

    def rewrite(self, site: Site, edit: Edit) -> None:
        edit.outline([site[label] for label in site.nodes], name="part", context=Context("checkpoint"))


# -- what the processes do -----------------------------------------------------------------------------------------


def made(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Model, Tensor]:
    torch.manual_seed(seed)
    return Model().to(dtype).eval(), torch.randn(4, 1, 4, 4, dtype=dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def real_models() -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    import transformers as tf

    ids, shared = (
        torch.randint(0, 64, (4, 7)),
        {"vocab_size": 64, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2},
    )
    bert = tf.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=16, **shared,
    )  # fmt: skip
    gpt2 = tf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared
    )
    t5 = tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, **shared)
    # Its batch norms see the batch of both.
    resnet = tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 2, 1], layer_type="basic", num_channels=3
    )
    yield tf.BertForSequenceClassification(bert), {"input_ids": ids}
    yield tf.GPT2LMHeadModel(gpt2), {"input_ids": ids}
    yield tf.T5ForConditionalGeneration(t5), {"input_ids": ids, "decoder_input_ids": ids}
    yield tf.ResNetForImageClassification(resnet).train(), {"pixel_values": torch.randn(4, 3, 32, 32)}


def on_rank_real() -> Any:
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    for model, inputs in real_models():
        model, plain = model.double(), copy.deepcopy(model).double()
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        fast = fxopt.optimize(model, "sync_batchnorm,fsdp", example_inputs=inputs, measure=False)
        decisions = [decision for decision in fxopt.plan(fast).decisions if decision.pass_name == "fsdp"]
        units = sum(decision.status == "applied" for decision in decisions)
        fast(**own_rows(inputs)).logits.square().mean().backward()
        plain(**inputs).logits.square().mean().backward()
        loaded = copy.deepcopy(model)
        loaded.load_state_dict(fxopt.state_dict(fast))
        state = apart(loaded.state_dict(), plain.state_dict())
        found[type(model).__name__] = (
            units,
            apart(gradients(fast), gradients(plain)),
            state,
            isinstance(fast, type(model)),
        )
    return found


def on_rank_composed() -> Any:
    found: list[Any] = []
    for passes in (
        [FUSED],
        [FUSED, Recompute()],
        [FUSED, Recompute(blocks=True)],
        ["fold_batchnorm", FUSED, Recompute()],
    ):
        model, x = made()
        plain = copy.deepcopy(model)
        own, theirs = (torch.optim.Adam(each.parameters(), 0.01) for each in (model, plain))
        step(model, own, x), step(plain, theirs, x)
        fast = fxopt.optimize(model, [*passes, "fsdp"], example_inputs=x, measure=False, verify=False, optimizer=own)
        for _ in range(3):
            step(fast, own, own_rows(x)), step(plain, theirs, x)
        moments = {type(state["exp_avg"]).__name__ for state in own.state.values()}
        found.append((apart(fxopt.state_dict(fast), plain.state_dict()), moments, len(fxopt.plan(fast).decisions)))
        assert "fsdp" in str(fxopt.report(fast)) and fxopt.graphs(fast)
    return found


def on_rank_mixed_precision() -> Any:
    model, x = made(dtype=torch.float32)
    refused = said(lambda: fxopt.optimize(model, "fsdp{param_dtype=bfloat16}", example_inputs=x))
    model.norm = nn.Identity()
    fast = fxopt.optimize(model, "fsdp{param_dtype=bfloat16}", example_inputs=x, measure=False)
    narrow = said(
        lambda: fxopt.optimize(model, "fsdp{param_dtype=bfloat16,budget=1e-5}", example_inputs=x, measure=False)
    )
    result = fast(own_rows(x))
    result.square().mean().backward()
    model(x).square().mean().backward()
    dtypes = {result.dtype, *(each.dtype for p in fast.parameters() for each in (p, p.grad))}
    return refused, narrow, dtypes, apart(gradients(fast), gradients(model))


def on_rank_options() -> Any:
    """What FSDP2 gathers, and when, changes no number; nor does a dtype of averages that is not narrower."""
    found: list[Any] = []
    for options in ("forward_prefetch=1,backward_prefetch=2", "reshard_after_forward=false,reduce_dtype=float64"):
        model, x = made()
        plain = copy.deepcopy(model)
        fast = fxopt.optimize(model, f"fsdp{{{options}}}", example_inputs=x)
        fast(own_rows(x)).square().mean().backward(), plain(x).square().mean().backward()
        found.append(apart(gradients(fast), gradients(plain)))
    model, x = made()
    refused = ("offload_policy=cpu", "reshard_after_forward=2", "forward_prefetch=-1", "reduce_dtype=int8")
    return found, [
        said(lambda text=text: fxopt.optimize(model, f"fsdp{{{text}}}", example_inputs=x)) for text in refused
    ]


def on_rank_on_meta() -> Any:
    other, x = made()
    found: list[Any] = []
    for passes in ("fsdp", [FUSED, "fsdp"]):
        with torch.device("meta"):
            model = Model().double().eval()
        fast = fxopt.optimize(model, passes, example_inputs=x)
        checked = {decision.figures.get("checked") for decision in fxopt.plan(fast).decisions}
        fast.to_empty(device="cpu")
        fxopt.load_state_dict(fast, other.state_dict())
        fast(own_rows(x)).square().mean().backward()
        other.zero_grad()
        other(x).square().mean().backward()
        given = apart(fxopt.state_dict(fast), other.state_dict())
        ours, theirs = gradients(fast), gradients(other)
        found.append((checked, given, apart({"g": ours["blocks.1.up.weight"]}, {"g": theirs["blocks.1.up.weight"]})))
    return found


def on_rank_checkpoints() -> Any:
    """Save sharded, at once and in the background; read into the plain class, and into another sharded model."""
    from torch.distributed import checkpoint as dcp

    (model, x), (other, _) = made(), made(1)
    found: list[Any] = []
    for passes in ("fsdp", f"{FUSED},fsdp"):
        fast, target = (fxopt.optimize(each, passes, example_inputs=x, verify=False) for each in (model, other))
        state, path = fxopt.state_dict(fast, gather=False), shared_folder()
        kinds = {type(tensor).__name__ for name, tensor in state.items() if "blocks" in name}
        names = list(state) == list(model.state_dict())
        dcp.save({"model": state}, checkpoint_id=f"{path}/now")
        dcp.async_save({"model": state}, checkpoint_id=f"{path}/later").result()
        plain = made(1)[0].state_dict()
        dcp.load({"model": plain}, checkpoint_id=f"{path}/now")
        state = fxopt.state_dict(target, gather=False)
        dcp.load({"model": state}, checkpoint_id=f"{path}/later")
        fxopt.load_state_dict(target, state)
        read = [apart(each, model.state_dict()) for each in (plain, fxopt.state_dict(target))]
        found.append((path, kinds, names, read))
    return found


def on_rank_refused() -> Any:
    model, x = made()
    model.scale = nn.Parameter(torch.tensor(1.0))
    scalar = said(lambda: fxopt.optimize(model, "fsdp", example_inputs=x))
    model, x = made()
    model.conv.half()
    dtypes = said(lambda: fxopt.optimize(model, "fsdp", example_inputs=x))
    model, x = made()
    fast = fxopt.optimize(model, "fsdp", example_inputs=x, measure=False)
    again = said(lambda: fxopt.optimize(fast, "fsdp", example_inputs=x))
    inplace = said(lambda: fxopt.optimize(model, "fsdp", example_inputs=x, inplace=True))
    return scalar, dtypes, again, inplace


# -- what the tests ask --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_options_of_fully_shard(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        errors, (offload, reshard, prefetch, dtype) = each["options"]
        assert max(errors) < 1e-9
        assert "offload_policy=cpu is for models on GPUs, and this one is on the CPU; leave it out" in offload
        assert "reshard_after_forward=2; give true, false, or a number of processes that divides the 2" in reshard
        assert "forward_prefetch=-1; give a number of units" in prefetch
        assert "reduce_dtype=torch.int8; give one with a floating point" in dtype


def test_real_models_have_the_gradients_of_one_process(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert {name: values[0] for name, values in each["real"].items()} == {
            "BertForSequenceClassification": 3,
            "GPT2LMHeadModel": 3,
            "T5ForConditionalGeneration": 5,
            "ResNetForImageClassification": 4,
        }
        for _, gradient, state, is_same_class in each["real"].values():
            assert gradient < 1e-9 and state < 1e-9 and is_same_class


def test_rewritten_models_step_as_one_process_does(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert len(each["composed"]) == 4
        for difference, moments, decided in each["composed"]:
            assert difference < 1e-12 and moments == {"DTensor"} and decided > 4


def test_mixed_precision(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        refused, narrow, dtypes, difference = each["mixed_precision"]
        assert "'norm' keeps its statistics in float32" in refused and "autocast{dtype=bfloat16}" in refused
        assert "changed what the model gives" in narrow
        assert dtypes == {torch.float32} and 1e-6 < difference < 0.05


def test_models_on_the_meta_device(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        (plain, *first), (fused, *second) = each["on_meta"]
        assert plain == {None} and fused == {None, "unverified: meta"}
        assert first[0] == second[0] == 0 and max(first[1], second[1]) < 1e-12


def test_distributed_checkpoints(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        for _, kinds, has_original_names, read in each["checkpoints"]:
            assert "DTensor" in kinds and has_original_names and read == [0, 0]


def test_a_checkpoint_is_read_without_other_processes(of_ranks: list[dict[str, Any]]) -> None:
    from torch.distributed import checkpoint as dcp

    model, other = made()[0], made(1)[0]
    for path, *_ in of_ranks[0]["checkpoints"]:
        state = other.state_dict()
        with warnings.catch_warnings(action="ignore"):
            dcp.load({"model": state}, checkpoint_id=f"{path}/later")
        shutil.rmtree(path)
        assert apart(state, model.state_dict()) == 0


def test_what_cannot_be_sharded(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        scalar, dtypes, again, inplace = each["refused"]
        assert "'scale' is a scalar; make it a tensor of one element" in scalar
        assert "is torch.float16 and" in dtypes and "bring all that is trained to one dtype" in dtypes
        assert "is sharded already" in again
        assert "inplace" in inplace
