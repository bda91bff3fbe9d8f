"""The structural hash: which modules count as alike, and what is worked out once for all of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable

import pytest
import torch
from support.small_models import Twins
from torch import Tensor, nn

import fxopt
from fxopt.operators import Cache
from fxopt.runtime.graphs import capture_of
from fxopt.runtime.values import Factors, ModelNames, meta_key, tensors_by_name
from fxopt.tracing.analyses import HashLevel, StructuralHash
from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import capture_program


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Sequential())


def hooked(module: nn.Sequential) -> None:
    module[0].register_forward_hook(lambda *_: None)


def in_other_mode(module: nn.Sequential) -> None:
    module[1].eval()


def with_another_setting(module: nn.Sequential) -> None:
    module[1].p = 0.25


def with_an_object(module: nn.Sequential) -> None:
    module.thing = object()  # pyright: ignore[reportAttributeAccessIssue]


def without_bias(module: nn.Sequential) -> None:
    module[0].bias = None


def with_another_child(module: nn.Sequential) -> None:
    module[2].append(nn.Identity())


def of_another_class(module: nn.Sequential) -> None:
    module[1] = nn.AlphaDropout(0.5)


def with_its_own_forward(module: nn.Sequential) -> None:
    module[0].forward = lambda x: x


def test_equal_modules_are_of_one_kind_whatever_their_tensors_hold():
    likeness = StructuralHash()
    assert likeness.of(block()) == likeness.of(block())


@pytest.mark.parametrize(
    "change",
    [hooked, in_other_mode, with_another_setting, with_an_object, without_bias, with_another_child, of_another_class,
     with_its_own_forward],
)  # fmt: skip
def test_other_modules_are_of_another_kind(change: Callable[[nn.Sequential], None]):
    likeness, other = StructuralHash(), block()
    change(other)
    assert likeness.of(other) != likeness.of(block())


def test_a_flag_is_not_the_number_that_it_equals():
    one, other = block(), block()
    one[1].p, other[1].p = 0, False
    likeness = StructuralHash()
    assert likeness.of(one) != likeness.of(other)


@dataclasses.dataclass
class Setting:
    size: int = 1


def with_settings(size: int = 1) -> nn.Sequential:
    made = block()
    made.setting = Setting(size)  # pyright: ignore[reportAttributeAccessIssue]
    return made


def keys(alike: HashLevel, *modules: nn.Module) -> int:
    """Return how many different descriptions modules have."""
    numbers: dict[Hashable, int] = {}
    return len({StructuralHash(alike, numbers).whole(module).key for module in modules})


def test_objects_of_equal_fields_will_do_for_a_rewrite_but_not_for_a_trace():
    same = with_settings()
    assert keys(HashLevel.TRACED, same, copy.copy(same)) == 1
    assert keys(HashLevel.TRACED, with_settings(), with_settings()) == 2
    assert keys(HashLevel.REWRITTEN, with_settings(), with_settings()) == 1
    assert keys(HashLevel.REWRITTEN, with_settings(), with_settings(2)) == 2


class Kept(Cache):
    def __init__(self, made: object) -> None:
        super().__init__()
        self.made = made


def with_a_cache(made: object) -> nn.Sequential:
    module = block()
    module.cache = Kept(made)  # pyright: ignore[reportAttributeAccessIssue]
    return module


def test_what_a_module_keeps_of_its_tensors_does_not_tell_it_apart():
    for alike in (HashLevel.REWRITTEN, HashLevel.TIMED):
        assert keys(alike, with_a_cache(None), with_a_cache(object())) == 1
    assert keys(HashLevel.REWRITTEN, with_a_cache(None), with_an_object_of_its_own()) == 2
    assert keys(HashLevel.TRACED, with_a_cache(None), with_a_cache(None)) == 2


@dataclasses.dataclass(frozen=True)
class Scale(Factors):
    value: float


def with_a_factor(value: float) -> nn.Sequential:
    module = block()
    module.scale = Scale(value)  # pyright: ignore[reportAttributeAccessIssue]
    return module


def test_numbers_to_compute_with_tell_functions_apart_and_not_how_long_they_take():
    assert keys(HashLevel.TIMED, with_a_factor(1.0), with_a_factor(2.0)) == 1
    assert keys(HashLevel.REWRITTEN, with_a_factor(1.0), with_a_factor(1.0)) == 1
    assert keys(HashLevel.REWRITTEN, with_a_factor(1.0), with_a_factor(2.0)) == 2


def with_an_object_of_its_own() -> nn.Sequential:
    module = block()
    with_an_object(module)
    return module


def test_graphs_of_equal_code_will_do_for_a_rewrite_but_not_for_an_analysis():
    captured = [capture_program(AsksFlag(), (torch.ones(1, 4),)).model for _ in range(2)]
    assert keys(HashLevel.TRACED, *captured) == 2
    assert keys(HashLevel.REWRITTEN, *captured) == 1


def tied() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made[1].weight = made[0].weight
    return made


@pytest.mark.parametrize("alike", HashLevel)
def test_modules_are_told_apart_by_which_tensors_and_children_are_one(alike: HashLevel):
    apart, layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    assert keys(alike, tied(), tied()) == keys(alike, apart, copy.deepcopy(apart)) == 1
    assert keys(alike, apart, tied(), nn.Sequential(layer, layer)) == 3


def test_calls_are_alike_by_the_form_of_their_tensors_and_by_which_of_these_are_one():
    module, numbers, x = tied(), dict[Hashable, int](), torch.ones(1, 2)
    calls = [Inputs(x, torch.zeros(1, 2)), Inputs(torch.zeros(1, 2), x), Inputs(x, x), Inputs(x, module[0].weight[:1]),
             Inputs(x, torch.ones(2, 2)), Inputs(x, module[1].weight)]  # fmt: skip
    found = [StructuralHash(HashLevel.REWRITTEN, numbers).whole(module, [call]).key for call in calls]
    assert found[0] == found[1]
    assert len(set(found)) == 5


def test_tensors_have_the_names_under_which_they_are_registered():
    module = tied()
    module.held = torch.zeros(3)  # pyright: ignore[reportAttributeAccessIssue]
    tensors = StructuralHash().whole(module).tensors
    assert tensors[id(module[1].weight)] == "0.weight"
    assert tensors[id(module[1].bias)] == "1.bias"
    assert tensors[id(module.held)] is None


def test_an_object_of_which_only_the_type_is_known_is_like_no_other():
    assert (
        meta_key((1, [2.0], {"a": None})) == meta_key((1, [2.0], {"a": None})) != meta_key((True, [2.0], {"a": None}))
    )
    assert meta_key((object,)) != meta_key((object,))


def test_names_are_those_that_torch_gives():
    model = Twins()
    model.tied = model.members[0][0].weight  # pyright: ignore[reportAttributeAccessIssue]
    model.register_buffer("count", torch.zeros(()))
    every = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    assert {name: id(tensor) for name, tensor in tensors_by_name(model).items()} == {n: id(t) for n, t in every.items()}
    once = dict(model.named_parameters())
    assert {name: id(p) for name, p in ModelNames(model).parameters().items()} == {n: id(p) for n, p in once.items()}


# -- what graphs ask of the tensors of a module --------------------------------------------------------------------


class AsksFlag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.weight.requires_grad else 2 * (x @ self.weight)


class AsksStrides(AsksFlag):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.weight.is_contiguous() else 2 * (x @ self.weight)


class AsksChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = AsksFlag()

    @property
    def weight(self) -> nn.Parameter:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class Stacked(nn.Module):
    """Six members, of which the fourth is frozen, and its weight lies in memory the other way."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(kind() for _ in range(6))
        odd = self.members[3].weight
        assert isinstance(odd, nn.Parameter)
        odd.data = odd.data.t()
        odd.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members])


@pytest.mark.parametrize("kind", [AsksFlag, AsksStrides, AsksChild])
@pytest.mark.parametrize("inputs", [None, (torch.ones(3, 4),)])
def test_members_whose_tensors_differ_in_what_a_graph_asks(kind: type[nn.Module], inputs: tuple[Tensor, ...] | None):
    model, x = Stacked(kind).eval(), torch.randn(3, 4)
    likeness = StructuralHash.compute(capture_program(copy.deepcopy(model), inputs))
    program = capture_program(copy.deepcopy(model), inputs)
    members = [program.module(f"members.{number}") for number in range(6)]
    assert likeness.of(members[0]) == likeness.of(members[1]) != likeness.of(members[3])
    fast = fxopt.optimize(model, "fuse_ensembles", example_inputs=inputs, verify=False, measure=False)
    torch.testing.assert_close(fast(x), model(x))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.requires_grad:
            return x * self.weight
        self.count.add_(1)
        return x


class CallsInVain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counts()

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return x + 1


def test_dead_calls_are_erased_only_where_they_do_nothing():
    model, x = nn.Sequential(*(CallsInVain() for _ in range(3))), torch.ones(2, 4)
    frozen = model[1].inner
    assert isinstance(frozen, Counts)
    frozen.weight.requires_grad_(False)
    fast = fxopt.optimize(model.eval(), "eliminate_dead_code", example_inputs=(x,), verify=False)
    fast(x)
    fast(x)
    assert fast[1].inner.count == 2
    applied = [d.label for d in fxopt.plan(fast).decisions if d.status == "applied"]
    assert applied == ["0", "2"]


class Numbered(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class ReadsInside(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = Numbered(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.inner.number if self.inner.number != 1 else self.inner(x)


def test_captures_are_shared_unless_a_number_that_differs_is_read():
    model = nn.Sequential(*(ReadsInside(number) for number in (1, 2, 3, 3)))
    x = torch.randn(2, 4)
    expected = model(x)
    captured = fxopt.capture(model, x).model
    torch.testing.assert_close(captured(x), expected)
    outer = [id(capture_of(each)) for each in captured]
    assert len(set(outer)) == 3 and outer[2] == outer[3]
    assert len({id(capture_of(each.get_submodule("inner"))) for each in captured}) == 1
