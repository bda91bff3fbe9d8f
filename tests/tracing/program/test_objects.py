"""Objects as arguments: read, changed, made and handed on, by graphs as by the forwards themselves."""

from __future__ import annotations

import collections
import copy
import enum
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fxopt.errors import GuardError
from fxopt.runtime.graphs import capture_of, uninstall
from fxopt.runtime.guards import GuardMiss, require
from fxopt.runtime.values import (
    announce_changes,
    changed_paths,
    contents,
    copied_object,
    graft,
    is_object,
    keep,
    objects_in,
    state_of,
    tensors_within,
)
from fxopt.tracing.examples import Inputs
from fxopt.tracing.program import capture_program
from fxopt.tracing.recording import record


class Memory:
    """Keep what it is given, layer by layer."""

    def __init__(self, layers: int = 2) -> None:
        self.layers: list[dict[str, Any]] = [{} for _ in range(layers)]
        self.seen = 0

    def update(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        held = self.layers[layer]
        held["x"] = x if "x" not in held else torch.cat([held["x"], x])
        self.seen += 1
        return held["x"]

    def length(self) -> int:
        return len(self.layers[0].get("x", ()))


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        everything = memory.update(self.linear(x), self.number)
        if everything.shape[0] > x.shape[0]:  # known only after the change
            return everything[-x.shape[0] :] * 2
        return everything


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(2))

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        x = x + memory.length()
        for layer in self.layers:
            x = layer(x, memory)
        return x


def test_objects_are_read_and_changed_by_graphs():
    model = Model()
    program = capture_program(Model(), (torch.randn(3, 4), Memory()))
    program.model.load_state_dict(model.state_dict())
    assert program.opaque == {}
    mine, theirs, x = Memory(), Memory(), torch.randn(3, 4)
    torch.testing.assert_close(program.model(x, mine), model(x, theirs))
    assert mine.seen == theirs.seen == 2
    torch.testing.assert_close(mine.layers, theirs.layers)
    assert not any(capture.misses for capture in program.captures.values())


def test_what_was_changed_is_put_back_before_the_own_forward_runs():
    model = Model()
    program = capture_program(Model(), (torch.randn(3, 4), Memory()))
    program.model.load_state_dict(model.state_dict())
    mine, theirs = Memory(), Memory()
    for _ in range(3):
        x = torch.randn(2, 4)
        torch.testing.assert_close(program.model(x, mine), model(x, theirs))
    assert mine.seen == theirs.seen == 6
    torch.testing.assert_close(mine.layers, theirs.layers)
    assert sum(sum(capture.misses.values()) for capture in program.captures.values()) > 0


class Described(Layer):
    def forward(self, x: torch.Tensor, memory: Memory) -> Any:
        return super().forward(x, memory), None


class Above(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Described(0)

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        y, more = self.layer(x, memory)
        return y if more is None else y + more


@pytest.mark.parametrize("more", [(torch.ones(4),), (None, None)], ids=["another", "too many"])
def test_a_hook_that_comes_later_gives_what_is_found_out_after_a_change(more: tuple[Any, ...]):
    model, x = Above(), torch.randn(3, 4)
    fast = capture_program(model, (x, Memory())).model
    mine, theirs, outcomes = Memory(), Memory(), []
    for each, memory in ((fast, mine), (model, theirs)):
        each.layer.register_forward_hook(lambda module, args, output: (output[0], *more))
        try:
            outcomes.append(each(x, memory))
        except ValueError as error:
            outcomes.append(str(error))
    if len(more) == 1:
        torch.testing.assert_close(*outcomes)
    else:
        assert outcomes[0] == outcomes[1]
        assert "too many values" in outcomes[0]
    assert mine.seen == theirs.seen == 1
    torch.testing.assert_close(mine.layers, theirs.layers)


class Writes(Layer):
    """Changes the memory, and decides nothing by it."""

    def forward(self, x: torch.Tensor, memory: Memory) -> Any:
        return memory.update(self.linear(x), self.number), None


class Sets(Layer):
    """Changes the memory by itself, not by a method of it."""

    def forward(self, x: torch.Tensor, memory: Memory) -> Any:
        memory.layers[self.number]["x"] = self.linear(x)
        memory.seen += 1
        return x * 2, None


class WritesLate(Layer):
    """Changes the memory once more after its last decision."""

    def forward(self, x: torch.Tensor, memory: Memory) -> Any:
        y = super().forward(x, memory)
        memory.update(y, self.number)
        return y, None


class WritesOpaquely(Layer):
    def forward(self, x: torch.Tensor, memory: Memory) -> Any:
        y = memory.update(self.linear(x), self.number)
        return y * sum(range(int(y.shape[0] * y.detach().abs().max().clamp(1, 1)))), None


class WritesAtOnce(Layer):
    """Has no graph for more than three rows."""

    def forward(self, x: torch.Tensor, memory: Memory) -> Any:
        return memory.update(self.linear(x) * (2 if x.shape[0] > 3 else 1), self.number), None


class Hands(nn.Module):
    """Calls what changes the memory."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, memory: Memory) -> Any:
        return self.inner(x, memory)


class Pairs(nn.Module):
    """Decides by what the second of two calls gives, both of which change the memory."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(number) for number in range(2))

    def forward(self, x: torch.Tensor, memory: Memory) -> Any:
        for layer in self.layers:
            x, more = layer(x, memory)
            x = x if more is None else x + more
        return x, None


WRITERS: dict[str, Any] = {
    "notes": Described,
    "decides nothing": Writes,
    "sets": Sets,
    "writes late": WritesLate,
    "has no graph": WritesOpaquely,
    "misses": WritesAtOnce,
    "further in": lambda number: Hands(Hands(Described(number))),
    "opaque further in": lambda number: Hands(WritesOpaquely(number)),
    "decides too": lambda number: Pairs(lambda _: Described(number)),
    "opaque under one that decides": lambda number: Pairs(lambda _: WritesOpaquely(number)),
}


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("lost", [False, True], ids=["with its graph", "without"])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_called_modules_change_is_put_back(writer: str, lost: bool, rows: int):
    model = Pairs(WRITERS[writer])
    fast: Any = capture_program(copy.deepcopy(model), (torch.randn(3, 4), Memory())).model
    mine, theirs, outcomes = Memory(), Memory(), []
    x = torch.randn(rows, 4)
    for each, memory in ((fast, mine), (model, theirs)):
        if lost:
            uninstall(each.layers[0])
        each.layers[1].register_forward_hook(lambda module, args, output: (output[0], torch.ones(4)))
        outcomes += [each(x, memory)[0], each(x, memory)[0]]
    torch.testing.assert_close(outcomes[:2], outcomes[2:])
    torch.testing.assert_close(mine.layers, theirs.layers)
    assert mine.seen == theirs.seen
    assert capture_of(fast).misses.total() == 2


def test_subscribers_are_notified_of_what_others_note():
    memory = Memory()
    before = state_of(memory)
    subscriber = keep(memory, ((),), subscribes=True)
    assert not subscriber.containers
    keep(memory, (("layers", 0), ("seen",)))
    memory.update(torch.ones(2), 0)
    between = state_of(memory)
    announce_changes()
    memory.layers.clear()
    announce_changes()
    keep(memory, ((),))
    assert len(subscriber.notes) == 2
    subscriber.notes[-1].restore()
    assert state_of(memory) == between
    subscriber.restore()
    assert state_of(memory) == before


def test_nothing_is_held_once_a_forward_has_ended():
    model = capture_program(Pairs(Described), (torch.randn(3, 4), Memory())).model
    memory = Memory()
    model(torch.randn(3, 4), memory)
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None


def test_example_objects_are_not_changed():
    memory = Memory()
    memory.update(torch.ones(1, 4), 0)
    before = state_of(memory)
    capture_program(Model(), (torch.randn(3, 4), memory))
    assert state_of(memory) == before


def test_recordings_hold_objects_as_they_were():
    model = Model()
    calls = record(model, (Inputs(torch.randn(3, 4), Memory()),)).calls
    for number, layer in enumerate(model.layers):
        (call,) = calls[layer]
        assert call.args[1].seen == number
        assert call.after[0].seen == number + 1


def test_another_class_of_object_misses_the_guard():
    class Shorter(Memory):
        def length(self) -> int:
            return 0

    model = Model()
    program = capture_program(Model(), (torch.randn(3, 4), Memory()))
    program.model.load_state_dict(model.state_dict())
    x = torch.randn(3, 4)
    torch.testing.assert_close(program.model(x, Shorter()), model(x, Shorter()))
    assert program.captures[""].misses


class Kind(enum.Enum):
    PLAIN = 1
    NEGATED = 2


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor, kind: Kind) -> torch.Tensor:
        return -x if kind is Kind.NEGATED else x


def test_enumeration_members_are_bound_and_guarded():
    x = torch.randn(3)
    program = capture_program(Chooses(), (x, Kind.NEGATED))
    assert program.opaque == {}
    assert torch.equal(program.model(x, Kind.NEGATED), -x)
    assert not program.captures[""].misses
    assert torch.equal(program.model(x, Kind.PLAIN), x)
    assert program.captures[""].misses


def test_attributes_are_set_on_objects():
    class Notes(nn.Module):
        def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
            memory.latest = x * 2
            return memory.latest + 1

    program = capture_program(Notes(), (torch.randn(3), Memory()))
    assert program.opaque == {}
    memory, x = Memory(), torch.randn(3)
    torch.testing.assert_close(program.model(x, memory), x * 2 + 1)
    torch.testing.assert_close(memory.latest, x * 2)


def test_data_in_objects_decides_nothing():
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
            return x * int(memory.layers[0]["x"].sum())

    memory = Memory()
    memory.update(torch.ones(3), 0)
    program = capture_program(Decides(), (torch.randn(3), memory))
    assert "data in a tensor" in program.opaque[""].reason


def test_objects_and_what_is_in_them():
    memory = Memory()
    x = memory.update(torch.ones(2), 1)
    assert is_object(memory)
    assert not any(map(is_object, (1, "a", x, nn.Linear(1, 1), Kind.PLAIN, Memory, len, {}, torch.float32)))
    assert list(objects_in(({"m": memory}, [1, memory]))) == [memory, memory]
    assert [id(t) for t in tensors_within({"a": memory})] == [id(x)]
    twin = copied_object(memory, lambda tensor: tensor * 3)
    assert twin.layers[1]["x"].tolist() == [3, 3]
    assert memory.layers[1]["x"] is x


def test_objects_that_hold_each_other_are_described_once():
    memories = [Memory() for _ in range(40)]
    for memory in memories:
        memory.others = memories
    before = state_of(memories)
    assert state_of(memories) == before
    memories[-1].seen = 5
    assert state_of(memories) != before


def test_what_is_kept_comes_back():
    memory = Memory()
    memory.update(torch.ones(2), 1)
    before, found = state_of(memory), contents(memory)
    kept = keep(memory, (("layers", 1),))
    memory.update(torch.ones(1), 1)
    assert changed_paths(memory, found) == [()]
    kept.restore()
    assert state_of(memory) == before
    with pytest.raises(GuardMiss):
        require(1, 2, "it was 2", keep(memory, ((),)))
    with pytest.raises(GuardError):
        require(1, 2, "it was 2", restart=False)


def test_whatever_lies_on_a_path_comes_back():
    class Listed(list):
        pass

    memory = Memory()
    inner = Memory(1)
    memory.layers = Listed([{"a": inner, "b": [[1, 2], {"c": 3}], 7: collections.OrderedDict(d=[4])}, {}])
    before, found = state_of(memory), contents(memory)
    kept = keep(memory, (("layers", 0), ("layers", 5), ("nowhere", "at", 3)))
    inner.update(torch.ones(1), 0)
    inner.more = 1
    memory.layers[0]["b"][0].append(3)
    memory.layers[0]["b"][1].clear()
    memory.layers[0][7]["d"][0] = 5
    memory.layers[0]["e"] = 6
    memory.layers.append({})
    memory.layers = []
    assert changed_paths(memory, found) == [()]
    kept.restore()
    assert state_of(memory) == before


def test_copies_of_one_object_differ_in_nothing():
    memory = Memory()
    memory.device, memory.dtype = torch.device("cpu"), torch.float64
    memory.layers[0]["x"] = torch.ones(2)
    twin = copied_object(memory)
    assert contents(memory) == contents(twin)
    twin.device = torch.device("meta")
    assert contents(memory) != contents(twin)


def test_only_what_a_call_changed_is_noted_before_it():
    class Placed(Memory):
        def update(self, x: torch.Tensor, layer: int) -> torch.Tensor:
            self.layers[layer].update(x=x, device=x.device)
            return x

    class Above(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Pair(number) for number in range(2))

        def forward(self, x: torch.Tensor, memory: Placed) -> torch.Tensor:
            for pair in self.inner:
                x = pair(x, memory)
            return x

    class Pair(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer = Layer(number)

        def forward(self, x: torch.Tensor, memory: Placed) -> torch.Tensor:
            y = self.layer(x, memory)
            return y if y.shape[0] == 3 else -y

    program = capture_program(Above(), (torch.randn(3, 4), Placed()))
    paths = {name: [n.args[1] for n in g.nodes if n.target is keep] for name, g in program.graphs.items()}
    assert paths["inner.1"] == paths["inner.1.layer"] == [(("layers", 1),)]


def test_grafting_changes_only_what_changed():
    mine, before = Memory(), Memory()
    x = mine.update(torch.ones(2), 0)
    before.layers[0]["x"] = x
    before.seen = 1
    after = copied_object(before, lambda tensor: tensor)
    after.update(torch.zeros(1), 1)
    graft(mine, before, after)
    assert mine.seen == 2
    assert mine.layers[0]["x"] is x
    assert mine.layers[1]["x"].tolist() == [0]
