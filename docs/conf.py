"""How sphinx builds these pages; the API's page comes from the docstrings of this checkout, read in `.venv`."""

import site
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The environment of the documents has sphinx; torch, and all else that fxopt imports, is in that of the checkout.
for packages in sorted((ROOT / ".venv").glob("lib/python*/site-packages")):
    site.addsitedir(str(packages))
# The checkout is the package, whatever its folder is called.
PACKAGES = tempfile.TemporaryDirectory(prefix="fxopt-docs-")
(Path(PACKAGES.name) / "fxopt").symlink_to(ROOT, target_is_directory=True)
sys.path.insert(0, PACKAGES.name)

project = "fxopt"
author = "The fxopt contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_default_options = {"member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Options", "params_style")]  # what passes call their fields
html_theme = "furo"
html_title = "fxopt"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]


def as_written(app, what, name, obj, options, lines):
    """Show what a pass does before and after, and what it refuses, as it stands in its docstring."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Before:")]
    if starts:
        start = starts[0]
        end = next((number for number in range(start, len(lines)) if not lines[number].strip()), len(lines))
        lines[start:end] = ["::", "", *(f"    {line}" for line in lines[start:end]), ""]


def setup(app):
    """Register the above before napoleon reads docstrings."""
    app.connect("autodoc-process-docstring", as_written, priority=400)
