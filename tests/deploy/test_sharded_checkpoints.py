"""Sharded checkpoints in models that were planned without weights: safetensors with an index, and DCP.

Both processes run the functions `on_rank_...` of this file once; the tests read what they give.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from across_ranks import apart, said, shared_folder
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fxopt


class Heads(nn.Module):
    """Members that are fused, an odd number of rows, a tied pair, and a buffer that no checkpoint has."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width)) for _ in range(3))
        self.last, self.norm = nn.Linear(5, width, bias=False), nn.BatchNorm1d(width)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((width,), 2.0), persistent=False)

    def reset_buffers(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        return torch.stack([head(y) for head in self.heads]).mean(0) * self.scale + self.last(x)


def heads(seed: int | None = 0) -> Heads:
    """Return the model, without numbers if there is no seed."""
    if seed is None:
        with torch.device("meta"):
            return Heads().eval()
    torch.manual_seed(seed)
    return Heads().eval()


def llama(*, tied: bool, seed: int | None = 0, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, vocab_size=30, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    if seed is None:
        with torch.device("meta"):
            return LlamaForCausalLM(config).eval()
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype).eval()


def mixtral(*, seed: int | None = 0, tied: bool = False) -> MixtralForCausalLM:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, vocab_size=30, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    if seed is None:
        with torch.device("meta"):
            return MixtralForCausalLM(config).eval()
    torch.manual_seed(seed)
    return MixtralForCausalLM(config).eval()


ROWS = torch.linspace(-1, 1, 20).reshape(4, 5)
IDS = torch.arange(24).reshape(4, 6)
EXPERTS = "fuse_experts{lowering=loop},parallel{shard=2,experts=true}"


def written(model: nn.Module, folder: Path, *, dcp: bool = False) -> Path:
    """Write a model's state into a folder of the first process, in three files with an index, or by DCP."""
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        if dcp:
            with warnings.catch_warnings(action="ignore"):
                checkpoint.save({"model": model.state_dict(), "step": 3}, checkpoint_id=folder, no_dist=True)
        else:
            to_safetensors(model.state_dict(), folder)
    if distributed.is_initialized():
        distributed.barrier()
    return folder


def to_safetensors(state: dict[str, Tensor], folder: Path) -> None:
    once = {id(tensor): name for name, tensor in reversed(state.items())}
    places = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(once.values())}
    for file in set(places.values()):
        inside = {name: state[name].contiguous() for name, place in places.items() if place == file}
        safetensors.torch.save_file(inside, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


# -- what the processes do -----------------------------------------------------------------------------------------


def result_of(fast: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        result = fast(**inputs) if isinstance(inputs, dict) else fast(inputs)
    return getattr(result, "logits", result)


def loaded(fast: Any, plain: nn.Module, inputs: Any, path: Path, **options: Any) -> tuple[float, float, int]:
    """Return how far results and states are apart after loading, and how many tensors have no data."""
    fxopt.load_sharded(fast, path, **options)
    result, wanted = result_of(fast, inputs), result_of(plain, inputs)
    state = fxopt.state_dict(fast)
    empty = sum(tensor.is_meta for tensor in (*fast.parameters(), *fast.buffers()))
    return float((result - wanted).abs().max()), apart(state, plain.state_dict()), empty


def on_rank_heads() -> Any:
    found: dict[str, Any] = {}
    for passes in ("fsdp", "fuse_ensembles{lowering=bmm},fsdp"):
        fast = fxopt.optimize(heads(None), passes, example_inputs=ROWS)
        path = written(heads(), shared_folder())
        found[passes] = loaded(fast, heads(), ROWS, path, init=Heads.reset_buffers)
        again = written(heads(1), shared_folder(), dcp=True)  # into memory that is there, after a forward
        found[f"{passes}, DCP"] = loaded(fast, heads(1), ROWS, again, key="model")
        folder = shared_folder()
        checkpoint.save({"model": fxopt.state_dict(fast, gather=False)}, checkpoint_id=folder)  # each rank its part
        found[f"{passes}, from parts"] = loaded(fused(heads()), heads(1), ROWS, folder, key="model")
        writer = checkpoint.HuggingFaceStorageWriter(str(folder / "parts"), save_distributed=True)
        apart_in_memory = {name: tensor.clone() for name, tensor in fxopt.state_dict(fast, gather=False).items()}
        checkpoint.save(apart_in_memory, storage_writer=writer)
        found[f"{passes}, safetensors in parts"] = loaded(fused(heads()), heads(1), ROWS, folder / "parts")
    return found


def on_rank_llama() -> Any:
    found, batch = dict[str, Any](), {"input_ids": IDS}
    for passes in ("fsdp", "tensor_parallel", "pipeline{microbatches=2}"):
        is_tied = passes != "tensor_parallel"
        plain, model = llama(tied=is_tied), llama(tied=is_tied, seed=None)
        fast, folder = fxopt.optimize(model, passes, example_inputs=batch), shared_folder()
        written(plain, folder / "dcp", dcp=True)
        found[f"{passes}, DCP"] = loaded(fast, plain, batch, folder / "dcp", key="model", init=model._init_weights)
        plain = llama(tied=is_tied, seed=1)
        if distributed.get_rank() == 0:
            plain.save_pretrained(folder, max_shard_size="4KB")
        distributed.barrier()
        found[passes] = loaded(fast, plain, batch, folder)
    return found


def on_rank_mixtral() -> Any:
    """Checkpoints that have a tensor for each expert, as Mixtral is published, in a model that has stacks of them."""
    found, batch = dict[str, Any](), {"input_ids": IDS}
    for passes in ("fsdp", EXPERTS):
        plain, model = mixtral(seed=1), mixtral(seed=None)
        fast, folder = fxopt.optimize(model, passes, example_inputs=batch), shared_folder()
        if distributed.get_rank() == 0:
            plain.save_pretrained(folder, max_shard_size="4KB")
        distributed.barrier()
        found[passes] = loaded(fast, plain, batch, folder, init=model._init_weights)
    return found


def on_rank_trained() -> Any:
    """Train an optimizer that was given before there was data, on an embedding that two stages share."""
    plain, model = llama(tied=True).train(), llama(tied=True, seed=None).train()
    path, optimizer = written(plain, shared_folder()), torch.optim.SGD(model.parameters(), 0.1)
    call = {"input_ids": IDS}
    staged = fxopt.optimize(model, "pipeline{microbatches=2}", example_inputs=call, optimizer=optimizer)
    fxopt.load_sharded(staged, path, init=model._init_weights)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)

    def loss(output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    for _ in range(2):
        staged.step(call, IDS, loss), loss(plain(**call), IDS).backward()
        for each in (optimizer, theirs):
            each.step(), each.zero_grad()
    return apart(fxopt.state_dict(staged), plain.state_dict())


def on_rank_refused() -> Any:
    fast = fxopt.optimize(llama(tied=False, seed=None), "pipeline", example_inputs={"input_ids": IDS})
    path = written(heads(), shared_folder())
    first = said(lambda: fxopt.load_sharded(fast, path, init=fast._init_weights))
    return first, all(tensor.is_meta for tensor in fast.parameters())


# -- what the tests say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["heads", "llama", "mixtral"])
def test_each_rank_loads_its_part(of_ranks: list[dict[str, Any]], name: str):
    for results in of_ranks:
        for case, (result, state, empty) in results[name].items():
            assert result < 1e-5, case
            assert state == 0, case
            assert empty == 0, case


def test_an_optimizer_that_was_given_trains_what_was_loaded(of_ranks: list[dict[str, Any]]):
    assert max(results["trained"] for results in of_ranks) < 1e-5


def test_every_rank_refuses_a_checkpoint_of_another_model(of_ranks: list[dict[str, Any]]):
    messages = {results["refused"] for results in of_ranks}
    ((message, untouched),) = messages
    assert untouched
    assert "missing: 'model.embed_tokens.weight'" in message
    assert "unexpected: 'first.bias'" in message


# -- in one process ------------------------------------------------------------------------------------------------


def fused(model: nn.Module) -> nn.Module:
    return fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=ROWS, measure=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_go_to_their_places_in_merged_tensors(tmp_path: Path, dtype: torch.dtype):
    fast, other = fused(heads(1)), heads(2).to(dtype)
    fxopt.load_sharded(fast, written(other, tmp_path))
    assert apart(fast.state_dict(), other.float().state_dict()) == 0


def test_what_a_step_computes_of_whole_tensors_is_computed(tmp_path: Path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    x = torch.randn(4, 8)
    fast = fxopt.optimize(model, "quantize{scheme=int8_weight}", example_inputs=x, measure=False, verify=False)
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    fxopt.load_sharded(fast, written(other, tmp_path))
    again = fxopt.optimize(other, plan=fxopt.plan(fast), example_inputs=x)
    torch.testing.assert_close(fast(x), again(x))


def spoiled(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    state = dict(heads().state_dict())
    change(state)
    folder.mkdir(exist_ok=True)
    to_safetensors(state, folder)
    return folder


def remove_file(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()


def cut_file(folder: Path) -> None:
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def put_other_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("heads.1.0.bias"), "missing: 'heads.1.0.bias'$"),
        (lambda state: state.update(more=torch.ones(2)), "unexpected: 'more'$"),
        (lambda state: state.update({"heads.1.0.bias": torch.ones(3)}), r"has shape \[3\], the model's has \[7\]"),
        (lambda state: state.update({"heads.1.0.bias": torch.ones(7).int()}), "is torch.int32, the model's is"),
        (lambda state: state.update({"last.weight": torch.ones(6, 5)}), "are one tensor in the model, and differ"),
    ],
)
def test_other_checkpoints_are_refused(tmp_path: Path, change: Callable[..., Any], message: str):
    fast = fused(heads())
    before = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    with pytest.raises(fxopt.StateError, match=message):
        fxopt.load_sharded(fast, spoiled(tmp_path, change))
    assert apart(fast.state_dict(), before) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_file, "lacks model-1.safetensors, which model.safetensors.index.json names"),
        (cut_file, "model-1.safetensors cannot be read"),
        (put_other_index, "is no index of safetensors files"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, change: Callable[[Path], None], message: str):
    change(written(heads(), tmp_path))
    with pytest.raises(fxopt.ArchiveError, match=message):
        fxopt.load_sharded(fused(heads()), tmp_path)


def test_damaged_checkpoints_of_torch_are_refused(tmp_path: Path):
    fast, path = fused(heads()), written(heads(), tmp_path, dcp=True)
    with pytest.raises(fxopt.StateError, match="its names are under key='model'"):
        fxopt.load_sharded(fast, path)
    (data,) = path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-400])
    with pytest.raises(fxopt.ArchiveError, match="is damaged"):
        fxopt.load_sharded(fast, path, key="model")
    (path / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(fxopt.ArchiveError, match=r"holds a builtins\.print"):
        fxopt.load_sharded(fast, path, key="model")


def test_what_turns_out_damaged_while_it_is_read_leaves_the_model_as_it_was(tmp_path: Path):
    """One file is whole, and bytes of the other are wrong."""
    path, fast = tmp_path / "saved", fused(heads(1))
    with warnings.catch_warnings(action="ignore"):
        checkpoint.save({"model": heads().state_dict()}, storage_writer=_two_files(path), no_dist=True)
    before = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    data = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[-len(content) // 3 :: 7] = bytes(len(content[-len(content) // 3 :: 7]))
    data.write_bytes(content)
    for model in (fast, fxopt.optimize(heads(None), "eliminate_dead_code", example_inputs=ROWS)):
        with pytest.raises(fxopt.ArchiveError, match="cannot be read"):
            fxopt.load_sharded(model, path, key="model", init=Heads.reset_buffers)
    assert apart(fast.state_dict(), before) == 0
    assert all(parameter.is_meta for parameter in model.parameters())


def _two_files(path: Path) -> checkpoint.FileSystemWriter:
    return checkpoint.FileSystemWriter(path, thread_count=2, single_file_per_rank=False)


def test_what_is_missing_of_an_expert_is_named(tmp_path: Path):
    fast = fxopt.optimize(mixtral(), "eliminate_dead_code", example_inputs={"input_ids": IDS})
    mixtral(seed=1).save_pretrained(tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (name,) = (each for each in state if each.endswith("layers.1.block_sparse_moe.experts.3.w3.weight"))
    state[name] = state[name][:-1]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(fxopt.StateError, match=r"experts.3.w3.weight' has shape \[23, 16\]"):
        fxopt.load_sharded(fast, tmp_path)
    del state[name]
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        fxopt.StateError, match=r"is a stack of 4: of tensors such as .* lacks number 3; it is not whole"
    ):
        fxopt.load_sharded(fast, tmp_path)
    like = name.replace("experts.3", "experts.0")
    more = {name: state[like].clone(), name.replace("experts.3", "experts.4"): state[like].clone()}
    safetensors.torch.save_file(state | more, tmp_path / "model.safetensors")
    with pytest.raises(fxopt.StateError, match=r"experts.4.w3.weight' is one too many; .* more experts"):
        fxopt.load_sharded(fast, tmp_path)


def test_a_device_that_is_not_there_is_named(tmp_path: Path):
    for device in ("foo", "cuda:77"):
        with pytest.raises(fxopt.UsageError, match=f"device='{device}'"):
            fxopt.load_sharded(fused(heads()), written(heads(), tmp_path), device=device)


def test_what_the_model_has_not_may_be_passed_over(tmp_path: Path):
    fast = fused(heads(1))
    fxopt.load_sharded(fast, spoiled(tmp_path, lambda state: state.update(more=torch.ones(2))), strict=False)
    assert apart(fast.state_dict(), heads().state_dict()) == 0


def test_buffers_that_no_checkpoint_has_are_asked_for(tmp_path: Path):
    fast = fxopt.optimize(heads(None), "eliminate_dead_code", example_inputs=ROWS)
    with pytest.raises(fxopt.StateError, match=r"the Heads has buffers on the meta device .* give init="):
        fxopt.load_sharded(fast, written(heads(), tmp_path))
