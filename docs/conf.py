"""Sphinx: `sphinx-build -W --keep-going -n -b html docs OUT`, or `tox -e docs`."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import diagrams  # noqa: E402 - found once its directory is on the path
from sphinx.ext.napoleon import GoogleDocstring  # noqa: E402

from celery_idempotent import errors  # noqa: E402

project = "celery_idempotent"
author = "celery_idempotent contributors"
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True
# What Celery, redis-py and the standard library call their own has no page here to point to.
nitpick_ignore_regex = [
    ("py:.*", r"(celery|kombu|redis|inspect|datetime|collections|typing|types|pytest)\..*"),
    (
        "py:.*",
        r"(Task|Ignore|Reject|Worker|SpawnWorker|Any|Signature|timedelta|Iterator|Sequence|Collection|Callable|Mapping)",
    ),
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["pytest"]  # the store contract is made of tests; the pages need only their words
napoleon_google_docstring = napoleon_numpy_docstring = False  # `sections` below does it
napoleon_use_rtype = False
napoleon_custom_sections = [("Arguments", "params_style")]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "celery_idempotent"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_copy_source = False
# A copied session is what the reader types: without its prompts, and without what Python and the shell answer.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
html_show_sourcelink = False
# The pages load nothing from another host.
html_theme_options = {"footer_icons": [], "source_view_link": ""}


#: A name in single backquotes. Docstrings call the library's things by their last name.
NAMED = re.compile(r"(?<![`:\w])`([A-Za-z_.]+)`(?![`_])")
HOMES = dict.fromkeys(errors.__all__, "celery_idempotent.errors") | {
    "HeldLease": "celery_idempotent.core.lease",
    "HttpOptions": "celery_idempotent.http",
    "IdempotencyOptions": "celery_idempotent",
    "Policy": "celery_idempotent",
    "Unique": "celery_idempotent",
    "UniqueOptions": "celery_idempotent",
}
#: Modules and classes that the reference has no entry for.
INNER = {"celery_idempotent.stores.rules", "results.Codec"}


def _linked(match):
    name = match[1]
    if name in HOMES:
        return f":py:obj:`~{HOMES[name]}.{name}`"
    return f"``{name}``" if name in INNER else match[0]


def sections(app, what, name, obj, options, lines):
    """Read the sections of a docstring; one of an attribute is prose, in which a colon ends no type."""
    lines[:] = [NAMED.sub(_linked, line) for line in lines]
    if what not in ("attribute", "property", "data"):
        lines[:] = GoogleDocstring(lines, app.config, app, what, name, obj, options).lines()


def setup(app):
    """Draw the diagrams before the pages are read."""
    app.connect("autodoc-process-docstring", sections)
    diagrams.draw()
