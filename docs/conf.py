"""How sphinx builds these pages; it imports nothing of fxopt."""

project = "fxopt"
author = "The fxopt contributors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "fxopt"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
