"""The example notebook in a real kernel: a report is shown as a table with its plot, and a plot by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="make test-page installs nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_shows_the_table_and_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    (report,), (plot,) = ([each for each in outputs if each.output_type != "stream"] for outputs in cells)  # progress
    assert "1 rewrite applied for training" in report["data"]["text/html"]
    assert "src='data:image/png;base64,iVBOR" in report["data"]["text/html"]
    assert plot["data"]["image/png"].startswith("iVBOR")
