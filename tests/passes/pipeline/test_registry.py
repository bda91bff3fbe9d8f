from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fxopt import known_passes
from fxopt.errors import UsageError
from fxopt.passes.contract import Pass
from fxopt.passes.pipeline import parse, registry
from fxopt.passes.sites import Goal, Numerics, Phase


@dataclass(frozen=True)
class ForeignPass(Pass):
    """Come from elsewhere.

    Before: anything
    """

    amount: float
    label: str = "x"
    numerics = Numerics.EXACT
    goal = Goal.SIZE
    phase = Phase.EVAL


class NotADataclass(Pass):
    pass


HERE = sys.modules[__name__]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch):
    """Give the registry these entry points, name to value, and this file under the name `foreign`."""
    monkeypatch.setitem(sys.modules, "foreign", HERE)

    def give(*pairs: tuple[str, str]) -> None:
        points = [EntryPoint(name, value, known_passes.GROUP) for name, value in pairs]
        for module in (known_passes, registry):
            monkeypatch.setattr(module, "entry_points", lambda: points)

    return give


def test_finds_a_foreign_pass(entries):
    entries(("foreign_pass", "foreign:ForeignPass"))
    assert registry.find_pass("foreign_pass") is ForeignPass
    info = registry.available()["foreign_pass"]
    assert (info.summary, info.numerics, info.goal, info.phase) == (
        "Come from elsewhere.",
        Numerics.EXACT,
        Goal.SIZE,
        Phase.EVAL,
    )
    assert info.options == (registry.Option("amount", "a number", None), registry.Option("label", "text", "x"))


def test_an_installed_distribution_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "foreign_module.py").write_text(
        "from dataclasses import dataclass\nfrom fxopt import Pass\n\n"
        "@dataclass(frozen=True)\nclass Installed(Pass):\n    depth: int = 2\n"
    )
    metadata = tmp_path / "foreign_distribution-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-distribution\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fxopt.passes]\ninstalled = foreign_module:Installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert known_passes.pass_names()["installed"] == "foreign-distribution"
        assert [str(p) for p in parse("installed{depth=3}")] == ["installed{depth=3}"]
    finally:
        sys.modules.pop("foreign_module", None)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("foreign_pass", "foreign:Absent", "cannot be loaded"),
        ("foreign_pass", "no_such_module:ForeignPass", "cannot be loaded"),
        ("not_a_dataclass", "foreign:NotADataclass", "is not a dataclass derived from fxopt.Pass"),
        ("foreign_pass", "foreign:HERE", "is not a dataclass derived from fxopt.Pass"),
        ("other_name", "foreign:ForeignPass", "must be registered as 'foreign_pass'"),
    ],
)
def test_a_broken_entry_point_is_named_and_listed_with_its_problem(entries, name, value, problem):
    entries((name, value))
    with pytest.raises(UsageError, match=problem) as caught:
        registry.find_pass(name)
    assert repr(name) in str(caught.value)
    assert problem in registry.available()[name].problem


def test_two_distributions_with_one_name(entries):
    entries(("foreign_pass", "foreign:ForeignPass"), ("foreign_pass", "foreign:NotADataclass"))
    with pytest.raises(UsageError, match="several distributions have a pass 'foreign_pass'"):
        registry.find_pass("foreign_pass")


def test_unknown_name(entries):
    entries(("foreign_pass", "foreign:ForeignPass"))
    with pytest.raises(UsageError, match=r"unknown pass 'foreing_pass'; did you mean 'foreign_pass'\?"):
        registry.find_pass("foreing_pass")
    with pytest.raises(UsageError, match=r"unknown pass '\.\./base'"):
        registry.find_pass("../base")


def test_own_passes_win_and_carry_their_file_name(entries):
    own = next(name for name, origin in known_passes.pass_names().items() if origin == "fxopt")
    entries((own, "foreign:ForeignPass"))
    assert registry.find_pass(own) is not ForeignPass
    for name, origin in known_passes.pass_names().items():
        if origin == "fxopt":
            found = registry.find_pass(name)
            assert f"{found.__module__}.".startswith(f"fxopt.transforms.{name}.")
            assert registry.available()[name].problem == ""


def test_presets_name_passes_that_exist():
    assert {
        member.partition("{")[0] for members in known_passes.PRESETS.values() for member in members
    } <= known_passes.pass_names().keys()


def test_options_of_presets_put_passes_in_the_place_of_what_presets_have():
    for preset, options in known_passes.PRESET_OPTIONS.items():
        for option, values in options.items():
            first, *others = (known_passes.members_of(preset, {option: value}) for value in values)
            assert first == known_passes.PRESETS[preset]
            for members in others:
                assert members != first
                assert {member.partition("{")[0] for member in members} <= known_passes.pass_names().keys()


def test_listing_imports_no_pass():
    code = (
        "import sys; from fxopt.known_passes import pass_names; pass_names(); "
        "print([m for m in sys.modules if m.startswith(('fxopt.transforms.', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_is_a_pass_if_its_front_door_names_the_class(monkeypatch, tmp_path):
    for name, text in {"a_pass": '__all__ = ["APass"]', "no_pass": "APass = 1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "in_a_file.py").write_text("\nclass InAFile(Pass): ...\n")
    transforms = importlib.import_module(known_passes.TRANSFORMS)
    monkeypatch.setattr(transforms, "__path__", [str(tmp_path)])
    assert known_passes.own_names() == ["a_pass", "in_a_file"]


def test_what_is_read_of_passes_is_what_they_say():
    described = registry.available()
    read = known_passes.own_summaries()
    assert all(read.values())
    assert read == {name: described[name].summary for name in known_passes.own_names()}
