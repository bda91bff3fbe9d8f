"""Steps of other packages: written, read again, run both ways; and the lossy step that keeps slices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fxopt
from fxopt import Select, StateStep, StateWarning
from fxopt.errors import StateError
from fxopt.runtime.state import Deal, Piece, Rename, StateMap


@dataclasses.dataclass(frozen=True)
class Transpose(StateStep):
    """The matrix `new` is `old` transposed."""

    old: str
    new: str
    scale: float = 1.0
    notes: tuple[str, ...] = ()

    kind: ClassVar[str] = "acme_transpose"

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.old,)

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.new,)

    def forward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.t() for tensor in tensors]

    def backward(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.t() for tensor in tensors]


W = torch.arange(12.0).reshape(4, 3)
MAP = StateMap((Transpose("w", "t", 0.5, ("a", "b")), Rename("t", "u")))


def written(state_map: StateMap) -> Any:
    return json.loads(json.dumps(state_map.to_json()))


def test_a_step_of_another_package_is_read_where_it_is_trusted() -> None:
    package = Transpose.__module__.partition(".")[0]
    for trust in (True, [package]):
        assert StateMap.from_json(written(MAP), trust) == MAP
    assert torch.equal(MAP.backward(MAP.forward({"w": W}))["w"], W)
    with pytest.raises(StateError, match=r"would import .*register it in the entry-point group 'fxopt.state_steps'"):
        StateMap.from_json(written(MAP))


def test_a_registered_step_is_read_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "acme_transpose", "acme:Transpose"

        def load(self) -> Any:
            return Transpose

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [Entry()])
    assert StateMap.from_json(written(MAP)) == MAP


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": "no.such:Step"}, "cannot be imported"),
        ({"class": "torch:Tensor"}, "is not a dataclass derived from fxopt.StateStep"),
        ({"scale": 1}, "field 'scale' of a acme_transpose step cannot be 1"),
        ({"notes": [1]}, "field 'notes'"),
        ({"more": 1}, "has the fields"),
        ({"kind": "other"}, "is a step of kind 'acme_transpose', not 'other'"),
    ],
)
def test_malformed_steps_are_refused(change: dict[str, Any], message: str) -> None:
    data = written(MAP)
    data["steps"][0] |= change
    with pytest.raises(StateError, match=message):
        StateMap.from_json(data, trust=True)


CUT = StateMap((Select("w", "w", 0, (1, 3), 4),))


def test_slices_are_kept_and_come_back_among_zeros() -> None:
    cut = CUT.forward({"w": W})
    assert torch.equal(cut["w"], W[[1, 3]])
    with pytest.warns(StateWarning, match="zeros in the places of what a lossy pass cut away"):
        back = CUT.backward(cut)["w"]
    assert torch.equal(back, W * torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None])
    assert StateMap.from_json(written(CUT)) == CUT
    assert CUT.is_lossy
    assert not MAP.is_lossy


def test_what_has_been_through_a_step_passes_told_by_its_shape() -> None:
    cut = CUT.forward({"w": W})
    assert torch.equal(CUT.forward(cut)["w"], cut["w"])
    assert torch.equal(CUT.backward({"w": W})["w"], W)
    assert torch.equal(CUT.forward(cut, cut)["w"], cut["w"])
    with pytest.raises(StateError, match=r"'w' has shape \[3, 3\], the model's has \[4, 3\]"):
        CUT.forward({"w": torch.zeros(3, 3)}, cut)


def test_cuts_compose() -> None:
    twice = CUT.compose(StateMap((Select("w", "w", 0, (1,), 2),))).compose(StateMap((Select("w", "w", 1, (0, 2), 3),)))
    cut = twice.forward({"w": W})["w"]
    assert torch.equal(cut, W[3:4, [0, 2]])
    assert torch.equal(twice.forward({"w": cut})["w"], cut)
    back = twice.backward({"w": cut}, warn=False)["w"]
    assert back.shape == W.shape
    assert torch.equal(twice.forward({"w": back})["w"], cut)
    assert torch.equal(twice.backward({"w": back})["w"], back)


def test_a_tensor_may_be_gone_as_a_whole() -> None:
    step, whole = Select("w", "w", 0, (), 4), torch.ones(4, 2)
    (none,) = step.forward([whole])
    assert none.shape == (0, 2) and step.is_new([none]) and step.is_old([whole]) and not step.is_new([whole])
    assert torch.equal(step.backward([none])[0], torch.zeros(4, 2))


@pytest.mark.parametrize("kept", [(3, 1), (1, 1), (4,), (-1,)])
def test_slices_are_named_in_order_and_once(kept: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match="keeps slices"):
        Select("w", "w", 0, kept, 4)


def test_the_names_are_public() -> None:
    assert {"StateStep", "Select", "Rename", "Stack", "Concatenate", "StateWarning", "Context"} <= set(fxopt.__all__)


def test_shares_of_parts_lie_together_and_come_back() -> None:
    step = Deal("w", "share.w", 0, (4, 2, 2), 2)
    state_map, whole = StateMap((step,)), torch.arange(16.0).view(8, 2)
    assert StateMap.from_json(written(state_map)) == state_map
    (dealt,) = state_map.forward({"w": whole}).values()
    assert dealt[:, 0].div(2).tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert torch.equal(state_map.backward({"share.w": dealt})["w"], whole)
    memory = torch.zeros(4, 2)
    for piece in step.parts(Piece("share.w", (4, 0), memory)) or ():
        piece.memory.copy_(whole[piece.index])
    assert torch.equal(memory, dealt[4:])


def test_parts_without_whole_shares_are_refused() -> None:
    with pytest.raises(StateError, match=r"'w' has parts of \(3, 3\); they do not divide by 2"):
        Deal("w", "share.w", 0, (3, 3), 2)
    with pytest.raises(StateError, match=r"'w' has shape \[5\]; dimension 0 must be 8 long"):
        Deal("w", "share.w", 0, (4, 4), 2).forward([torch.ones(5)])
