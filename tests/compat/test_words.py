"""Words of memory: each change of a tensor, a dictionary or a module is seen, and what only reads is none."""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.compat.words import Layout, Words, found_layout, identities


@pytest.fixture
def places() -> Layout:
    found = found_layout()
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


def _words(places: Layout, x: Tensor) -> Words:
    found = places.words_of(x, x.detach())
    assert found is not None
    return Words({places.identity_of(x): found.tensor}).then(Words(found.inside))


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_tensor(places: Layout, change: str) -> None:
    x = nn.Parameter(torch.randn(4, 5), requires_grad=False)
    words = _words(places, x)
    assert words.same()
    CHANGES[change](x)
    assert not words.same()


def test_what_only_reads_changes_nothing(places: Layout) -> None:
    x = nn.Parameter(torch.randn(4, 5))
    words = _words(places, x)
    (x.sum() * x.detach().t().sum()).backward()
    x.requires_grad_(False)
    x.tag = 1  # type: ignore[attr-defined]
    assert x.grad is not None and words.same()


def test_tensors_of_many_dimensions_are_left_out(places: Layout) -> None:
    x = torch.randn([1] * 6)
    assert places.words_of(x, x.detach()) is None


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


def test_what_comes_behind_a_change_is_not_read() -> None:
    x = torch.arange(4)
    words = Words([x.data_ptr()]).then(Words({1 << 13: 0}))  # where no process has memory
    x[0] = 9
    assert not words.same()


def test_words_are_equal_where_they_hold_the_same_at_the_same_addresses() -> None:
    x = torch.arange(1000)
    addresses = range(x.data_ptr(), x.data_ptr() + 8000, 8)
    words = Words(addresses)
    assert words.equal(Words(addresses)) and not words.equal(Words(addresses[1:]))
    assert not Words(addresses[:1]).equal(Words({addresses[1]: 0}))
    x[999] = 0
    assert not words.equal(Words(addresses)) and not words.same()


def test_no_other_thread_comes_in_while_words_are_compared() -> None:
    x, rounds, is_over, before = torch.arange(3000), [0], [False], sys.getswitchinterval()
    words = Words(range(x.data_ptr(), x.data_ptr() + 24000, 8))

    def run() -> None:
        while not is_over[0]:
            rounds[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        sys.setswitchinterval(1000)  # now a thread runs only where another one lets it
        start = rounds[0]
        for _ in range(2000):
            words.same()
        assert rounds[0] <= start + 1
    finally:
        sys.setswitchinterval(before)
        is_over[0] = True
        thread.join()


def test_places_do_not_hang_on_what_lies_beside(places: Layout) -> None:
    made: list[Any] = []
    for number in range(300):  # memory is used again, with what it held before
        made.append([torch.randn(number % 40 + 1), torch.randn(2, 3).detach(), _module(), [object()] * (number % 30)])
        del made[: number % 3]
        found_layout.cache_clear()
        assert found_layout() == places


def test_identities_are_in_their_order() -> None:
    one, other = object(), object()
    assert identities((one, other)) == identities((one, other)) != identities((other, one))
    assert identities(()) == b""
