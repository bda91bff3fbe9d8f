from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxopt.errors import StateError
from fxopt.runtime.state import STATE_MAP, Concatenate, KeepsOriginalNames, Rename, Stack, StateMap, StateStep

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]

STACKED = StateMap((Stack(("heads.0.w", "heads.1.w", "heads.2.w"), "fused.w"),))


def heads(**others: Tensor) -> dict[str, Tensor]:
    return {f"heads.{i}.w": torch.full((2, 3), float(i)) for i in range(3)} | others


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


# -- any composition -----------------------------------------------------------------------------------------------


@dataclass
class Case:
    state: dict[str, Tensor]
    map: StateMap


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a state dict and a few steps, each over tensors that those before it left."""
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=4)
    )
    state: dict[str, Tensor] = {}
    for number, (dtype, rank, count) in enumerate(kinds):
        shape = tuple(range(2, 2 + rank))
        state |= {f"group{number}.{i}": torch.randint(-9, 9, shape).to(dtype) for i in range(count)}
    names = draw(st.permutations(list(state)))
    state = {name: state[name] for name in names}
    now, steps = dict(state), list[StateStep]()
    for number in range(draw(st.integers(0, 5))):
        step = draw(steps_over(now, f"new{number}"))
        sources = [now.pop(name) for name in step.sources]
        now.update(zip(step.targets, step.forward(sources), strict=True))
        steps.append(step)
    return Case(state, StateMap(tuple(steps), names=tuple(state)))


def steps_over(now: dict[str, Tensor], new: str) -> st.SearchStrategy[StateStep]:
    first = st.sampled_from(sorted(now))

    def alike(name: str) -> list[str]:
        return [n for n in sorted(now) if now[n].shape == now[name].shape and now[n].dtype == now[name].dtype]

    subsets = first.flatmap(lambda name: st.lists(st.sampled_from(alike(name)), min_size=1, unique=True).map(tuple))
    merges = [st.builds(Rename, first, st.just(new)), st.builds(Stack, subsets, st.just(new))]
    if any(tensor.ndim for tensor in now.values()):
        cattable = subsets.filter(lambda names: now[names[0]].ndim > 0)
        merges.append(cattable.flatmap(lambda names: concatenations(now, names, new)))
    return st.one_of(merges)


def concatenations(now: dict[str, Tensor], names: tuple[str, ...], new: str) -> st.SearchStrategy[StateStep]:
    rank = now[names[0]].ndim
    return st.integers(-rank, rank - 1).map(
        lambda dim: Concatenate(names, new, dim, tuple(now[name].shape[dim] for name in names))
    )


@given(cases())
def test_backward_undoes_forward_exactly_and_in_order(case: Case):
    new = case.map.forward(case.state)
    back = case.map.backward(new)
    assert list(back) == list(case.state)
    assert same(back, case.state)


@given(cases())
def test_forward_undoes_backward(case: Case):
    new = case.map.forward(case.state)
    assert same(case.map.forward(case.map.backward(new)), new)


@given(cases())
def test_json_and_pickle_round_trips(case: Case):
    assert StateMap.from_json(json.loads(json.dumps(case.map.to_json()))) == case.map
    assert pickle.loads(pickle.dumps(case.map)) == case.map
    assert hash(case.map) == hash(StateMap(case.map.steps, case.map.aliases, case.map.names))


@given(cases(), st.integers(0, 5))
def test_composition_is_one_after_the_other(case: Case, cut: int):
    first, then = StateMap(case.map.steps[:cut]), StateMap(case.map.steps[cut:])
    whole = first.compose(then)
    assert whole.steps == case.map.steps
    assert same(whole.forward(case.state), then.forward(first.forward(case.state)))


@given(cases())
def test_every_part_comes_from_its_origins(case: Case):
    for name, tensor in case.map.forward(case.state).items():
        assert tensor.numel() == sum(case.state[origin].numel() for origin in case.map.original_names(name))


@given(cases(), st.data())
def test_absent_members_keep_their_current_values(case: Case, data: st.DataObject):
    current = case.map.forward({name: tensor + 1 for name, tensor in case.state.items()})
    given_names = data.draw(st.sets(st.sampled_from(sorted(case.state))))
    partial = {name: tensor for name, tensor in case.state.items() if name in given_names}
    merged = {**current, **case.map.forward(partial, current, strict=False)}
    for name, tensor in case.map.backward(merged).items():
        assert torch.equal(tensor, case.state[name] + (name not in given_names))


@given(cases())
def test_a_map_below_a_module(case: Case):
    lower = {f"a.b.{name}": tensor for name, tensor in case.state.items()}
    found = case.map.below("a.b").forward({"other": torch.ones(1), **lower})
    expected = {f"a.b.{name}": tensor for name, tensor in case.map.forward(case.state).items()}
    assert same(found, {"other": torch.ones(1), **expected})
    assert case.map.below("") is case.map


# -- what it promises ----------------------------------------------------------------------------------------------


def test_unknown_names_pass_through_both_ways():
    other = torch.ones(1)
    assert STACKED.forward(heads(other=other))["other"] is other
    assert STACKED.backward({"fused.w": torch.zeros(3, 2, 3), "other": other})["other"] is other


def test_a_stack_needs_no_gradient_and_keeps_dtype():
    state = {name: tensor.to(torch.bfloat16).requires_grad_() for name, tensor in heads().items()}
    new = STACKED.forward(state)["fused.w"]
    assert not new.requires_grad
    assert new.dtype == torch.bfloat16
    assert not any(tensor.requires_grad for tensor in STACKED.backward({"fused.w": new.requires_grad_()}).values())


def test_backward_gives_views_of_the_live_tensor():
    fused = torch.zeros(3, 2, 3)
    STACKED.backward({"fused.w": fused})["heads.1.w"].fill_(7)
    assert fused[1].eq(7).all()
    assert fused[0].eq(0).all()


def test_the_text_names_every_step():
    tied = StateMap((*STACKED.steps, Rename("a", "b")), (("c", "a"),))
    assert str(tied) == "stack heads.0.w .. heads.2.w (3) -> fused.w\nrename a -> b\ntied c = a"
    assert str(StateMap()) == "unchanged"


def test_values_are_immutable():
    with pytest.raises(AttributeError):
        STACKED.steps = ()  # pyright: ignore[reportAttributeAccessIssue]
    assert copy.deepcopy(STACKED) == STACKED


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Rename("a", "b"), Rename("a", "c")), "'a' is gone"),
        ((Rename("a", "c"), Rename("b", "c")), "'c' exists"),
    ],
)
def test_steps_that_cannot_follow_each_other(steps: tuple[StateStep, ...], message: str):
    with pytest.raises(StateError, match=message):
        StateMap(steps)


def test_a_name_may_be_made_again_once_it_is_free():
    swap = StateMap((Rename("a", "t"), Rename("b", "a"), Rename("t", "b")))
    state = {"a": torch.zeros(1), "b": torch.ones(1)}
    assert same(swap.forward(state), {"a": torch.ones(1), "b": torch.zeros(1)})
    assert same(swap.backward(swap.forward(state)), state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stack(("a", "a"), "b"), "'a' goes into 'b' twice"),
        (lambda: Stack((), "b"), "'b' is made of no tensors"),
        (lambda: Concatenate(("a", "b"), "c", 0, (1,)), "2 tensors of 1 sizes"),
    ],
)
def test_impossible_steps(make: Any, message: str):
    with pytest.raises(StateError, match=message):
        make()


# -- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3, 3), r"'heads.0.w' has shape \[2, 3\] and 'heads.1.w' has shape \[3, 3\]"),
        (
            torch.zeros(2, 3, dtype=torch.double),
            "'heads.0.w' has dtype torch.float32 and 'heads.1.w' has dtype torch.float64",
        ),
        (torch.zeros(2, 3, device="meta"), "'heads.0.w' has device cpu and 'heads.1.w' has device meta"),
    ],
)
def test_unequal_members_are_named(other: Tensor, message: str):
    with pytest.raises(StateError, match=message):
        STACKED.forward(heads() | {"heads.1.w": other})


def test_missing_members_are_named_by_original_names():
    state = heads()
    del state["heads.1.w"]
    with pytest.raises(StateError, match=r"missing: 'heads.1.w'$"):
        STACKED.forward(state)
    with pytest.raises(StateError, match=r"'heads.1.w' missing: 'fused.w' cannot be computed"):
        STACKED.forward(state, strict=False)
    assert STACKED.forward({}, strict=False) == {}


def test_a_strict_state_dict_must_match_the_current_one():
    current = STACKED.forward(heads(z=torch.zeros(2)))
    state = heads(q=torch.zeros(1))
    del state["heads.2.w"]
    with pytest.raises(StateError, match=r"missing: 'z', 'heads.2.w'; unexpected: 'q'$"):
        STACKED.forward(state, current)
    assert set(STACKED.forward(state, current, strict=False)) == {"fused.w", "q"}


def test_wrong_shapes_are_told_with_both():
    current = STACKED.forward(heads())
    state = {f"heads.{i}.w": torch.zeros(4, 3) for i in range(3)}
    for strict in (True, False):
        with pytest.raises(StateError, match=r"'heads.0.w' has shape \[4, 3\], the model's has \[2, 3\]"):
            STACKED.forward(state, current, strict=strict)


def test_long_lists_are_cut():
    many = StateMap((Stack(tuple(f"h.{i}" for i in range(128)), "f"),))
    with pytest.raises(StateError, match=r"missing: 'h.0', 'h.1', 'h.2', 'h.3' and 124 more$"):
        many.forward({})


def test_a_new_tensor_of_another_shape_is_refused_on_the_way_back():
    with pytest.raises(StateError, match=r"'fused.w' has shape \[2, 2, 3\]; it stacks 3 tensors"):
        STACKED.backward({"fused.w": torch.zeros(2, 2, 3)})
    joined = StateMap((Concatenate(("a", "b"), "c", -1, (1, 2)),))
    with pytest.raises(StateError, match=r"'c' has shape \[2\]; dimension -1 must be 3 long"):
        joined.backward({"c": torch.zeros(2)})
    with pytest.raises(StateError, match=r"'b' has shape \[1\]; dimension -1 must be 2 long"):
        joined.forward({"a": torch.zeros(1), "b": torch.zeros(1)})


def test_both_forms_of_one_tensor_at_once():
    with pytest.raises(StateError, match=r"'fused.w' comes from the rewrite"):
        STACKED.forward(heads(**{"fused.w": torch.zeros(3, 2, 3)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "version 2; this fxopt reads version 1"),
        ({"steps": [{"kind": "melt"}]}, "unknown kind of step 'melt'; known are rename, stack, concatenate"),
        ({"steps": [{"kind": "rename", "old": "a"}]}, "a rename step has the fields new, old, not old"),
        ({"steps": [{"kind": "rename", "old": "a", "new": 3}]}, "field 'new' of a rename step cannot be 3"),
        ({"steps": [{"kind": "stack", "olds": "ab", "new": "c"}]}, "field 'olds' of a stack step cannot be 'ab'"),
        ({"steps": ["stack"]}, "a step is an object"),
        ({"steps": None}, "a list of steps"),
        ({"names": [1]}, "are strings"),
        ({"aliases": {"a": 1}}, "are strings"),
    ],
)
def test_malformed_descriptions(change: dict[str, Any], message: str):
    with pytest.raises(StateError, match=message):
        StateMap.from_json(StateMap().to_json() | change)
    with pytest.raises(StateError, match="version None"):
        StateMap.from_json([])


# -- tied tensors --------------------------------------------------------------------------------------------------

TIED = StateMap(STACKED.steps, (("tied.w", "heads.0.w"),), ("tied.w", "heads.0.w", "heads.1.w", "heads.2.w"))


def test_either_name_of_a_tied_tensor_is_read_and_both_are_written():
    state = heads()
    both = {"tied.w": state["heads.0.w"], **state}
    other = {"tied.w": both["tied.w"], **{name: state[name] for name in ("heads.1.w", "heads.2.w")}}
    for form in (both, other, state):
        new = TIED.forward(form)
        assert list(new) == ["fused.w"]
        assert same(TIED.backward(new), both)
        assert list(TIED.backward(new)) == list(TIED.names)
        assert same(TIED.forward(form, new), new)


def test_a_tied_tensor_cannot_have_two_values():
    with pytest.raises(StateError, match=r"'tied.w' and 'heads.0.w' are one tensor in the model, but differ"):
        TIED.forward(heads(**{"tied.w": torch.ones(2, 3)}))


def test_ties_that_no_step_touches_stay_as_they_are():
    plain = StateMap(STACKED.steps, (("b", "a"),))
    assert set(plain.forward(heads(a=torch.ones(1)))) == {"fused.w", "a"}
    assert set(plain.backward({"b": torch.ones(1)})) == {"b"}


def test_ties_compose_and_move_below_a_module():
    composed = TIED.compose(StateMap((Rename("fused.w", "f"),), (("y", "x"), ("q", "fused.w"))))
    assert composed.aliases == (*TIED.aliases, ("y", "x"))
    assert composed.names == TIED.names
    assert TIED.below("m").aliases == (("m.tied.w", "m.heads.0.w"),)
    assert STACKED.ordered(TIED.names, TIED.aliases) == TIED


# -- loading -------------------------------------------------------------------------------------------------------


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))


class After(KeepsOriginalNames):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Module() for _ in range(3))
        self.fused = nn.Module()
        self.fused.weight = nn.Parameter(torch.randn(3, 2, 3))
        self.fused.bias = nn.Parameter(torch.randn(3, 2))
        steps = [Stack(tuple(f"heads.{i}.{k}" for i in range(3)), f"fused.{k}") for k in ("weight", "bias")]
        self.__dict__[STATE_MAP] = StateMap(tuple(steps), names=tuple(Before().state_dict()))


def original_state(model: After) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_old_checkpoints_load(assign: bool, nested: bool):
    old, new = Before().state_dict(), After()
    whole: nn.Module = nn.Sequential(nn.Linear(1, 1), new) if nested else new
    rest = nn.Sequential(nn.Linear(1, 1)).state_dict() if nested else OrderedDict()
    prefix = "1." if nested else ""
    result = whole.load_state_dict(rest | {prefix + k: v for k, v in old.items()}, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert same(original_state(new), dict(old))
    assert isinstance(new.fused.weight, nn.Parameter)
    assert new.fused.weight.requires_grad


@pytest.mark.parametrize("assign", [False, True])
def test_new_checkpoints_load(assign: bool):
    source, target = After(), After()
    new = {name: parameter.detach().clone() for name, parameter in source.named_parameters()}
    assert list(new) == ["trunk.weight", "trunk.bias", "fused.weight", "fused.bias"]
    assert target.load_state_dict(new, assign=assign) == ([], [])
    assert same(dict(target.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_saved_names_are_the_original_ones_in_their_order(nested: bool, keep_vars: bool):
    model = After()
    whole: nn.Module = nn.Sequential(nn.Linear(1, 1), model, nn.Linear(1, 1)) if nested else model
    plain = nn.Sequential(nn.Linear(1, 1), Before(), nn.Linear(1, 1)) if nested else Before()
    state = whole.state_dict(keep_vars=keep_vars)
    assert list(state) == list(plain.state_dict())
    assert all(state[name].shape == tensor.shape for name, tensor in plain.state_dict().items())
    plain.load_state_dict(state)
    assert same(original_state(model), dict((plain[1] if nested else plain).state_dict()))


def test_maps_of_the_innermost_modules_around_what_moved():
    inner = Stack(("a.x.0", "a.x.1"), "a.y.fused")
    outer = Concatenate(("a.z", "b.z"), "c.z", 0, (1, 1))
    state_map = StateMap((inner, outer), (("a.s", "a.x.1"), ("d", "e")), ("a.x.0", "a.x.1", "a.z", "b.z", "d"))
    apart = state_map.apart()
    assert list(apart) == ["a", ""]
    assert apart["a"].steps == (Stack(("x.0", "x.1"), "y.fused"),)
    assert apart["a"].aliases == (("s", "x.1"),)
    assert apart["a"].names == ("x.0", "x.1", "z")
    assert apart[""] == StateMap((outer,), (), state_map.names)


def test_a_name_elsewhere_makes_the_module_around_it_the_innermost():
    step = Stack(("a.x.0", "a.x.1"), "a.y.fused")
    assert list(StateMap((step,), (("b.t", "a.x.0"),)).apart()) == [""]


def test_a_tensor_that_goes_on_is_of_the_outer_module():
    """The step inside is no business of the inner module: what it made is gone."""
    state_map = StateMap((Stack(("a.0", "a.1"), "a.f"), Concatenate(("a.f", "b"), "c", 0, (2, 2))))
    assert list(state_map.apart()) == [""]


def test_the_given_dict_is_left_alone():
    old = Before().state_dict()
    names = list(old)
    After().load_state_dict(old)
    assert list(old) == names


def test_strict_loading_reports_original_names():
    model, old = After(), Before().state_dict()
    before = original_state(model)
    del old["heads.1.weight"], old["trunk.bias"]
    old["heads.0.gamma"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(old)
    assert 'Missing key(s) in state_dict: "heads.1.weight", "trunk.bias"' in str(caught.value)
    assert 'Unexpected key(s) in state_dict: "heads.0.gamma"' in str(caught.value)
    result = model.load_state_dict(old, strict=False)
    assert result.missing_keys == ["heads.1.weight", "trunk.bias"]
    assert result.unexpected_keys == ["heads.0.gamma"]
    after = original_state(model)
    assert torch.equal(after["heads.1.weight"], before["heads.1.weight"])
    assert torch.equal(after["heads.0.weight"], old["heads.0.weight"])


@pytest.mark.parametrize("assign", [False, True])
def test_a_tensor_of_which_nothing_is_given_stays_the_same_object(assign: bool):
    model = After()
    old = {k: v for k, v in Before().state_dict().items() if not k.endswith("weight")}
    weight, values = model.fused.weight, model.fused.weight.detach().clone()
    result = model.load_state_dict(old, strict=False, assign=assign)
    assert result.missing_keys == ["heads.0.weight", "heads.1.weight", "heads.2.weight", "trunk.weight"]
    assert model.fused.weight is weight
    assert torch.equal(weight, values)


def test_wrong_shapes_are_told_as_torch_tells_them():
    old = Before().state_dict() | {"heads.2.bias": torch.zeros(5)}
    with pytest.raises(RuntimeError, match=r"size mismatch for heads.2.bias: copying a param with shape .*\[5\]"):
        After().load_state_dict(old)


def test_members_of_other_dtypes_are_cast_as_copying_would():
    model, old = After(), Before().state_dict()
    old["heads.1.weight"] = old["heads.1.weight"].to(torch.float16)
    model.load_state_dict(old)
    assert model.fused.weight.dtype == torch.float32
    assert torch.equal(model.fused.weight[1], old["heads.1.weight"].float())
    assert torch.equal(model.fused.weight[0], old["heads.0.weight"])


def test_loading_without_a_record_is_plain():
    model = After()
    del model.__dict__[STATE_MAP]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(Before().state_dict())
