"""The shape of the repository: imports go downwards, public names resolve, files stay small, packaging is complete."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_PACKAGE = {"tests", "benchmarks", "examples", "docs", "build", "dist"}

# From the top: each knows what stands below it, never what stands above or beside it.
HOUSE = (
    ("__main__",),
    ("cli",),
    ("__init__", "demo", "diagnosis", "dynamo_backend"),
    ("searching",),
    ("files",),
    ("api",),
    ("deploy", "reporting", "testing", "transforms"),
    ("passes",),
    ("tracing",),
    ("layers",),
    ("runtime",),
    ("cuda_ops",),
    ("operators",),
    ("compat", "known_passes", "pass_order", "storage"),
    ("collection", "decision_files", "freed_memory", "interrupts", "progress_bar", "settings"),
    ("errors",),
    ("version",),
)
ROOMS = {
    "tracing": (
        ("program",),
        ("rules",),
        ("trace",),
        ("proxies",),
        ("recording",),
        ("analyses", "isolation"),
        ("reads",),
        ("examples",),
    ),
    "runtime": (
        ("record",),
        ("state",),
        ("graphs",),
        ("guards",),
        ("values",),
    ),
    "passes": (
        ("driver",),
        ("cache",),
        ("pipeline",),
        ("contract",),
        ("kinds", "rewriting"),
        ("verification", "timing"),
        ("sites",),
    ),
}
NOT_MIRRORED = {"", "models", "support"}
"""Folders of tests that stand for no folder of the package: public functions, models of others, the net."""
LONG_FILE = 500
"""A longer file draws a warning: does it hold one idea?"""
LONGEST_FUNCTION = 50
MOST_FILES = 16
"""Files in one folder, its front door not counted."""


def sources() -> list[Path]:
    found = [p for p in ROOT.rglob("*.py") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    return sorted(p for p in found if p.relative_to(ROOT).parts[0] not in NOT_PACKAGE)


def module_name(path: Path) -> str:
    parts = ("fxopt", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def component(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def level(name: str, house: Sequence[Sequence[str]] = HOUSE) -> int:
    return next(-number for number, names in enumerate(house) if name in names)


@dataclass(frozen=True)
class Import:
    """One name that a file imports, by the parts of the module that it comes from, below `fxopt`."""

    file: Path
    line: int
    source: tuple[str, ...]
    name: str

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {'.'.join(self.source)}.{self.name}"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[Import]:
    """Return every import from fxopt in a file of the package: at the top, in functions and for annotations alike."""
    package = path.relative_to(ROOT).parts[:-1]
    found: list[Import] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "fxopt" for alias in node.names), f"{path}:{node.lineno}"
        if not isinstance(node, ast.ImportFrom):
            continue
        assert node.level or (node.module or "").split(".")[0] != "fxopt", f"{path}:{node.lineno}: absolute import"
        if node.level:
            above = package[: len(package) - node.level + 1]
            source = (*above, *(node.module.split(".") if node.module else ()))
            found += [Import(path, node.lineno, *_split(source, alias.name)) for alias in node.names]
    return found


@cache
def offered(folder: tuple[str, ...]) -> frozenset[str]:
    """Return the names that a folder's front door offers."""
    door = ROOT.joinpath(*folder, "__init__.py")
    text = door.read_text(encoding="utf-8") if door.exists() else ""
    listed = re.search(r"^__all__ = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'"(\w+)"', listed[1])) if listed else frozenset()


def _split(source: tuple[str, ...], name: str) -> tuple[tuple[str, ...], str]:
    """Return the module that a name is imported from; a module imported by its name is its own source."""
    if name in offered(source):
        return source, name
    return ((*source, name), "*") if (*source, name) in MODULES else (source, name)


FILES = sources()
MODULES = {tuple(module_name(p).split(".")[1:]) for p in FILES}
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def over(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a check of files: it goes over all of them and names each that fails."""

    def decorated(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            assert list(filter(None, (objection(check, path) for path in paths))) == []

        test.__doc__ = check.__doc__
        return test

    return decorated


def objection(check: Callable[[Path], None], path: Path) -> str:
    try:
        check(path)
    except (AssertionError, ImportError, SyntaxError) as error:
        return f"{path.relative_to(ROOT)}: {error}"
    return ""


each_file, each_test = over(FILES), over(TESTS)


def test_every_component_has_a_level():
    assert {component(p) for p in FILES} - {name for names in HOUSE for name in names} == set()


@pytest.mark.parametrize("folder", ROOMS)
def test_every_file_is_in_a_room(folder: str):
    inside = {path.relative_to(ROOT / folder) for path in FILES if component(path) == folder}
    assert {path.parts[0] for path in inside} - {"__init__.py"} == {r for rooms in ROOMS[folder] for r in rooms}


@each_file
def test_imports_go_downwards(path: Path):
    own = component(path)
    for found in imports(path):
        other = found.source[0] if found.source else "__init__"
        assert other == own or level(other) < level(own), found.place


@each_file
def test_imports_between_rooms_go_downwards(path: Path):
    folder, *inside = path.relative_to(ROOT).parts
    for found in imports(path) if folder in ROOMS and len(inside) > 1 else ():
        if found.source[0] == folder and found.source[1:2] != (inside[0],):
            assert len(found.source) > 1, f"{found.place}: import from the room"
            assert level(found.source[1], ROOMS[folder]) < level(inside[0], ROOMS[folder]), found.place


@each_file
def test_rooms_are_entered_by_their_front_door(path: Path):
    own = path.relative_to(ROOT).parts[:-1]
    for found in imports(path):
        deep = len(found.source) > 2 and found.source[0] in ROOMS and found.source[:2] != own[:2]
        assert not deep, f"{found.place}: import it from {'.'.join(found.source[:2])}"


@each_file
def test_passes_are_entered_by_their_front_door(path: Path):
    """A file of one pass imports from another pass's folder only what its front door offers."""
    own = path.relative_to(ROOT).parts[:-1]
    for found in imports(path):
        deep = len(found.source) > 2 and found.source[0] == "transforms" and found.source[:2] != own[:2]
        assert not deep, f"{found.place}: import it from {'.'.join(found.source[:2])}"


def test_a_pass_stands_in_the_file_of_its_name():
    """A pass is `transforms/<name>.py`, or `transforms/<name>/<name>.py` beside what it finds with and writes by."""
    from fxopt.known_passes import own_names

    parts = {path.relative_to(ROOT).with_suffix("").parts for path in FILES}
    places = {name: (("transforms", name), ("transforms", name, name)) for name in own_names()}
    assert [name for name, possible in places.items() if parts.isdisjoint(possible)] == []


def test_no_files_import_each_other_in_a_circle():
    graph = nx.DiGraph()
    for path in FILES:
        graph.add_edges_from((module_name(path), ".".join(("fxopt", *found.source))) for found in imports(path))
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_the_picture_of_the_architecture_is_the_code():
    """Compare the diagram with the imports between rooms and folders, without those that follow from others."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = re.search(r"```mermaid\n(.*?)```", page, re.DOTALL)
    assert picture is not None
    drawn = nx.DiGraph()
    for line in picture[1].splitlines():
        steps = [step.split(" & ") for step in line.strip().split(" --> ")]
        for tails, heads in itertools.pairwise(steps):
            drawn.add_edges_from(itertools.product(tails, heads))
    found = nx.DiGraph()
    for path in FILES:
        for each in imports(path):
            found.add_edge(place(path.relative_to(ROOT).with_suffix("").parts), place(each.source))
    found = found.subgraph(drawn.nodes | {room for rooms in ROOMS.values() for names in rooms for room in names}).copy()
    found.remove_edges_from(list(nx.selfloop_edges(found)))
    assert set(drawn.edges) == set(nx.transitive_reduction(found).edges)


def place(parts: tuple[str, ...]) -> str:
    """Return the room or folder that a module is in."""
    return parts[1] if len(parts) > 1 and parts[0] in ROOMS else parts[0] if parts else "__init__"


def test_no_folder_holds_too_many_files():
    counts = Counter(path.parent for path in FILES if path.name != "__init__.py" and path.parent != ROOT)
    assert [str(folder) for folder, count in counts.items() if count > MOST_FILES] == []


@each_file
def test_module_imports_and_its_public_names_resolve(path: Path):
    if path.name == "__main__.py":
        return
    if path.name.startswith("triton_") and importlib.util.find_spec("triton") is None:
        return
    module = importlib.import_module(module_name(path))
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), f"{module.__name__}.__all__ names {name}, which it lacks"


@each_file
def test_file_and_functions_are_short_and_described(path: Path):
    text, tree = path.read_text(encoding="utf-8"), parsed(path)
    if text.count("\n") > LONG_FILE:
        warnings.warn(f"{path} has {text.count(chr(10))} lines: does it hold one idea?", stacklevel=1)
    assert ast.get_docstring(tree) not in (None, "", "."), f"{path} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = (ast.get_docstring(node, clean=False) or "").count("\n")
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - documented
            assert length <= LONGEST_FUNCTION, f"{path}:{node.lineno}: {node.name} has {length} lines"


def test_no_public_name_hides_a_subpackage_or_module():
    import fxopt

    modules = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    clashes = {name for name in fxopt.__all__ if name in modules and not isinstance(getattr(fxopt, name), ModuleType)}
    assert not clashes


def test_public_functions_have_docstrings():
    import fxopt

    assert [name for name in fxopt.__all__ if callable(getattr(fxopt, name)) and not getattr(fxopt, name).__doc__] == []


def test_packaging_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {module_name(p) for p in FILES if p.name == "__init__.py"}
    assert sorted(listed) == sorted(folders)


def test_no_package_among_the_tests():
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not (ROOT / "conftest.py").exists()


@each_test
def test_tests_mirror_the_rooms(path: Path):
    folder = path.relative_to(ROOT / "tests").parent
    if path.name == "conftest.py" or "".join(folder.parts[:1]) in NOT_MIRRORED:
        return
    assert (ROOT / folder / "__init__.py").exists(), f"there is no {folder}/ that {path.name} could be a test of"
    assert str(folder) not in ROOMS, f"{path.name} belongs into a room of {folder}/"


def room(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the room that a module or a folder of tests belongs to: two floors deep where there are rooms."""
    return tuple(parts[: 2 if parts[:1] and parts[0] in (*ROOMS, "compat", "transforms") else 1])


@cache
def imports_of_test(path: Path) -> list[Import]:
    """Return every name that a test imports from fxopt, the modules among them, and those that its texts name."""
    found: list[Import] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fxopt":
            source = tuple((node.module or "").split(".")[1:])
            found += [Import(path, node.lineno, *_split(source, alias.name)) for alias in node.names]
        if isinstance(node, ast.Import):
            named = [alias.name.split(".") for alias in node.names]
            found += [Import(path, node.lineno, tuple(parts[1:]), "*") for parts in named if parts[0] == "fxopt"]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = [text.split(".")[1:] for text in re.findall(r"\bfxopt(?:\.\w+)+", node.value)]
            found += [Import(path, node.lineno, *_split(tuple(parts[:-1]), parts[-1])) for parts in named]
    return found


@each_test
def test_tests_enter_rooms_by_their_front_door(path: Path):
    """A test may look into the room that it is a test of, the folder of its name; any other it sees as users do."""
    own = room(path.relative_to(ROOT / "tests").parts[:-1])
    for found in imports_of_test(path):
        entered = room(found.source)
        if entered != own or not own:
            assert len(found.source) <= len(entered), f"{found.place}: import it from {'.'.join(entered)}"
            assert not found.name.startswith("_"), f"{found.place}: a private name of another room"


@each_test
def test_tests_read_no_private_name_of_a_module_of_another_room(path: Path):
    own = room(path.relative_to(ROOT / "tests").parts[:-1])
    modules = {
        each.source[-1]
        for each in imports_of_test(path)
        if each.source and each.name == "*" and room(each.source) != own
    }
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert not re.match("_[^_]", node.attr), f"{path}:{node.lineno}: {node.value.id}.{node.attr}"


def test_versions_agree():
    from fxopt.version import VERSION

    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_environment_is_read_in_settings_only():
    reader = re.compile(r"os\.(environ|getenv)")
    assert [str(p) for p in FILES if p.name != "settings.py" and reader.search(p.read_text(encoding="utf-8"))] == []


def test_private_torch_names_live_in_compat():
    """Names such as `torch._C` change from version to version, so few files hold them all."""
    private = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+")
    offenders = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if path.parts[len(ROOT.parts)] != "compat" and path.name != "runner.py"  # a script without fxopt
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line.split("#")[0]) and not line.lstrip().startswith(('"', "'", "`"))
    ]
    assert offenders == []


def test_files_that_are_imported_are_there():
    """Also those that only GPUs import."""
    wanted = {(str(path), found.line, ROOT.joinpath(*found.source)) for path in FILES for found in imports(path)}
    assert [each for each in wanted if not (each[2].with_suffix(".py").is_file() or each[2].is_dir())] == []
