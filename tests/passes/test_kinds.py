"""Which modules count as alike, and what is worked out once for all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt.passes.expand import expand
from fxopt.passes.kinds import Kinds
from fxopt.tracing.names import parameters_by_name, tensors_by_name
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
    kinds = Kinds()
    assert kinds.of(block()) == kinds.of(block())


@pytest.mark.parametrize(
    "change",
    [hooked, in_other_mode, with_another_setting, with_an_object, without_bias, with_another_child, of_another_class,
     with_its_own_forward],
)  # fmt: skip
def test_other_modules_are_of_another_kind(change: Callable[[nn.Sequential], None]):
    kinds, other = Kinds(), block()
    change(other)
    assert kinds.of(other) != kinds.of(block())


def test_a_flag_is_not_the_number_that_it_equals():
    one, other = block(), block()
    one[1].p, other[1].p = 0, False
    kinds = Kinds()
    assert kinds.of(one) != kinds.of(other)


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU()) for _ in range(3))
        self.members[2][1] = nn.LeakyReLU(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members])


def test_members_of_one_kind_are_opened_alike_each_with_its_own_tensors():
    program = capture_program(Twins(), (torch.ones(1, 2),))
    expansion = expand(program, "")
    linears = [operation for operation in expansion.operations if operation.operator == "linear"]
    slopes = [operation for operation in expansion.operations if operation.operator == "leaky_relu"]
    assert len({linear.pattern for linear in linears}) == 1
    assert [str(linear.inputs[1].target) for linear in linears] == [f"members.{i}.0.weight" for i in range(3)]
    assert slopes[0].pattern is slopes[1].pattern is not slopes[2].pattern
    assert [slope.inputs[0] for slope in slopes] == linears
    assert [path for paths in expansion.opened.values() for path in paths if path.count(".") == 1] == [
        f"members.{i}" for i in range(3)
    ]


def test_names_are_those_that_torch_gives():
    model = Twins()
    model.tied = model.members[0][0].weight  # pyright: ignore[reportAttributeAccessIssue]
    model.register_buffer("count", torch.zeros(()))
    every = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    assert {name: id(tensor) for name, tensor in tensors_by_name(model).items()} == {n: id(t) for n, t in every.items()}
    once = dict(model.named_parameters())
    assert {name: id(p) for name, p in parameters_by_name(model).items()} == {n: id(p) for n, p in once.items()}
