"""Sphinx configuration; `make docs` builds with warnings as errors."""

from jaxft._version import __version__

project = "jaxft"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jaxft {release}"
exclude_patterns = ["performance/*.md", "_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_ivar = True
