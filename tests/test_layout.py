"""The shape of the repository: imports go downwards, public names resolve, files stay small, packaging is complete."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_PACKAGE = {"tests", "benchmarks", "examples", "docs", "build", "dist"}

# Lower numbers know nothing of higher ones; names on one level do not import each other.
LEVELS = {
    "version": 0,
    "errors": 1,
    "compat": 2,
    "settings": 2,
    "storage": 2,
    "operators": 3,
    "cuda_ops": 4,
    "tracing": 5,
    "passes": 6,
    "layers": 7,
    "transforms": 8,
    "reporting": 8,
    "deploy": 8,
    "testing": 8,
    "api": 9,
    "arguments": 10,
    "demo": 10,
    "cli": 11,
    "__main__": 12,
    "__init__": 10,
}
LONGEST_FILE = 400
LONGEST_FUNCTION = 50


def sources() -> list[Path]:
    found = [p for p in ROOT.rglob("*.py") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    return sorted(p for p in found if p.relative_to(ROOT).parts[0] not in NOT_PACKAGE)


def module_name(path: Path) -> str:
    parts = ("fxopt", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def component(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported_components(path: Path) -> dict[str, int]:
    """Return the components of fxopt that a file imports, each with a line; imports for type checking do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    depth = len(path.relative_to(ROOT).parts)
    found: dict[str, int] = {}
    for node in runtime_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = ["fxopt, absolutely"] * ((node.module or "").split(".")[0] == "fxopt")
        elif isinstance(node, ast.Import):
            names = ["fxopt, absolutely"] * any(alias.name.split(".")[0] == "fxopt" for alias in node.names)
        else:
            continue
        found.update(dict.fromkeys(names, node.lineno))
    return found


def runtime_nodes(tree: ast.AST) -> list[ast.AST]:
    nodes: list[ast.AST] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        nodes.append(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return nodes


FILES = sources()
IDS = [str(p.relative_to(ROOT)) for p in FILES]
each_file = pytest.mark.parametrize("path", FILES, ids=IDS)


def test_every_component_has_a_level():
    assert {component(p) for p in FILES} - LEVELS.keys() == set()


@each_file
def test_imports_go_downwards(path: Path):
    own = component(path)
    for name, line in imported_components(path).items():
        assert name in LEVELS, f"{path}:{line} imports {name}"
        assert name == own or LEVELS[name] < LEVELS[own], f"{path}:{line}: {own} may not import {name}"


@each_file
def test_module_imports_and_its_public_names_resolve(path: Path):
    if path.name == "__main__.py":
        return
    module = importlib.import_module(module_name(path))
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), f"{module.__name__}.__all__ names {name}, which it lacks"


@each_file
def test_file_and_functions_are_short_and_described(path: Path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= LONGEST_FILE, f"{path} has {text.count(chr(10))} lines"
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


def test_versions_agree():
    from fxopt.version import VERSION

    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_environment_is_read_in_settings_only():
    reader = re.compile(r"os\.(environ|getenv)")
    assert [str(p) for p in FILES if p.name != "settings.py" and reader.search(p.read_text(encoding="utf-8"))] == []


def test_private_torch_names_live_in_compat():
    """Names such as `torch._C` change from version to version, so one file holds them all."""
    private = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+")
    offenders = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if path.name != "compat.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line.split("#")[0]) and not line.lstrip().startswith(('"', "'", "`"))
    ]
    assert offenders == []
