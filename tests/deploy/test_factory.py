from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from fxopt.deploy.factory import build_model, find_factory, is_trusted, name_class, owner_of
from fxopt.errors import InputError, UsageError

SOURCE = """
import functools
import os

from torch import nn

LIMIT = 3

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)

    @classmethod
    def make(cls):
        return cls()

def build():
    return Net()

MODEL = build()

def build_sized(size, *, depth, width=3, **more):
    return Net()

made = functools.partial(build_sized, 3, depth=2)
stopped = functools.partial(os.abort)

def build_number():
    return 3

def build_badly():
    raise RuntimeError("no disk")
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the tests a package `zoo` with good and bad factories."""
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text(SOURCE)
    (package / "broken.py").write_text("1 / 0")
    (package / "script.py").write_text("raise SystemExit(2)")
    (package / "needy.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "zoo"]:
        del sys.modules[name]


@pytest.mark.parametrize("spec", ["zoo.models:build", "zoo.models:Net", "zoo.models:Net.make"])
def test_builds_a_model(spec: str):
    assert isinstance(build_model(spec), nn.Linear)


@pytest.mark.parametrize(
    ("spec", "kind", "message"),
    [
        ("zoo.models", UsageError, "'zoo.models' does not name a model; write package.module:factory"),
        ("zoo/models.py:build", UsageError, "write package.module:factory"),
        ("zoo.models:", UsageError, "write package.module:factory"),
        ("zoo.models:build()", UsageError, "write package.module:factory"),
        ("", UsageError, "write package.module:factory"),
        ("nowhere.models:build", UsageError, "there is no module 'nowhere'; looked in"),
        ("zoo.modles:build", UsageError, "there is no module 'zoo.modles'"),
        ("zoo.models:biuld", UsageError, "zoo.models has no 'biuld'; did you mean 'build'?"),
        ("zoo.models:Net.mkae", UsageError, "has no 'mkae'; did you mean 'make'?"),
        ("zoo.models:LIMIT", UsageError, "is of type int, not a function or class that builds a model"),
        ("zoo.models:MODEL", UsageError, "is of type Net, not a function or class that builds a model"),
        ("zoo.models:build_sized", UsageError, "needs arguments (size, depth); name a function that needs none"),
        ("zoo.models:build_number", InputError, "returned int, expected a torch.nn.Module"),
        ("zoo.models:build_badly", InputError, "raised RuntimeError: no disk"),
        ("zoo.broken:build", InputError, "importing 'zoo.broken' raised ZeroDivisionError"),
        ("zoo.script:build", InputError, "importing 'zoo.script' raised SystemExit: 2"),
        ("zoo.needy:build", InputError, "importing 'zoo.needy' failed: No module named 'no_such_dependency'"),
    ],
)
def test_each_mistake_is_named(spec: str, kind: type[Exception], message: str):
    with pytest.raises(kind) as caught:
        build_model(spec)
    assert message in str(caught.value)
    assert type(caught.value) is kind


def test_a_class_is_named_where_importing_gives_it_back():
    net = find_factory("zoo.models:Net")
    assert isinstance(net, type)
    assert name_class(net) == "zoo.models:Net"
    assert name_class(nn.Linear) is None, "needs arguments"
    assert name_class(type("Net", (net,), {"__module__": "zoo.models"})) is None, "another class of that name"

    class Local(nn.Module):
        pass

    assert name_class(Local) is None
    assert name_class(type("Main", (nn.Module,), {"__module__": "__main__"})) is None


def test_trust_covers_packages_not_prefixes():
    assert is_trusted("zoo.models", ["zoo"])
    assert is_trusted("zoo.models", ["other", "zoo.models"])
    assert not is_trusted("zoology.models", ["zoo"])
    assert not is_trusted("zoo", ["zoo.models"])
    assert not is_trusted("zoo", [])


@pytest.mark.parametrize(
    ("spec", "owner"),
    [
        ("zoo.models:build", "zoo.models"),
        ("zoo.models:Net", "zoo.models"),
        ("zoo.models:Net.make", "zoo.models"),
        ("zoo.models:made", "zoo.models"),
        ("zoo.models:nn.Identity", "torch.nn.modules.linear"),
        ("zoo.models:os.abort", "posix"),
        ("zoo.models:stopped", "posix"),
    ],
)
def test_the_owner_of_what_a_module_merely_imports_is_elsewhere(spec: str, owner: str):
    assert owner_of(spec) == owner
