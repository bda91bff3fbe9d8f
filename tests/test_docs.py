"""Every Python block in README and docs/ runs, in order, page by page; every link between pages leads somewhere."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from ranks import PRELOADED

import fxopt

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)(?P<target>[^)#\s]*)(?:#[^)]*)?\)")


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Return each Python block with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    found = [match for match in BLOCK.finditer(text) if match["language"] == "python"]
    return [(text.count("\n", 0, match.start("code")) + 1, match["code"]) for match in found]


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    # A module of their own, with the page's line numbers, so that dataclasses, pickling and tracebacks find them.
    lines: list[str] = []
    for number, code in python_blocks(page):
        lines += [""] * (number - 1 - len(lines)) + code.splitlines()
    name = f"page_{page.stem.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if any("init_process_group(" in line for line in lines):
        run_apart(tmp_path / f"{name}.py")
        return
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        importlib.import_module(name)
    except fxopt.UsageError as error:
        if "does not run here" not in str(error):
            raise
        pytest.skip(str(error))
    finally:
        sys.modules.pop(name, None)


def run_apart(path: Path) -> None:
    """Run a page in a process of its own: one that waits in a process group for ever is ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=run_page, args=(path, path.with_suffix(".txt")))
    process.start()
    process.join(120)
    is_late = process.is_alive()
    process.kill()
    process.join()
    said = path.with_suffix(".txt").read_text(encoding="utf-8")
    assert not is_late, f"it did not end: {said}"
    assert process.exitcode == 0, said


def run_page(path: Path, said: Path) -> None:
    with said.open("w", encoding="utf-8", buffering=1) as file, contextlib.redirect_stderr(file):
        faulthandler.dump_traceback_later(110, file=file)
        try:
            os.chdir(path.parent)
            sys.path.insert(0, str(path.parent))
            importlib.import_module(path.stem)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    broken = [m["target"] for m in LINK.finditer(text) if m["target"] and not (page.parent / m["target"]).exists()]
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_is_marked_as_such(page: Path):
    text = page.read_text(encoding="utf-8")
    known = {"python", "sh", "mermaid", "text", "toml", "json", "{toctree}", "{eval-rst}", "{math}", "diff"}
    assert {line[3:].strip() for line in text.splitlines() if re.match(r"```.", line)} <= known


def test_every_pass_has_a_page_and_a_row():
    from fxopt.known_passes import pass_names

    own = {name for name, origin in pass_names().items() if origin == "fxopt"}
    assert {p.stem for p in (ROOT / "docs" / "passes").glob("*.md")} - {"index"} == own
    for page in (ROOT / "README.md", ROOT / "docs" / "passes" / "index.md"):
        assert own <= _linked(page)
    index = (ROOT / "docs" / "passes" / "index.md").read_text(encoding="utf-8")
    ((_, listed),) = re.findall(r"```\{toctree\}\n((?::.*\n)*)\n([\s\S]*?)```", index)
    assert sorted(listed.split()) == sorted(own)


def test_every_pass_has_a_figure_of_its_own():
    """`make figures` makes them from the examples on the pages."""
    from fxopt.known_passes import pass_names

    for name in (name for name, origin in pass_names().items() if origin == "fxopt"):
        text = (ROOT / "docs" / "passes" / f"{name}.md").read_text(encoding="utf-8")
        assert f"(../pictures/passes/{name}.png)" in text
        assert (ROOT / "docs" / "pictures" / "passes" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    rooms = (path for path in ROOT.iterdir() if path.is_dir() and path.name not in ("tests", "docs", "benchmarks"))
    files = [*ROOT.glob("*.py"), *(file for room in rooms if room.name[0] != "." for file in room.rglob("*.py"))]
    said = "\n".join(
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE)
    parts = [part for message in messages for part in message.split("…") if len(part) > 3]
    assert len(messages) > 30
    assert [part for part in parts if part not in said] == []


def test_the_gallery_has_every_example():
    page = ROOT / "docs" / "gallery.md"
    linked = set(re.findall(r"\(\.\./examples/(\w+\.\w+)\)", page.read_text(encoding="utf-8")))
    assert linked == {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}


def test_the_first_screen_of_the_readme_has_both_commands():
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:20])
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", screen, re.MULTILINE)) == {"demo", "test"} <= targets


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_benchmarks_run_one_at_a_time():
    """All of them take hours: without a name, `make bench` runs none and builds nothing."""

    def printed(*arguments: str) -> str:
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout

    assert "python" not in printed("bench") and "pip" not in printed("bench")
    one = printed("bench", "BENCH=ensembles --cells 6")
    assert re.findall(r"benchmarks/(\w+\.py.*)", one) == ["ensembles.py --cells 6"]


def test_tables_of_benchmarks_are_what_their_files_hold(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("families", "ordinary_models", "exports", "dynamo_backend", "quantization")
    families, ordinary, exports, backend, quantization = map(importlib.import_module, names)
    results = {
        name: json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("families", "ordinary", "exports", "dynamo_backend", "quantization_avx2", "ordinary_avx2")
    }
    races = results["ordinary"]["races"]
    one, two = ({model: each[threads] for model, each in races.items() if threads in each} for threads in "12")
    written = {
        "families": families.table(results["families"]["models"]),
        "races": ordinary.race_table(one, 1),
        "races of two threads": ordinary.race_table(two, 2),
        "races with AVX2 alone": ordinary.race_table(
            {model: each["2"] for model, each in results["ordinary_avx2"]["races"].items()}, 2
        ),
        "exports": exports.table(results["exports"]["models"]),
        "dynamo_backend": backend.table(results["dynamo_backend"]["models"]),
        "quantization": quantization.table({row["case"]: row for row in results["quantization_avx2"]["cases"]}),
    }
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name, lines in written.items():
        ((_, shown),) = re.findall(rf"<!-- {name}: (.*) -->\n([\s\S]*?)<!-- /{name} -->", page)
        assert shown.strip() == "\n".join(lines).strip()


def test_the_api_page_has_every_public_name():
    from fxopt import diagnosis, testing

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted([*fxopt.__all__, *diagnosis.__all__, *testing.__all__])


def _linked(page: Path) -> set[str]:
    return {Path(match["target"]).stem for match in LINK.finditer(page.read_text(encoding="utf-8"))}


def test_the_tests_that_hold_the_promises_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "traceability.md").read_text())
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert named
    assert not missing
