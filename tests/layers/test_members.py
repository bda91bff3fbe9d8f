"""Members of a fused ensemble in their old places: live, and sealed in."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

from fxopt.errors import FusedMemberError, UsageError
from fxopt.layers.members import FusedMembers, attach_member, seal, settings_of
from fxopt.runtime.graphs import Capture, capture_of, own
from fxopt.tracing.program import capture_program

COUNT = 3


class Head(nn.Module):
    """A member of a user's class, with a parameter of its own beside its children's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


class Model(nn.Module):
    def __init__(self, count: int = COUNT) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList(Head() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        return torch.cat([head(x) for head in self.heads], -1)


PLACES = ("scale", "layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias")


def slot(place: str) -> str:
    return place.replace(".", "_")


def fuse(model: Model) -> Callable[[], None]:
    """Do to a model what fuse_ensembles does, but for the graph."""
    stacked = {
        slot(place): torch.stack([head.get_parameter(place).detach() for head in model.heads]) for place in PLACES
    }
    model.store = store = FusedMembers(stacked)
    undo: list[Callable[[], None]] = []
    for index, head in enumerate(model.heads):
        undo.append(attach_member(head, {"scale": (store, "scale", index)}))
        for layer in (0, 2):
            views = {name: (store, f"layers_{layer}_{name}", index) for name in ("weight", "bias")}
            undo.append(attach_member(head.layers[layer], views))
        undo += [seal(head.layers, {"0", "2"}), seal(head, {"layers"})]
    undo += [seal(model.heads, [str(index) for index in range(len(model.heads))]), seal(model, ["heads"])]

    def undo_all() -> None:
        for step in reversed(undo):
            step()
        del model.store

    return undo_all


@pytest.fixture(params=["plain", "captured"])
def model(request: pytest.FixtureRequest) -> Model:
    model = Model()
    if request.param == "captured":
        capture_program(model, (torch.randn(2, 3),))
        own(model)
    return model


@pytest.fixture
def fused(model: Model) -> Model:
    fuse(model)
    return model


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3)


# -- members live on -----------------------------------------------------------------------------------------------


def test_members_compute_with_the_stacked_parameters(model: Model):
    expected, text = model(inputs()), repr(model)
    objects = list(model.modules())
    fuse(model)
    assert torch.equal(model(inputs()), expected)
    assert repr(model).startswith(text.removesuffix(")").rstrip())
    assert all(one is other for one, other in zip(objects, model.modules(), strict=False))
    with torch.no_grad():
        model.store.layers_0_weight[1].zero_()
    assert model.heads[1].layers[0].weight.eq(0).all()
    assert not torch.equal(model.heads[1](inputs()), expected[:, 2:4])


def test_classes_pass_for_the_users_own(fused: Model):
    head = fused.heads[0]
    for module, cls in ((fused, Model), (head, Head), (head.layers, nn.Sequential), (head.layers[0], nn.Linear)):
        assert isinstance(module, cls)
        assert type(module).__name__ == cls.__name__
        assert type(module).__qualname__ == cls.__qualname__
        assert type(module).__module__ == cls.__module__


def test_equal_members_share_one_class(fused: Model):
    assert type(fused.heads[0]) is type(fused.heads[1])
    assert type(fused.heads[0].layers[0]) is type(fused.heads[1].layers[2])


def test_only_the_stacked_parameters_are_listed_and_the_members_own_saved(fused: Model):
    names = ["trunk.weight", "trunk.bias", *(f"store.{slot(place)}" for place in PLACES)]
    assert [name for name, _ in fused.named_parameters()] == names
    assert list(fused.state_dict()) == list(Model().state_dict())
    assert all(isinstance(parameter, nn.Parameter) for parameter in fused.parameters())


def test_a_members_own_tensors_are_gone_and_their_names_keep_their_places(fused: Model):
    linear = fused.heads[1].layers[0]
    assert dict(linear._parameters) == {"weight": None, "bias": None}
    assert not isinstance(linear.weight, nn.Parameter)
    with pytest.raises(AttributeError):
        linear.get_parameter("weight")


def test_reading_and_writing_a_member(fused: Model):
    linear, stacked = fused.heads[2].layers[0], fused.store.layers_0_weight
    assert linear.weight.data_ptr() == stacked[2].data_ptr()
    linear.weight.data.add_(1)
    assert torch.equal(linear.weight, stacked[2])
    nn.init.constant_(linear.weight, 3.0)
    assert stacked[2].eq(3).all()
    assert not stacked[:2].eq(3).any()
    linear.weight = nn.Parameter(torch.full((5, 3), 4.0))
    assert stacked[2].eq(4).all()
    linear.weight = torch.full((5, 3), 5, dtype=torch.int64)
    assert stacked[2].eq(5).all()
    assert fused.store.layers_0_weight is stacked
    linear.register_parameter("weight", nn.Parameter(torch.full((5, 3), 6.0)))
    assert stacked[2].eq(6).all()
    linear.reset_parameters()
    assert not stacked[2].eq(6).any()


def test_writing_another_shape_is_refused(fused: Model):
    with pytest.raises(FusedMemberError, match=r"'weight' of this Linear .* keeps its shape \[5, 3\].*\[3, 5\]"):
        fused.heads[0].layers[0].weight = nn.Parameter(torch.zeros(3, 5))


def test_training_through_a_member_reaches_the_store(fused: Model):
    head = fused.heads[1]
    assert head.layers[0].weight.requires_grad
    head(inputs()).sum().backward()
    gradient = fused.store.layers_0_weight.grad
    assert gradient is not None
    assert gradient[1].ne(0).any()
    assert gradient[[0, 2]].eq(0).all()
    member = head.layers[0].weight.grad
    assert member is not None
    assert member.data_ptr() == gradient[1].data_ptr()
    fused.zero_grad()
    assert fused.store.layers_0_weight.grad is None


def test_moving_and_casting_the_model(fused: Model):
    fused.double()
    assert fused.heads[0].layers[0].weight.dtype == torch.float64
    assert fused(inputs().double()).dtype == torch.float64
    fused.to("meta")
    assert fused.heads[0].scale.is_meta


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state_dict_is_seen_by_members(fused: Model, assign: bool):
    state = {name: torch.full_like(tensor, 2.0) for name, tensor in fused.state_dict().items()}
    fused.load_state_dict(state, assign=assign)
    assert fused.heads[1].layers[2].weight.eq(2).all()
    assert fused.heads[1].layers[2].weight.requires_grad


def test_functional_calls_reach_the_members(fused: Model):
    state = {name: torch.zeros_like(tensor) for name, tensor in fused.named_parameters()}
    assert torch.func.functional_call(fused, state, (inputs(),)).eq(0).all()
    assert fused(inputs()).ne(0).any()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_of_the_model_are_whole_and_their_own(fused: Model, duplicate: Callable[[Any], Any]):
    other = duplicate(fused)
    assert torch.equal(other(inputs()), fused(inputs()))
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in fused.named_parameters()]
    other.heads[0].scale = torch.tensor(9.0)
    assert other.store.scale[0] == 9
    assert fused.store.scale[0] != 9
    with pytest.raises(FusedMemberError):
        other.heads[0] = Head()
    assert type(other.heads[0].layers[0]) is type(fused.heads[0].layers[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_of_one_member(fused: Model, duplicate: Callable[[Any], Any]):
    linear = fused.heads[1].layers[0]
    other = duplicate(linear)
    assert torch.equal(other.weight, linear.weight)
    nn.init.zeros_(other.weight)
    assert linear.weight.ne(0).any()


def test_compiles_and_exports(fused: Model):
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(inputs()), fused(inputs()))
        compiled(inputs()).sum().backward()
    exported = torch.export.export(fused, (inputs(),))
    torch.testing.assert_close(exported.module()(inputs()), fused(inputs()))
    assert set(exported.state_dict) == {name for name, _ in fused.named_parameters()}


def test_a_new_module_of_a_members_class_is_an_ordinary_one(fused: Model):
    linear = type(fused.heads[0].layers[0])(2, 2)
    assert type(linear) is nn.Linear
    assert len(list(linear.parameters())) == 2
    first = fused.heads[:2]
    assert type(first) is nn.ModuleList
    assert first[1] is fused.heads[1]
    assert type(fused.heads[0].layers[1:]) is nn.Sequential


def test_data_parallel_can_put_its_replicas_together(fused: Model):
    replica, heads = fused._replicate_for_data_parallel(), fused.heads._replicate_for_data_parallel()
    replica.heads = heads
    assert replica.heads is heads
    with pytest.raises(FusedMemberError):
        fused.heads = heads


# -- a part asked directly -----------------------------------------------------------------------------------------


def test_a_container_lists_the_stacked_parameters(fused: Model):
    assert set(fused.heads.parameters()) == set(fused.store.parameters())
    assert sum(p.numel() for p in fused.heads.parameters()) == sum(p.numel() for p in Model().heads.parameters())
    assert next(name for name, _ in fused.heads.named_parameters("h")) == "h.0.scale..2.scale"
    assert list(fused.heads.parameters(recurse=False)) == []
    optimizer = torch.optim.SGD(fused.heads.parameters(), 0.1)
    fused(inputs()).sum().backward()
    before = fused.heads[0].layers[0].weight.clone()
    optimizer.step()
    assert not torch.equal(fused.heads[0].layers[0].weight, before)
    fused.heads.zero_grad()
    assert fused.store.scale.grad is None


def test_a_container_can_be_frozen_a_member_cannot(fused: Model):
    fused.heads.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in fused.store.parameters())
    assert not fused.heads[0].layers[0].weight.requires_grad
    fused.heads[0].requires_grad_(False)  # as it is
    with pytest.raises(FusedMemberError, match="one member cannot be frozen"):
        fused.heads[0].requires_grad_(True)
    fused.requires_grad_(True)
    with pytest.raises(FusedMemberError, match="one member cannot be frozen"):
        fused.heads[0].layers[0].requires_grad_(False)


def test_a_member_lists_its_slices_and_no_optimizer_takes_them(fused: Model):
    head = fused.heads[0]
    assert {name: p.shape for name, p in head.named_parameters()} == {n: p.shape for n, p in Head().named_parameters()}
    with pytest.raises(FusedMemberError, match="no optimizer can train by itself"):
        torch.optim.SGD(head.parameters(), 0.1)


def test_parts_save_and_load_by_themselves(fused: Model):
    for part, fresh in (
        (fused.heads, Model().heads),
        (fused.heads[1], Head()),
        (fused.heads[1].layers[0], nn.Linear(3, 5)),
    ):
        assert part.state_dict().keys() == fresh.state_dict().keys()
        result = part.load_state_dict(fresh.state_dict())
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert all(torch.equal(part.state_dict()[name], tensor) for name, tensor in fresh.state_dict().items())
    assert torch.equal(fused.store.layers_0_weight[1], fused.heads[1].layers[0].weight)


def test_parts_load_strictly(fused: Model):
    state = Head().state_dict()
    partial = {name: tensor for name, tensor in state.items() if name != "scale"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"scale"'):
        fused.heads[0].load_state_dict(partial)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"gamma"'):
        fused.heads[0].load_state_dict(state | {"gamma": torch.zeros(1)})
    before = fused.store.scale.clone()
    result = fused.heads[0].load_state_dict(partial | {"gamma": torch.zeros(1)}, strict=False)
    assert result.missing_keys == ["scale"]
    assert result.unexpected_keys == ["gamma"]
    assert torch.equal(fused.store.scale, before)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers.0.weight.*\[1\].*\[5, 3\]"):
        fused.heads[0].load_state_dict(state | {"layers.0.weight": torch.zeros(1)})


# -- what is sealed ------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Model], Any]] = {
    "replace": lambda m: m.heads.__setitem__(1, Head()),
    "append": lambda m: m.heads.append(Head()),
    "extend": lambda m: m.heads.extend([Head()]),
    "add": lambda m: m.heads.__iadd__([Head()]),
    "insert": lambda m: m.heads.insert(0, Head()),
    "pop": lambda m: m.heads.pop(0),
    "delete": lambda m: m.heads.__delitem__(0),
    "delete slice": lambda m: m.heads.__delitem__(slice(0, 2)),
    "add_module": lambda m: m.heads.add_module("0", Head()),
    "register_module": lambda m: m.heads.register_module("9", Head()),
    "set attribute of a list": lambda m: setattr(m.heads, "more", Head()),
    "rebind the list": lambda m: setattr(m, "heads", nn.ModuleList()),
    "rebind to None": lambda m: setattr(m, "heads", None),
    "delete the list": lambda m: delattr(m, "heads"),
    "replace a layer": lambda m: m.heads[0].layers.__setitem__(0, nn.Linear(3, 5)),
    "append a layer": lambda m: m.heads[0].layers.append(nn.Tanh()),
    "multiply layers": lambda m: m.heads[0].layers.__imul__(2),
    "rebind layers": lambda m: setattr(m.heads[0], "layers", nn.Identity()),
    "forget a parameter": lambda m: setattr(m.heads[0].layers[0], "bias", None),
    "delete a parameter": lambda m: delattr(m.heads[0].layers[0], "bias"),
    "add a parameter": lambda m: setattr(m.heads[0].layers[0], "gamma", nn.Parameter(torch.ones(1))),
    "prune": lambda m: torch.nn.utils.prune.l1_unstructured(m.heads[0].layers[0], "weight", 0.2),
    "parametrize": lambda m: nn.utils.parametrizations.weight_norm(m.heads[0].layers[0]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_would_come_apart_is_refused(fused: Model, change: Callable[[Model], Any]):
    expected, names = fused(inputs()), [name for name, _ in fused.named_modules()]
    with pytest.raises(FusedMemberError, match=r"fxopt.restore\(model\)"):
        change(fused)
    assert [name for name, _ in fused.named_modules()] == names
    assert torch.equal(fused(inputs()), expected)


def test_old_spectral_norm_fails_too(fused: Model):
    with pytest.raises(ValueError, match="is None"):
        nn.utils.spectral_norm(fused.heads[0].layers[2])


def test_a_dictionary_of_members_is_sealed():
    heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    seal(heads, ["a", "b"])
    for change in (heads.clear, lambda: heads.pop("a"), lambda: heads.update({"c": nn.Linear(1, 1)})):
        with pytest.raises(FusedMemberError):
            change()
    with pytest.raises(FusedMemberError):
        del heads["a"]
    with pytest.raises(FusedMemberError):
        heads["a"] = nn.Linear(2, 2)
    assert list(heads) == ["a", "b"]


def test_the_rest_of_a_sealed_parent_is_free(fused: Model):
    fused.extra = nn.Linear(1, 1)
    fused.trunk = nn.Linear(3, 3)
    fused.note = "mine"
    fused.heads = fused.heads
    del fused.extra
    assert fused.note == "mine"


def test_a_users_registry_of_subclasses_sees_nothing():
    seen: list[str] = []

    class Registered(nn.Module):
        def __init_subclass__(cls, **more: Any) -> None:
            seen.append(cls.__name__)

        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(1, 1)

    module = Registered()
    seal(module, ["child"])
    assert isinstance(module, Registered)
    assert seen == []


# -- and back ------------------------------------------------------------------------------------------------------


def test_undoing_leaves_no_trace(model: Model):
    def traces() -> list[Any]:
        # the model's own capture may be another object, of the same graphs
        return [
            (
                type(m),
                {k: id(v) for k, v in m.__dict__.items() if m is not model or not isinstance(v, Capture)},
                dict(m._parameters),
            )
            for m in model.modules()
        ]

    own(model) if capture_of(model) else None
    expected, before = model(inputs()), traces()
    undo = fuse(model)
    with torch.no_grad():
        model.store.layers_0_weight.zero_()
    undo()
    after = traces()
    for (cls, entries, parameters), (cls_now, entries_now, parameters_now) in zip(before, after, strict=True):
        assert cls_now is cls
        assert entries_now == entries
        assert list(parameters_now) == list(parameters)
        assert all(parameters_now[name] is parameters[name] for name in parameters)
    assert torch.equal(model(inputs()), expected)


def test_a_captured_parent_stays_the_owner_of_its_graph(model: Model):
    if capture_of(model) is None:
        return
    capture = own(model)
    undo = seal(model, ["heads"])
    assert own(model) is capture_of(model)
    undo()
    assert capture_of(model) is capture
    assert own(model) is capture


def test_seals_and_views_add_up_and_come_off_in_turn():
    parent = nn.Module()
    parent.a, parent.b = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = seal(parent, ["a"]), seal(parent, ["b"])
    second()
    parent.b = nn.Identity()
    with pytest.raises(FusedMemberError):
        parent.a = nn.Identity()
    first()
    assert type(parent) is nn.Module

    linear = nn.Linear(2, 2)
    store = FusedMembers({"w": torch.zeros(3, 2, 2), "b": torch.ones(3, 2)})
    first = attach_member(linear, {"weight": (store, "w", 0)})
    second = attach_member(linear, {"bias": (store, "b", 0)})
    assert linear.weight.eq(0).all()
    assert linear.bias.eq(1).all()
    second()
    assert isinstance(linear.bias, nn.Parameter)
    assert linear.weight.eq(0).all()
    first()
    assert type(linear) is nn.Linear
    assert list(linear._parameters) == ["weight", "bias"]


# -- the store -----------------------------------------------------------------------------------------------------


def test_the_store_takes_tensors_over_as_they_are():
    weight = torch.randn(3, 4, 5).permute(2, 0, 1)
    store = FusedMembers(
        {"weight": weight, "count": torch.zeros(3, dtype=torch.int64)}, {"weight": True, "count": False}
    )
    assert store.weight.data_ptr() == weight.data_ptr()
    assert store.weight.stride() == weight.stride()
    assert (store.weight.requires_grad, store.count.requires_grad) == (True, False)
    assert repr(store) == "FusedMembers(weight=[5, 3, 4], count=[3])"
    assert not any(p.requires_grad for p in FusedMembers({"weight": weight}, False).parameters())


@pytest.mark.parametrize(
    ("name", "view", "message"),
    [
        ("gamma", ("w", 0), "no parameter 'gamma' of its own"),
        ("weight", ("b", 0), r"'weight' of this Linear has shape \[2, 2\]; it cannot be slice 0 of 'b'.*\[3, 2\]"),
        ("weight", ("w", 3), "cannot be slice 3 of 'w'"),
        ("weight", ("w", -1), "cannot be slice -1 of 'w'"),
    ],
)
def test_slices_that_do_not_fit(name: str, view: tuple[str, int], message: str):
    linear = nn.Linear(2, 2)
    store = FusedMembers({"w": torch.zeros(3, 2, 2), "b": torch.ones(3, 2)})
    with pytest.raises(FusedMemberError, match=message):
        attach_member(linear, {"bias": (store, "b", 1), name: (store, *view)})
    assert type(linear) is nn.Linear
    assert isinstance(linear.bias, nn.Parameter)


def test_functional_calls_under_old_names_are_refused(fused: Model):
    before = fused(inputs())
    with pytest.raises(FusedMemberError, match=r"named_parameters"):
        torch.func.functional_call(fused, {"heads.0.layers.0.weight": torch.zeros(1)}, (inputs(),))
    assert torch.equal(fused(inputs()), before)


def test_setting_the_data_of_a_members_parameter_writes_to_the_stacked_one(fused: Model):
    fused.heads[1].scale.data = torch.tensor(7.0)
    assert fused.store.scale[1] == 7
    with pytest.raises(FusedMemberError, match="keeps its shape"):
        fused.heads[1].scale.data = torch.ones(2)
    assert type(fused.heads[1].scale + 1) is Tensor


@pytest.mark.parametrize("kind", [nn.Linear, nn.Dropout, nn.GRU])
def test_what_torch_sets_is_no_setting_and_cannot_be_sealed(kind: type[nn.Module]):
    module = nn.Dropout(0.5) if kind is nn.Dropout else kind(4, 4)
    settings = settings_of(module)
    assert {nn.Linear: "in_features", nn.Dropout: "p", nn.GRU: "hidden_size"}[kind] in settings
    assert not {"training", "_parameters", "_flat_weights", "_forward_hooks"} & set(settings)
    for name in ("training", "_parameters", "_flat_weights"):
        with pytest.raises(UsageError, match=f"'{name}' cannot be sealed: torch sets it"):
            seal(module, ["forward", name])
    undo = seal(module, settings)
    module.train().eval().double().requires_grad_(False)
    undo()


def test_a_member_without_a_class_that_reads_its_slices_stays_as_it_was(monkeypatch: pytest.MonkeyPatch):
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    before, store = linear(x), FusedMembers({"w": torch.zeros(3, 2, 2), "b": torch.ones(3, 2)})
    monkeypatch.setattr("fxopt.layers.members.fused_class", lambda base, names: base)
    with pytest.raises(FusedMemberError, match="this Linear has no class that reads its slices"):
        attach_member(linear, {"weight": (store, "w", 1), "bias": (store, "b", 1)})
    assert torch.equal(linear(x), before) and type(linear) is nn.Linear
