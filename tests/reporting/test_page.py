"""The page of a report in a browser: what is drawn, opened, found, and that nothing is asked of anybody."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.reporting.html import graphs_page
from fxopt.reporting.picture import picture_of_programs

playwright = pytest.importorskip("playwright.sync_api", reason="make test-page installs playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil=1'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield running
        running.close()


class Opened:
    """A page, with what it said and asked for."""

    def __init__(self, browser: Any, path: Path, where: str = "", width: int = 1280) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{path.as_uri()}{where}")
        self.page.wait_for_selector("#picture[data-ready]")

    def labels(self, side: str) -> list[str]:
        self.page.wait_for_timeout(100)
        return self.page.eval_on_selector_all(f".pane.{side} .box .label", "found => found.map(x => x.textContent)")

    def text(self, selector: str) -> str:
        return self.page.eval_on_selector(selector, "x => x.innerText ?? x.textContent")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x).mean((2, 3))
        return torch.stack([head(h) for head in self.heads]).sum(0)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = torch.randn(2, 3, 8, 8)
    fast = fxopt.optimize(Model().eval(), "fold_batchnorm,fuse_ensembles", example_inputs=(x,), measure=False)
    path = tmp_path_factory.mktemp("page") / "report.html"
    fxopt.report(fast, (x,)).to_html(path)
    return path


def written(path: Path, model: nn.Module, *inputs: torch.Tensor) -> Path:
    program = fxopt.capture(model, inputs)
    path.write_text(graphs_page(type(model).__name__, picture_of_programs(program)), encoding="utf-8")
    return path


def test_both_models_are_drawn_and_nothing_is_asked_of_anybody(browser: Any, report: Path):
    shown = Opened(browser, report)
    assert "stem: Sequential" in shown.labels("before")
    assert "heads.0 … heads.7: 8 Sequential" in shown.labels("before"), "members called alike are one box"
    assert "heads.0 … heads.7: 8 Sequential" not in shown.labels("after")
    assert all(url.startswith(("file:", "blob:")) for url in shown.asked)
    assert shown.said == []


def test_the_slider_goes_through_the_passes(browser: Any, report: Path):
    shown = Opened(browser, report, "#stage=1&open=stem")
    assert "after 1 of 2: fold_batchnorm" in shown.text(".bar-top")
    assert any("fold" in label.lower() for label in shown.labels("after"))
    assert "heads.0 … heads.7: 8 Sequential" in shown.labels("after"), "fuse_ensembles has not run at this stage"
    shown.page.keyboard.press("ArrowRight")
    assert "heads.0 … heads.7: 8 Sequential" not in shown.labels("after")
    shown.page.keyboard.press("ArrowLeft")
    shown.page.keyboard.press("ArrowLeft")
    assert shown.labels("after") == shown.labels("before")


def test_modules_open_and_a_click_shows_what_is_known(browser: Any, report: Path):
    shown = Opened(browser, report)
    shown.page.click(".pane.before .box:has-text('stem: Sequential') .opener")
    assert "1: BatchNorm2d" in shown.labels("before")
    shown.page.click(".pane.before .box:has-text('0: Conv2d')")
    details = shown.text(".panel")
    assert "cost of a call" in details.lower() and "float32[2, 8, 6, 6]" in details
    shown.page.click(".pane.before .box:has-text('stem: Sequential') >> nth=0", position={"x": 20, "y": 8})
    assert "fold_batchnorm: applied" in shown.text(".panel")


def test_search_finds_modules_sites_and_nodes_and_goes_there(browser: Any, report: Path):
    shown = Opened(browser, report)
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("batchnorm2d")
    shown.page.click(".found .link >> nth=0")
    shown.page.wait_for_selector(".box.picked")
    assert "BatchNorm2d" in shown.text(".pane.before .box.picked")
    assert "open=stem" in shown.page.url


def test_an_address_shows_the_same_again(browser: Any, report: Path):
    shown = Opened(browser, report, "#open=stem&node=stem/_1&heat=time")
    assert shown.page.locator(".pane.before .box.picked").count() == 1
    assert shown.page.eval_on_selector("select[aria-label=colour]", "x => x.value") == "time"
    assert "BatchNorm2d" in shown.text(".panel")
    wrong = Opened(browser, report, "#stage=99&open=nobody&node=a/b&heat=nothing")
    assert "stem: Sequential" in wrong.labels("before") and wrong.said == []


def test_all_decisions_and_costs_have_their_panels(browser: Any, report: Path):
    shown = Opened(browser, report)
    assert "fuse_ensembles" in shown.text(".panel")
    shown.page.click("[data-tab=sites]")
    assert "fold_batchnorm: applied" in shown.text(".panel")
    shown.page.click("[data-tab=costs]")
    assert shown.page.locator(".roofline circle").count() > 4
    assert "This machine" in shown.text(".panel")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(browser: Any, report: Path, width: int):
    shown = Opened(browser, report, width=width)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.labels("after")


def test_names_are_never_markup(browser: Any, tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module(EVIL.replace(".", "_"), nn.ReLU())
    shown = Opened(browser, written(tmp_path / "evil.html", model, torch.randn(1, 2)))
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("relu")
    shown.page.click(".found .link >> nth=0")
    assert "</script>" in shown.text(".panel")
    assert shown.page.evaluate("window.evil") is None


def test_a_model_without_any_graph_has_a_page(browser: Any, tmp_path: Path):
    class Opaque(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.numpy().copy())

    shown = Opened(browser, written(tmp_path / "opaque.html", Opaque(), torch.randn(1)))
    assert shown.said == []


def test_a_long_graph_is_drawn_where_it_is_looked_at(browser: Any, tmp_path: Path):
    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1500):
                x = torch.relu(x)
            return x

    path = written(tmp_path / "long.html", Long(), torch.randn(1))
    assert path.stat().st_size < 2**21
    shown = Opened(browser, path)
    drawn = shown.labels("after")
    assert "torch.relu" in drawn and len(drawn) < 200
    assert shown.page.evaluate("window.picturePage.view.level.boxes.length") == 1502


def test_a_result_hangs_on_what_it_is_put_together_of(browser: Any, tmp_path: Path):
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class HeadWithANameThatIsLongerThanTheWindowOfAPhone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return outputs.SequenceClassifierOutput(logits=self.head(x))

    x = torch.randn(1, 2)
    shown = Opened(
        browser, written(tmp_path / "r.html", HeadWithANameThatIsLongerThanTheWindowOfAPhone(), x), width=390
    )
    assert shown.labels("after") == ["x", "head: Linear", "output"]
    assert shown.page.eval_on_selector_all(".pane.after .edge", "found => found.length") == 2
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_names_end_before_the_sign_that_opens(browser: Any, tmp_path: Path):
    wide = type("M" * 12 + "W" * 20, (nn.Sequential,), {})
    shown = Opened(browser, written(tmp_path / "w.html", nn.Sequential(wide(nn.ReLU(), nn.ReLU())), torch.randn(1)))
    shown.labels("after")
    gaps = shown.page.evaluate(
        "[...document.querySelectorAll('.pane.after .box')].map((box) => ['.label', '.opener'].map((each) =>"
        " box.querySelector(each).getBBox())).filter(([, sign]) => sign.width).map(([name, sign]) =>"
        " sign.x - name.x - name.width)"
    )
    assert len(gaps) == 1 and gaps[0] > 0


def test_each_side_has_the_class_that_was_there(browser: Any, tmp_path: Path):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU()), torch.randn(4, 32)
    fast = fxopt.optimize(model.train(), "qat", example_inputs=x)
    fxopt.report(fast).to_html(tmp_path / "r.html")
    shown = Opened(browser, tmp_path / "r.html")
    assert "0: Linear" in shown.labels("before") and "0: FakeQuantizedLinear" in shown.labels("after")
    assert "0: Linear" not in shown.labels("after")
    assert shown.page.locator(".pane.after .box.changed").count() == 1
    shown.page.keyboard.press("ArrowLeft")
    assert "0: Linear" in shown.labels("after")
