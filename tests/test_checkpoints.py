"""Checkpoints of optimized models are the user's: original names, shapes and order, however they are made."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fxopt
from fxopt.errors import FusedMemberError, StateError

MEMBERS = 3


class Head(nn.Module):
    """A member with every kind of tensor: parameters, buffers, a buffer that is in no state dict, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.rand(2))
        self.register_buffer("shift", torch.rand(2))
        self.register_buffer("offset", torch.tensor([0.5, 1.5]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh()) * self.scale + self.shift + self.offset


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(Head() for _ in range(MEMBERS))
        self.tail = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return self.tail(torch.stack([head(x) for head in self.heads]).mean(0))


class Model(nn.Module):
    """The ensemble is below the root: what holds its tensors is in the middle of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.encoder, self.after = nn.Linear(4, 4), Encoder(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.encoder(self.before(x)))


X = torch.linspace(-1, 1, 12).reshape(3, 4)
PLACES = [name for name, _ in Model().named_modules()]


def optimized(model: nn.Module, lowering: str = "bmm", **options: Any) -> nn.Module:
    fast = fxopt.optimize(
        model, f"fuse_ensembles{{lowering={lowering}}}", example_inputs=(X,), verify=False, measure=False, **options
    )
    assert "applied" in [decision.status for decision in fxopt.plan(fast).decisions], fxopt.plan(fast).decisions
    return fast


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def fast(model: nn.Module) -> nn.Module:
    return optimized(model)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Assert equal names in equal order, with equal tensors."""
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape and tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def new_names(model: nn.Module) -> dict[str, Tensor]:
    """Return what is registered in a model, under today's names; buffers that are in no state dict left out."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if "offset" not in name}


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda model: model,
    "Sequential": lambda model: nn.Sequential(nn.Linear(1, 1), model),
    "ModuleDict": lambda model: nn.ModuleDict({"model": model, "loss": nn.Linear(1, 1)}),
    "AveragedModel": AveragedModel,
}


# -- saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowering", ["bmm", "wide_input_first", "vmap"])
def test_every_module_saves_its_original_names_in_order(model: nn.Module, lowering: str) -> None:
    fast = optimized(model, lowering)
    for place in PLACES:
        assert_same(fast.get_submodule(place).state_dict(), model.get_submodule(place).state_dict())
    assert not any(".heads." in name for name, _ in fast.named_parameters()), "named_parameters tells the truth"
    assert_same(fxopt.state_dict(fast), model.state_dict())


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_whatever_holds_the_model_saves_original_names(
    model: nn.Module, fast: nn.Module, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(1)
    plain = wrap(model)
    torch.manual_seed(1)
    assert_same(wrap(fast).state_dict(), plain.state_dict())


def test_the_arguments_of_state_dict(model: nn.Module, fast: nn.Module) -> None:
    kept = fast.state_dict(keep_vars=True)
    assert list(kept) == list(model.state_dict())
    kept["encoder.heads.1.first.weight"].sum().backward()
    stacked = next(p for name, p in fast.named_parameters() if name.endswith("first.weight"))
    assert stacked.grad is not None and stacked.grad[1].eq(1).all() and stacked.grad[0].eq(0).all()
    assert not any(tensor.requires_grad for tensor in fast.state_dict().values())
    destination: OrderedDict[str, Any] = OrderedDict(mine=torch.zeros(1))
    assert fast.state_dict(destination=destination, prefix="a.") is destination
    assert list(destination) == ["mine", *(f"a.{name}" for name in model.state_dict())]
    with torch.inference_mode():
        assert list(fast.state_dict()) == list(model.state_dict())


def test_the_users_hooks_see_original_names(model: nn.Module) -> None:
    seen: list[list[str]] = []
    plain = copy.deepcopy(model)
    for each in (model, model.encoder.heads[1].first, model.encoder.heads):
        each.register_state_dict_post_hook(lambda module, state, prefix, _: seen.append(list(state)))
        each.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append([prefix]))
    model.state_dict()
    expected, seen[:] = list(seen), []
    fast = optimized(model)
    seen.clear()
    assert_same(fast.state_dict(), plain.state_dict())
    assert seen == expected
    fast.encoder.register_load_state_dict_pre_hook(_modern)
    old = {name.replace("heads", "members"): value for name, value in plain.state_dict().items()}
    assert fast.load_state_dict(old) == ([], [])


@pytest.mark.parametrize("strict", [True, False])
def test_hooks_of_members_see_what_is_given(model: nn.Module, strict: bool) -> None:
    for head in model.encoder.heads:
        head.first.register_load_state_dict_pre_hook(_weight_of_old)
    fast = optimized(model)
    old = {name.replace("first.weight", "first.w"): tensor + 1 for name, tensor in model.state_dict().items()}
    for each in (model, fast):
        assert each.load_state_dict(old, strict=strict) == ([], [])
    assert_same(fast.state_dict(), model.state_dict())
    assert torch.equal(fast.encoder.heads[1].first.weight, old["encoder.heads.1.first.w"] * 2)


def _weight_of_old(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    state[f"{prefix}weight"] = state.pop(f"{prefix}w") * 2


def _modern(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}members")]:
        state[name.replace("members", "heads")] = state.pop(name)


def test_slices_are_views_of_the_model_each_with_a_storage_of_its_own(fast: nn.Module) -> None:
    state, again = fast.state_dict(), fast.state_dict()
    assert all(tensor.data_ptr() == again[name].data_ptr() for name, tensor in state.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    for tensor in state.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    head, file = fast.encoder.heads[0], io.BytesIO()
    torch.save(head.first.state_dict(), file)
    plain = io.BytesIO()
    torch.save(nn.Linear(4, 5).state_dict(), plain)
    assert len(file.getvalue()) == len(plain.getvalue()), "one member's file holds one member"
    stacked = next(p for name, p in fast.named_parameters() if name.endswith("first.weight"))
    version = stacked._version
    state["encoder.heads.2.first.weight"].fill_(7)
    assert stacked[2].eq(7).all() and stacked[1].ne(7).any()
    assert stacked._version > version, "derived tensors are made anew by it"
    assert head.first.weight.ne(7).any() and fast.encoder.heads[2].first.weight.eq(7).all()


def test_slices_with_gaps_are_copied(model: nn.Module) -> None:
    fast = optimized(model, "wide_input_first")
    name = next(n for n, p in fast.named_parameters() if not p.is_contiguous())
    assert all(tensor.is_contiguous() for tensor in fast.state_dict().values()), name


# -- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("wrap", [w for name, w in WRAPPERS.items() if name != "AveragedModel"])
def test_both_kinds_of_names_load(
    model: nn.Module, fast: nn.Module, wrap: Callable[[nn.Module], nn.Module], assign: bool
) -> None:
    torch.manual_seed(2)
    other = Model()
    other(X)  # running statistics and their count move, too
    other.eval()
    for given in (other.state_dict(), new_names(optimized(other))):
        target = copy.deepcopy(fast)
        whole, plain = wrap(target), wrap(copy.deepcopy(other))
        prefix = next(n for n in whole.state_dict() if n.endswith("before.weight")).removesuffix("before.weight")
        rest = {n: v for n, v in plain.state_dict().items() if not n.startswith(prefix)} if prefix else {}
        given = {prefix + name: value.clone() for name, value in given.items()} | rest
        assert whole.load_state_dict(given, assign=assign) == ([], [])
        assert_same(target.state_dict(), other.state_dict())
        torch.testing.assert_close(target.eval()(X), other(X))


@pytest.mark.parametrize("place", PLACES)
def test_every_module_loads_what_it_saves(fast: nn.Module, place: str) -> None:
    other, names = Model(), fast.state_dict().keys()
    before = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    module, given = fast.get_submodule(place), other.get_submodule(place).state_dict()
    holder = nn.Sequential(module)
    assert holder.load_state_dict({f"0.{name}": value for name, value in given.items()}) == ([], [])
    assert_same(module.state_dict(), given)
    inside = {f"{place}.{name}" if place else name for name in given}
    assert all(torch.equal(fast.state_dict()[name], before[name]) for name in names - inside)
    if given:
        first = next(iter(given))
        rest = {name: value for name, value in given.items() if name != first}
        assert module.load_state_dict(rest, strict=False) == ([first], [])
        with pytest.raises(RuntimeError, match=rf'Missing key.*"0\.{first}"'):
            holder.load_state_dict({f"0.{name}": value for name, value in rest.items()})
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"gamma"'):
            module.load_state_dict({**given, "gamma": torch.zeros(1)})
        with pytest.raises(RuntimeError, match=rf"size mismatch for {first}"):
            module.load_state_dict({**given, first: torch.zeros(9, 9)})


def test_nothing_takes_the_place_of_a_slice_where_torch_registers_it(fast: nn.Module) -> None:
    register, tensor = fast.encoder.heads[0].last._parameters, nn.Parameter(torch.zeros(1))
    writes: list[Callable[[], Any]] = [
        lambda: register.update(weight=tensor), lambda: register.update([("weight", tensor)]),
        lambda: register.__ior__({"weight": tensor}), lambda: register.pop("weight"),
    ]  # fmt: skip
    for write in writes:
        with pytest.raises(FusedMemberError, match="'weight' is a slice of a stacked parameter"):
            write()
    register.update(dict(register))  # names of slices without a value, as checkpoint puts them back


def test_a_member_is_not_assigned_another_dtype_by_itself(fast: nn.Module) -> None:
    head = fast.encoder.heads[0]
    before = {name: tensor.clone() for name, tensor in head.last.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"'weight' is a slice of a stacked parameter.*load the whole model"):
        head.last.load_state_dict({n: v.double() for n, v in before.items()}, assign=True)
    assert_same(head.last.state_dict(), before)
    fast.load_state_dict(
        {n: v.double() if v.is_floating_point() else v for n, v in fast.state_dict().items()}, assign=True
    )
    assert head.last.weight.dtype == torch.float64


def test_a_model_on_the_meta_device_is_filled_by_assignment(model: nn.Module) -> None:
    with torch.device("meta"):
        fast = fxopt.optimize(Model(), "fuse_ensembles{lowering=bmm}", measure=False)
    assert any("fused" in name for name, _ in fast.named_parameters())
    assert fast.load_state_dict(model.state_dict(), assign=True) == ([], [])
    assert_same(fast.state_dict(), model.state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_take_the_state_dict_of_the_model(fast: nn.Module, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    other = duplicate(fast)
    assert other.load_state_dict(fast.state_dict()) == ([], [])
    other.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in fast.state_dict().items()})
    assert any(tensor.any() for tensor in fast.state_dict().values())
    assert_same(other.state_dict(), {name: torch.zeros_like(tensor) for name, tensor in fast.state_dict().items()})


class Tied(nn.Module):
    """Members beside a weight that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(MEMBERS))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(sum(head(self.first(x)) for head in self.heads))


def test_tied_tensors_are_saved_under_both_names() -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    fast = optimized(model)
    assert_same(fast.state_dict(), model.state_dict())
    assert fast.load_state_dict(other.state_dict()) == ([], [])
    assert_same(fast.state_dict(), other.state_dict())
    assert fast.first.weight is fast.last.weight
    torch.testing.assert_close(fast(X), other(X))


def test_a_model_optimized_twice_and_in_place(model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=(X,), measure=False, inplace=True)
    assert_same(model.state_dict(), before)
    again = fxopt.optimize(model, ["eliminate_dead_code", "fuse_ensembles"], example_inputs=(X,), measure=False)
    assert_same(again.state_dict(), before)
    restored = fxopt.restore(again)
    assert type(restored) is Model
    assert_same(restored.state_dict(), before)
    assert type(restored.encoder) is Encoder and "_fxopt_state_map" not in vars(restored.encoder)


# -- those who average, and wrap -----------------------------------------------------------------------------------


def test_moving_averages(model: nn.Module, fast: nn.Module) -> None:
    """The average of parameters, and the average that is written into state dicts."""
    averages = [AveragedModel(each, use_buffers=True) for each in (model, fast)]
    by_state = [copy.deepcopy(each) for each in (model, fast)]
    for step in range(2):
        for each, average, other in zip((model, fast), averages, by_state, strict=True):
            new = {name: tensor + step + 1 for name, tensor in each.state_dict().items()}
            each.load_state_dict(new)
            average.update_parameters(each)
            for mine, theirs in zip(other.state_dict().values(), each.state_dict().values(), strict=True):
                mine.copy_(0.9 * mine + 0.1 * theirs)
    torch.testing.assert_close(averages[1].state_dict(), averages[0].state_dict())
    torch.testing.assert_close(by_state[1].state_dict(), by_state[0].state_dict())


def test_a_wrapper_is_told_where_the_optimized_model_is(fast: nn.Module) -> None:
    with pytest.raises(StateError, match=r"this AveragedModel was not optimized by fxopt; .* its 'module': give that"):
        fxopt.state_dict(AveragedModel(fast))
    with pytest.raises(StateError, match=r"this Linear was not optimized by fxopt; give the whole model"):
        fxopt.restore(nn.Linear(1, 1))


# -- files ---------------------------------------------------------------------------------------------------------


def test_files_of_torch_and_safetensors(model: nn.Module, fast: nn.Module, tmp_path: Path) -> None:
    torch.save(fast.state_dict(), tmp_path / "torch")
    save_file(fast.state_dict(), tmp_path / "file")
    save_model(fast, tmp_path / "model")
    assert_same(torch.load(tmp_path / "torch", weights_only=True), model.state_dict())
    for path in ("file", "model"):
        assert load_file(tmp_path / path).keys() == model.state_dict().keys()
        for target in (Model(), optimized(Model())):
            assert load_model(target, tmp_path / path) == (set(), [])
            assert_same(target.state_dict(), model.state_dict())


def test_fabric(fast: nn.Module, tmp_path: Path) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(fast, torch.optim.Adam(fast.parameters()))
    fabric.backward(module(X).square().sum())
    optimizer.step()
    fabric.save(tmp_path / "file", {"model": module, "optimizer": optimizer})
    Model().load_state_dict(torch.load(tmp_path / "file", weights_only=True)["model"])
    target = optimized(Model())
    resumed, theirs = fabric.setup(target, torch.optim.Adam(target.parameters()))
    fabric.load(tmp_path / "file", {"model": resumed, "optimizer": theirs})
    for each, stepper in ((module, optimizer), (resumed, theirs)):
        stepper.zero_grad()
        fabric.backward(each(X).square().sum())
        stepper.step()
    assert_same(target.state_dict(), fast.state_dict())


def test_accelerate(fast: nn.Module, tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(fast)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(fast, tmp_path / "model")
    saved = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    for path in ("state", "model"):
        assert_same({name: load_file(tmp_path / path / "model.safetensors")[name] for name in saved}, saved)
    for tensor in fast.state_dict().values():
        tensor.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert_same(fast.state_dict(), saved)


def pretrained() -> Any:
    """Return a tiny BERT, whose query, key and value are an ensemble."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def optimized_pretrained(model: Any) -> Any:
    ids = torch.arange(8).reshape(2, 4)
    fast = fxopt.optimize(
        model, "fuse_ensembles{lowering=bmm}", example_inputs={"input_ids": ids}, verify=False, measure=False
    )
    assert any("fused" in name for name, _ in fast.named_parameters())
    return fast


def test_save_pretrained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = pretrained().eval(), torch.arange(8).reshape(2, 4)
    fast = optimized_pretrained(model)
    fast.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert_same(loaded.state_dict(), model.state_dict())
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    again = optimized_pretrained(loaded)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_trainer_saves_and_resumes(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    plain = pretrained()
    data = [{"input_ids": torch.arange(4) + i, "labels": torch.tensor(i % 2)} for i in range(4)]

    def trained(model: Any, **options: Any) -> Any:
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, max_steps=4, save_steps=2, report_to=[], use_cpu=True,
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxopt.GuardWarning)  # it gives the model an argument more
            Trainer(model, arguments, train_dataset=data).train(**options)
        return model

    fast = trained(optimized_pretrained(copy.deepcopy(plain)))
    assert_same(type(plain).from_pretrained(tmp_path / "checkpoint-4").state_dict(), fast.state_dict())
    resumed = trained(optimized_pretrained(pretrained()), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(resumed.state_dict(), fast.state_dict())


class _Formatted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.contiguous(memory_format=torch.channels_last)).relu()


def test_memory_formats_in_a_forward_are_pickled() -> None:
    x, file = torch.randn(2, 3, 6, 6), io.BytesIO()
    torch.save(fxopt.optimize(_Formatted().eval(), "eliminate_dead_code", example_inputs=(x,), measure=False), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded(x).is_contiguous(memory_format=torch.channels_last)
    assert "channels_last" in str(fxopt.graphs(loaded)[""])
