"""Words of memory: each change of a tensor, a dictionary or a module is seen, and what only reads is none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.compat.words import Layout, Words, identities, layout


@pytest.fixture
def places() -> Layout:
    found = layout()
    if found is None:
        pytest.skip("this version of torch or Python keeps words elsewhere")
    return found


def _swap(x: Tensor) -> None:
    torch.utils.swap_tensors(x, torch.randn(4, 5))


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "written": lambda x: x.add_(1),
    "zeroed": lambda x: x.zero_(),
    "element": lambda x: x[2, 3].fill_(7),
    "view": lambda x: x.view(-1)[3:5].mul_(2),
    "moved": lambda x: setattr(x, "data", x.data.clone()),
    "turned": lambda x: setattr(x, "data", x.data.t()),
    "cut": lambda x: setattr(x, "data", x.data[:2]),
    "shifted": lambda x: setattr(x, "data", x.data[1:]),
    "flat": lambda x: setattr(x, "data", x.data.view(-1)),
    "deeper": lambda x: setattr(x, "data", x.data.unsqueeze(-1)),
    "freed": lambda x: x.untyped_storage().resize_(0),
    "shared": lambda x: x.share_memory_(),
    "resized": lambda x: x.resize_(2, 3),
    "set": lambda x: x.set_(torch.randn(4, 5)),
    "swapped": _swap,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_tensor(places: Layout, change: str) -> None:
    x = nn.Parameter(torch.randn(4, 5), requires_grad=False)
    inside = places.words_of(x)
    assert inside is not None
    words = Words([places.identity_of(x), *inside])
    assert words.same()
    CHANGES[change](x)
    assert not words.same()


def test_what_only_reads_changes_nothing(places: Layout) -> None:
    x = nn.Parameter(torch.randn(4, 5))
    inside = places.words_of(x)
    assert inside is not None
    words = Words([places.identity_of(x), *inside])
    (x.sum() * x.detach().t().sum()).backward()
    x.requires_grad_(False)
    x.tag = 1  # type: ignore[attr-defined]
    assert x.grad is not None and words.same()


def test_tensors_of_many_dimensions_are_left_out(places: Layout) -> None:
    assert places.words_of(torch.randn([1] * 6)) is None


def _module() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


DICTIONARIES: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[Any], object]]] = {
    "attribute": (vars, lambda module: setattr(module, "training", False)),
    "new attribute": (vars, lambda module: setattr(module, "tag", 1)),
    "deleted": (vars, lambda module: vars(module).pop("training")),
    "parameter": (lambda module: module[0]._parameters, lambda module: setattr(module[0], "weight", None)),
    "child": (lambda module: module._modules, lambda module: module.__setitem__(0, nn.ReLU())),
    "cleared": (lambda module: module._modules, lambda module: module._modules.clear()),
}


@pytest.mark.parametrize("change", DICTIONARIES)
def test_changes_of_dictionaries(places: Layout, change: str) -> None:
    if places.changes is None:
        pytest.skip("dictionaries of this version of Python count no changes")
    module, (of, make) = _module(), DICTIONARIES[change]
    words = Words([places.change_of(of(module))])
    assert len(of(module)) and words.same()
    make(module)
    assert not words.same()


def test_classes_attributes_and_lengths(places: Layout) -> None:
    module = _module()
    where = places.attributes_of(module)
    assert where is not None
    kind, attributes = Words([places.type_of(module)]), Words([where])
    length = Words([places.length_of(module._forward_hooks)])
    assert isinstance(module._forward_hooks, OrderedDict) and kind.same() and attributes.same() and length.same()
    module.register_forward_hook(lambda *_: None)
    assert not length.same()
    module.__class__ = nn.ModuleList
    assert not kind.same()
    module.__dict__ = dict(vars(module))
    assert not attributes.same()


def test_numbers_of_each_width() -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        x = torch.arange(7, dtype=dtype)
        width = dtype.itemsize
        words = Words([x.data_ptr() + width * place for place in (5, 1, 1)], width)
        x[2] = 9
        assert words.same()
        x[5] = 9
        assert not words.same()


def test_identities_are_in_their_order() -> None:
    one, other = object(), object()
    assert identities((one, other)) == identities((one, other)) != identities((other, one))
    assert identities(()) == b""
